"""Where pilots come from: the sources that site files name, and the blocks that were asked of them."""

from __future__ import annotations

from stoker.manager.core.nouns import Pilot
from stoker.protocol.blocks import BlockPhase, LossReason, Source
from stoker.protocol.ids import BlockId, PilotId
from stoker.protocol.to_manager import DeviceFacts

# The last so many notes of a block are kept, and its first.
KEPT_BLOCK_NOTES = 50


class SourceState:
    """A source of pilots, and how it has done lately."""

    __slots__ = (
        "abandoned", "blocks", "coming", "devices", "failed_at", "failures", "filling", "held_for", "hold",
        "last_failure", "short_lived", "source", "staying", "stopped", "trouble", "useless",
    )  # fmt: skip

    def __init__(self, source: Source) -> None:
        self.source = source
        self.blocks: dict[BlockId, Block] = {}
        """Those that are not over."""
        self.abandoned: dict[BlockId, None] = {}
        """Of these, those whose jobs are cancelled because their pilots were lost: a batch system that misses the node
        may say for long that they run, and they stand in nobody's way."""
        self.staying: dict[BlockId, None] = {}
        """Blocks that were not let go."""
        self.coming: dict[BlockId, None] = {}
        """Of these in turn, those from which pilots may still come."""
        self.filling: dict[BlockId, None] = {}
        """Of those that stay, those that have brought some of their pilots: of several nodes, or tasks of an array."""
        self.devices: tuple[DeviceFacts, ...] = ()
        """What the last pilot had that came from here."""
        self.failures = 0
        """Blocks that were refused or brought no pilot, since one did."""
        self.short_lived = 0
        """Blocks whose pilots died young and had loaded nothing, since one loaded something or grew old."""
        self.failed_at = 0.0
        self.last_failure = ""
        self.useless = False
        """Whether the last failure was a block whose pilots came, without a device that can be used."""
        self.held_for = ""
        """What its last block was held for by the batch system; empty once a block ended otherwise."""
        self.hold = ""
        """That hold in the batch system's words, and what to do about it."""
        self.stopped = ""
        """Why no block is asked of it any more, and what to do; empty while it goes on."""
        self.trouble = ""
        """What is wrong with its batch system just now, in that one's words."""

    @property
    def room(self) -> int:
        """How many more blocks it may have. Abandoned ones leave their room to others, up to as many again."""
        most = self.source.most
        return min(most - (len(self.blocks) - len(self.abandoned)), 2 * most - len(self.blocks))


class Block:
    """A batch job that brings pilots, or is to."""

    __slots__ = (
        "abandoned", "brought", "brought_at", "emptied_at", "expected_at", "held_for", "holds", "id", "job", "leaving",
        "loss", "notes", "phase", "pilots", "proved", "reason", "since", "source", "unsettled",
    )  # fmt: skip

    def __init__(self, id: BlockId, source: SourceState, now: float) -> None:
        self.id = id
        self.source = source
        self.phase = BlockPhase.ASKED
        self.since = now
        self.job = ""
        self.reason = ""
        self.expected_at = 0.0
        self.emptied_at: float | None = None
        """When the last of its pilots went although its job runs; None while one is here or may still come."""
        self.held_for = ""
        """What its job was last held for by the batch system; empty if it was not."""
        self.holds = 0
        """How often the batch system has held its job."""
        self.abandoned = False
        """Whether it was let go because of that."""
        self.loss: LossReason | None = None
        """Why its job does not run any more, in the batch system's view; None: it runs, or nobody says."""
        self.unsettled: dict[PilotId, Pilot] = {}
        """Lost pilots of its for which the batch system has not named the reason yet (see `losses`)."""
        self.leaving = ""
        """Why it was let go; empty while it was not."""
        self.pilots: dict[PilotId, None] = {}
        """Those that are here (or cut off)."""
        self.brought = 0
        """Pilots that ever came from it."""
        self.brought_at = 0.0
        """When the first of them came."""
        self.proved = False
        """Whether something was loaded on one of them."""
        self.notes: list[tuple[float, str]] = [(now, f"asked of source {source.source.name}")]

    def note(self, now: float, text: str) -> None:
        """Remember something for the block's story."""
        self.notes.append((now, text))
        del self.notes[1:-KEPT_BLOCK_NOTES]

    def found(self, now: float) -> None:
        """It was not asked for, as far as the manager knows: its story begins when it was found."""
        self.notes[:1] = [(now, f"found in the batch system of source {self.source.source.name}")]

    @property
    def staying(self) -> bool:
        """Whether it was not let go."""
        return not self.leaving

    @property
    def coming(self) -> bool:
        """Whether pilots may still come from it."""
        return not self.leaving and not self.pilots and self.emptied_at is None

    @property
    def filling(self) -> bool:
        """Whether it runs and has brought some of its pilots, not all."""
        return not self.coming and not self.leaving and 0 < self.brought < self.source.source.nodes
