"""Blocks: batch jobs that bring pilots, in messages between manager and factory.

The manager decides how many blocks there are (the provisioning seam). The *factory*, a separate process, submits,
watches and cancels them through a batch system, whose commands may take long or hang.
"""

from __future__ import annotations

import enum

import msgspec

from stoker.protocol.ids import BlockId


class Rule(enum.Enum):
    OPPORTUNISTIC = "opportunistic"
    """Take up to `most`, keep `keep_pending` of them in the queue while there is work."""
    DEMAND = "demand"
    """Submit as many as the waiting calls need to finish within `finish_within_s`."""
    FIXED = "fixed"
    """Keep `first` blocks."""
    ONCE = "once"
    """Submit `first` blocks and replace none."""


class Source(msgspec.Struct, frozen=True):
    """One way to get pilots, as a site file describes it. Times in seconds; 0 = no limit, or unknown. `nodes`: pilots
    that a block brings. `slots`: devices of a pilot. `kind`: their kind, if known."""

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
    ASKED = "asked"
    """Decided by the manager, not submitted yet."""
    PENDING = "pending"
    """In the batch system's queue, or held there."""
    RUNNING = "running"
    ENDED = "ended"
    """Done, cancelled, preempted, failed, or out of walltime."""
    REFUSED = "refused"

    @property
    def over(self) -> bool:
        return self in (BlockPhase.ENDED, BlockPhase.REFUSED)


class LossReason(enum.Enum):
    """Why a pilot ended although the manager did not release it."""

    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    """A person cancelled its job (`scancel`, `condor_rm`)."""
    VACATED = "vacated"
    """A person or a policy of the pool sent its job back to the queue (`condor_vacate`, a drained node)."""
    HELD = "held"
    """The batch system put its job on hold."""
    NODE_LOST = "node lost"
    """Its node failed, or the batch system's daemon there did."""
    SCRATCH_GONE = "scratch folder gone"
    """Removed by its node, or by a call that clears more than its own."""
    WALLTIME = "out of walltime"
    OUT_OF_MEMORY = "out of memory"
    """Its job took more than it was granted, or than the node had."""
    SIGNALLED = "told to end by a signal"
    """It got SIGTERM, and the batch system does not say why."""
    UNEXPLAINED = "unexplained"
    """It fell silent or its process died, and the batch system does not say why."""

    @property
    def explained(self) -> bool:
        """True if the cause is outside the calls that ran there."""
        return self not in (LossReason.OUT_OF_MEMORY, LossReason.SCRATCH_GONE, LossReason.UNEXPLAINED)

    @property
    def is_vague(self) -> bool:
        """True if the end of a walltime explains the loss better."""
        return self in (LossReason.SIGNALLED, LossReason.UNEXPLAINED)


class PilotEnd(enum.Enum):
    LOST = "lost"
    """See `LossReason`."""
    WALLTIME = "walltime"
    """Its walltime ended, or was about to."""
    LET_GO = "let go"
    """The manager released it: it was idle, or the session ended."""


class BlockOrder(msgspec.Struct, frozen=True):
    """Submit this block."""

    block: BlockId
    source: str


class KnownBlock(msgspec.Struct, frozen=True):
    """A block that is not over, sent to a factory that has just started."""

    block: BlockId
    source: str
    phase: BlockPhase
    job: str = ""


class BlockStatus(msgspec.Struct, frozen=True):
    """A block in `stoker status`. `since_s`: in its phase. `expected_in_s`: until its expected start (0 = unknown).
    `reason`: in the batch system's words. `emptied_s`: how long its job has run without the pilots that it had (0 = it
    has some, or had none). `leaving`: its job is cancelled."""

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
