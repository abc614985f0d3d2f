"""Blocks (batch jobs that start pilots) in messages between manager and factory.

The manager decides the number of blocks. The *factory*, a separate process, submits, watches and cancels them.
"""

from __future__ import annotations

import enum
import re

import msgspec

from stoker.protocol.ids import BlockId


class Rule(enum.Enum):
    OPPORTUNISTIC = "opportunistic"
    """Run up to `most` blocks. While calls wait, keep `keep_pending` of them in the batch system's queue."""
    DEMAND = "demand"
    """Submit as many blocks as the waiting calls need to finish within `finish_within_s`."""
    FIXED = "fixed"
    """Keep `first` blocks running: replace lost ones."""
    ONCE = "once"
    """Submit `first` blocks, and replace no lost ones."""


class Source(msgspec.Struct, frozen=True):
    """A site and its rule for the number of blocks. Times in seconds (0: no limit or unknown). `nodes`: pilots per
    block. `slots`: devices per pilot. `kind`: the devices' kind, if known. `exclude_nodes`: most nodes excluded at once
    (0: its batch system cannot exclude nodes, or the site forbids it); `probe_nodes_s`: time between probes of one.
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
    exclude_nodes: int = 0
    probe_nodes_s: float = 3600.0


class BlockPhase(enum.Enum):
    ASKED = "asked"
    """Requested by the manager, not submitted yet."""
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
    """A person or a policy of the pool returned its job to the queue (`condor_vacate`, a drained node)."""
    HELD = "held"
    """The batch system held its job."""
    NODE_LOST = "node lost"
    """Its node, or the batch system's daemon there, failed."""
    SCRATCH_GONE = "scratch folder gone"
    """The node or a call removed its scratch folder."""
    WALLTIME = "out of walltime"
    OUT_OF_MEMORY = "out of memory"
    """Its job used more memory than it was granted, or than the node had."""
    SIGNALLED = "told to end by a signal"
    """It got SIGTERM, and the batch system gives no reason."""
    UNEXPLAINED = "unexplained"
    """It became silent or its process died, and the batch system gives no reason."""

    @property
    def explained(self) -> bool:
        """True if the calls that ran on the pilot cannot be the cause."""
        return self not in (LossReason.OUT_OF_MEMORY, LossReason.SCRATCH_GONE, LossReason.UNEXPLAINED)

    @property
    def is_unspecific(self) -> bool:
        """True if an end of the walltime explains the loss better."""
        return self in (LossReason.SIGNALLED, LossReason.UNEXPLAINED)


class PilotEnd(enum.Enum):
    LOST = "lost"
    """See `LossReason`."""
    WALLTIME = "walltime"
    """Its walltime ended, or was about to end."""
    LET_GO = "let go"
    """The manager released it: it was idle, or the session ended."""


class AllowedNodes(msgspec.Struct, frozen=True):
    """The nodes on which a block's job may run: none in `exclude`. `only`: the one node of a probe; empty: any node."""

    exclude: tuple[str, ...] = ()
    only: str = ""


ANYWHERE = AllowedNodes()


class BlockOrder(msgspec.Struct, frozen=True):
    block: BlockId
    source: str
    allowed: AllowedNodes = ANYWHERE


class KnownBlock(msgspec.Struct, frozen=True):
    """A block that is not over, for a new factory."""

    block: BlockId
    source: str
    phase: BlockPhase
    job: str = ""
    allowed: AllowedNodes = ANYWHERE


FORGET_NODE_S = 7 * 86400.0
"""Seconds without news after which a node that failed is forgotten."""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def is_node_name(name: str) -> bool:
    """True if a text can be a node's name in a submit script."""
    return _NODE.fullmatch(name) is not None


class NodeRecord(msgspec.Struct, frozen=True):
    """A node of a site that failed. Of two records of a node, the later one counts. Times are seconds since 1970.

    `excluded`: no block may start there. `why`: the fault, or why the node may be used again. `since`: when it was
    excluded. `at`: when this record was made. `heard_at`: when its devices last failed or worked. `probed_at`: when its
    last probe was submitted (0: never); `said`: that probe's answer. `probes`, `probe_s`: number of its probes, and
    seconds that they used the node.
    """

    source: str
    node: str
    excluded: bool
    why: str
    since: float
    at: float
    heard_at: float
    probed_at: float = 0.0
    said: str = ""
    probes: int = 0
    probe_s: float = 0.0


class BlockStatus(msgspec.Struct, frozen=True):
    """A block in `stoker status`. `since_s`: seconds in its phase. `expected_in_s`: seconds until its expected start
    (0: unknown). `reason`: the batch system's words. `emptied_s`: seconds since its job lost all its pilots (0: it has
    pilots, or never had any). `leaving`: its job is being cancelled. `probes`: the excluded node that it tests.
    """

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
    probes: str = ""
