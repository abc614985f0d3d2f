"""Blocks (batch jobs that start pilots) in messages between manager and factory.

The manager decides the number of blocks. The *factory*, a separate process, submits, monitors and cancels blocks.
"""

from __future__ import annotations

import enum
import re

import msgspec

from stoker.protocol.ids import BlockId


class ProvisioningRule(enum.Enum):
    OPPORTUNISTIC = "opportunistic"
    """Run up to `most` blocks. While calls wait, keep `keep_pending` blocks in the batch system's queue."""
    DEMAND = "demand"
    """Submit as many blocks as the waiting calls need to finish within `finish_within_s`."""
    FIXED = "fixed"
    """Keep `first` blocks running, and replace lost blocks."""
    ONCE = "once"
    """Submit `first` blocks, and do not replace lost blocks."""


class Source(msgspec.Struct, frozen=True):
    """A site and its rule for the number of blocks. Times in seconds (0: no limit or unknown). `nodes`: pilots per
    block. `slots`: devices per pilot. `exclude_nodes`: maximum number of excluded nodes (0: none). `probe_nodes_s`:
    time between two probes of an excluded node."""

    name: str
    rule: ProvisioningRule = ProvisioningRule.FIXED
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
    """The manager has requested the block, and the factory has not submitted the job yet."""
    PENDING = "pending"
    """The job is queued or held in the batch system."""
    RUNNING = "running"
    ENDED = "ended"
    """The job is done, cancelled, preempted, failed, or out of walltime."""
    REFUSED = "refused"

    @property
    def is_over(self) -> bool:
        return self in (BlockPhase.ENDED, BlockPhase.REFUSED)


class LossReason(enum.Enum):
    """Why a pilot ended although the manager had not released it."""

    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    """A person cancelled the pilot's job (`scancel`, `condor_rm`)."""
    VACATED = "vacated"
    """The pilot's job was requeued, by a person or by a policy of the pool (`condor_vacate`, a drained node)."""
    HELD = "held"
    NODE_LOST = "node lost"
    """The pilot's node, or the batch system's daemon on that node, failed."""
    SCRATCH_GONE = "scratch folder gone"
    """The node or a call removed the pilot's scratch folder."""
    WALLTIME = "out of walltime"
    OUT_OF_MEMORY = "out of memory"
    """The pilot's job used more memory than the batch system granted, or than the node had."""
    SIGNALLED = "told to end by a signal"
    """The pilot received SIGTERM, and the batch system reports no reason."""
    UNEXPLAINED = "unexplained"
    """The pilot became silent or its process died, and the batch system reports no reason."""

    @property
    def is_explained(self) -> bool:
        """True if the calls on the pilot cannot have caused the loss."""
        return self not in (LossReason.OUT_OF_MEMORY, LossReason.SCRATCH_GONE, LossReason.UNEXPLAINED)

    @property
    def is_unspecific(self) -> bool:
        """True if the reason is vague. If the walltime had ended, the end of the walltime is then a better reason."""
        return self in (LossReason.SIGNALLED, LossReason.UNEXPLAINED)


class PilotEnd(enum.Enum):
    LOST = "lost"
    WALLTIME = "walltime"
    """The pilot's walltime ended, or was about to end."""
    RELEASED = "let go"
    """The manager released the pilot, because it was idle or the session ended."""


class AllowedNodes(msgspec.Struct, frozen=True):
    """The nodes on which a block may run. `exclude`: forbidden nodes. `only`: the node that a probe tests (empty: any
    node).
    """

    exclude: tuple[str, ...] = ()
    only: str = ""


ANYWHERE = AllowedNodes()


class BlockOrder(msgspec.Struct, frozen=True):
    block: BlockId
    source: str
    allowed: AllowedNodes = ANYWHERE


class KnownBlock(msgspec.Struct, frozen=True):
    block: BlockId
    source: str
    phase: BlockPhase
    job: str = ""
    allowed: AllowedNodes = ANYWHERE


FORGET_NODE_S = 7 * 86400.0
"""Seconds without a new record after which a failed node is forgotten."""
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def is_node_name(name: str) -> bool:
    return _NODE.fullmatch(name) is not None


class NodeRecord(msgspec.Struct, frozen=True):
    """The newest state of a node that has failed. Times are seconds since 1970. `why`: the fault, or why the node is
    usable again. `since`: start of the exclusion. `at`: time of this record. `heard_at`: last time the node's devices
    failed or worked. `probed_at`: submission of the last probe (0: none). `said`: result of the last probe. `probes`,
    `probe_s`: number and total seconds of probes.
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
    """A block in `stoker status`. `since_s`: seconds in this phase. `expected_in_s`: seconds until the expected start
    (0: unknown). `reason`: the batch system's reason. `emptied_s`: seconds since the job lost its last pilot (0:
    never). `leaving`: True while the block is being cancelled. `probes`: node that the block tests.
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
