"""Blocks: batch jobs that bring pilots. What manager and factory say of them to each other.

The manager decides how many there should be (the provisioning seam); the *factory*, a process beside it, submits,
watches and cancels them through a batch system, whose commands may take long or hang.
"""

from __future__ import annotations

import enum

import msgspec

from stoker.protocol.ids import BlockId


class Rule(enum.Enum):
    """How many blocks a source should have."""

    OPPORTUNISTIC = "opportunistic"
    """Take up to `most`, keep `keep_pending` of them in the queue while there is work."""
    DEMAND = "demand"
    """As many as the waiting calls need to be done within `finish_within_s`."""
    FIXED = "fixed"
    """`first`, always."""
    ONCE = "once"
    """`first`, once: none is replaced."""


class Source(msgspec.Struct, frozen=True):
    """One way to get pilots, as a site file describes it. Times in seconds.

    `nodes`: pilots that a block brings. `walltime_s`: how long a block may last (0 = no limit). `slots`: devices of a
    pilot as far as the site file says (0 = not known before the first has come); `kind`: their kind, if known.
    """

    name: str
    rule: Rule = Rule.FIXED
    first: int = 1
    least: int = 0
    most: int = 1
    keep_pending: int = 2
    idle_s: float = 120.0
    finish_within_s: float = 600.0
    nodes: int = 1
    walltime_s: float = 0.0
    slots: int = 0
    kind: str = ""


class BlockPhase(enum.Enum):
    """What has become of a block."""

    ASKED = "asked"
    """Decided by the manager; the factory has not submitted it yet."""
    PENDING = "pending"
    """In the batch system's queue (or held there)."""
    RUNNING = "running"
    """The job runs."""
    ENDED = "ended"
    """The job is over: done, cancelled, preempted, failed, or out of walltime."""
    REFUSED = "refused"
    """The batch system did not take it."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self in (BlockPhase.ENDED, BlockPhase.REFUSED)


class LossReason(enum.Enum):
    """Why a pilot was lost: it ended although the manager did not let it go."""

    PREEMPTED = "preempted"
    """The batch system gave its resources to another job."""
    CANCELLED = "cancelled"
    """A person cancelled its job (`scancel`, `condor_rm`)."""
    VACATED = "vacated"
    """A person or a policy of the pool sent its job back to the queue (`condor_vacate`, a drained node)."""
    HELD = "held"
    """The batch system put its job on hold."""
    NODE_LOST = "node lost"
    """Its node failed, or the batch system's daemon there did."""
    SCRATCH_GONE = "scratch folder gone"
    """Its scratch folder was removed while it lived: by its node, or by a call that clears more than its own."""
    WALLTIME = "out of walltime"
    """The walltime of its job ended before the pilot did."""
    OUT_OF_MEMORY = "out of memory"
    """Its job took more memory than it was granted, or than the node had."""
    SIGNALLED = "told to end by a signal"
    """It got SIGTERM, ended in good order, and the batch system does not say why."""
    UNEXPLAINED = "unexplained"
    """It fell silent or its process died, and the batch system does not say why."""

    @property
    def explained(self) -> bool:
        """True if the loss has a cause outside of the calls that ran there."""
        return self not in (LossReason.OUT_OF_MEMORY, LossReason.SCRATCH_GONE, LossReason.UNEXPLAINED)

    @property
    def is_vague(self) -> bool:
        """True if the end of a walltime explains the loss better."""
        return self in (LossReason.SIGNALLED, LossReason.UNEXPLAINED)


class PilotEnd(enum.Enum):
    """How it ended that a pilot was here."""

    LOST = "lost"
    """Nobody meant it to go: see `LossReason`."""
    WALLTIME = "walltime"
    """Its walltime was over, or about to be."""
    LET_GO = "let go"
    """It was of no more use, or the session ended: it might have stayed."""


class BlockOrder(msgspec.Struct, frozen=True):
    """Submit this block of this source."""

    block: BlockId
    source: str


class KnownBlock(msgspec.Struct, frozen=True):
    """A block that is not over, as the manager knows it: said to a factory that has just come."""

    block: BlockId
    source: str
    phase: BlockPhase
    job: str = ""


class BlockStatus(msgspec.Struct, frozen=True):
    """A block in `stoker status`. `since_s`: how long it has been in its phase; `expected_in_s`: until the batch system
    expects to start it (0 = it does not say); `reason`: in the batch system's words. `emptied_s`: how long its job has
    run on without the pilots that it had (0 = it has some, or brought none yet); `leaving`: its job is cancelled."""

    block: str
    source: str
    phase: str
    job: str
    reason: str
    since_s: float
    expected_in_s: float
    pilots: tuple[str, ...]
    emptied_s: float = 0.0
    leaving: bool = False
