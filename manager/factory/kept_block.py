"""A block as its keeper holds it, from its order until it is over."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.protocol.blocks import BlockPhase, LossReason
from stoker.protocol.ids import BlockId

CANCEL_AGAIN_S = 30.0
"""A job that a cancellation did not end is cancelled again after this long."""


@dataclass(slots=True)
class KeptBlock:
    """A block that is not over. `told` is what the manager was told last; `again` why it waits although it has run,
    `loss` the same as a reason; `cancel` why it is to be cancelled."""

    block: BlockId
    job: str = ""
    phase: BlockPhase = BlockPhase.ASKED
    told: tuple[BlockPhase, str, str, LossReason | None, int] | None = None
    expected_at: float = 0.0
    again: str = ""
    loss: LossReason | None = None
    cause: str = ""
    advice: str = ""
    holds: int = 0
    is_unknown: bool = False
    """Whether the manager did not know of it: it is told the source."""
    cancel: str = ""
    cancelled_at: float = 0.0
    tried: bool = False
    """Whether it was submitted, with or without an answer."""

    def is_to_cancel(self, now: float) -> bool:
        """Whether a cancellation is due: the first one, or another one because the last had no effect."""
        if not self.cancel:
            return False
        return not self.job or not self.cancelled_at or now - self.cancelled_at >= CANCEL_AGAIN_S
