"""Lost pilots: counted when they go, each with the reason that the batch system gives for it.

The manager notices that a pilot is gone within seconds. Why it went is known later: the batch system shows it at its
next listing. So a loss is counted at once, with what is known by then, and *settled* when the batch system has named a
reason, or after `SETTLE_S`. `Pilot.loss` holds the reason so far; `explained` answers once the loss is settled.
"""

from __future__ import annotations

from typing import TypeGuard

from stoker.manager.core import suspects, walltime
from stoker.manager.core.commands import RecordStay
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Pilot
from stoker.manager.core.sources import Block
from stoker.manager.core.state import State
from stoker.protocol.blocks import LossReason, PilotEnd
from stoker.protocol.ids import BlockId

SETTLE_S = 60.0
"""A loss that the batch system has not explained for so long stays unexplained."""


def explained(pilot: Pilot) -> bool | None:
    """Whether a lost pilot went for a cause outside of the calls that it ran; None while that is not known yet."""
    if pilot.loss is None or not pilot.loss_settled:
        return None
    return pilot.loss.explained


def by_reason(state: State) -> dict[str, int]:
    """How many pilots were lost for each reason, in words."""
    return {reason.value: count for reason, count in state.losses.items() if count}


def lost(manager: Manager, pilot: Pilot, loss: LossReason) -> None:
    """Count a lost pilot. A reason that its batch system has given already replaces `loss`."""
    state = manager.state
    block = state.block_of(pilot)
    said = block.loss if block is not None else None
    loss = said or loss
    pilot.loss, pilot.lost_at, pilot.loss_settled = loss, state.now, False
    _count(state, loss, 1)
    if said is not None or block is None or block.phase.over:
        _settle(manager, pilot, loss)
    else:
        block.unsettled[pilot.id] = pilot
        manager.set_timer(f"loss/{block.id}", state.now + SETTLE_S)


def back(manager: Manager, pilot: Pilot) -> None:
    """A pilot that counted as lost has come back: it was not."""
    if pilot.loss is None:
        return
    _count(manager.state, pilot.loss, -1)
    block = manager.state.block_of(pilot)
    if block is not None:
        block.unsettled.pop(pilot.id, None)
    pilot.loss, pilot.loss_settled = None, False
    suspects.back(manager.state, pilot)


def block_said(manager: Manager, block: Block) -> None:
    """The batch system has named a reason for the losses of a block, or the block is over and it will name none."""
    if block.loss is not None or block.phase.over:
        settle_all(manager, block)


def due(manager: Manager, id: str) -> None:
    """Nobody has explained the losses of a block in time."""
    block = manager.state.blocks.get(BlockId(id))
    if block is not None:
        settle_all(manager, block)


def settle_all(manager: Manager, block: Block) -> None:
    """Settle the losses of a block with the reason that is known now."""
    pilots, block.unsettled = block.unsettled, {}
    for pilot in pilots.values():
        assert pilot.loss is not None
        _settle(manager, pilot, block.loss or pilot.loss)


def record_departure(manager: Manager, pilot: Pilot) -> None:
    """Remember the stay of a pilot that was let go, or left by itself."""
    end = PilotEnd.WALLTIME if walltime.is_near_its_end(pilot, manager.state.now) else PilotEnd.LET_GO
    _record(manager, pilot, manager.state.now, end, None)


def _settle(manager: Manager, pilot: Pilot, loss: LossReason) -> None:
    """The reason of a loss will not change any more."""
    state = manager.state
    if loss.is_vague and walltime.is_near_its_end(pilot, pilot.lost_at):
        loss = LossReason.WALLTIME
    if loss is not pilot.loss:
        assert pilot.loss is not None
        _count(state, pilot.loss, -1)
        _count(state, loss, 1)
        pilot.loss = loss
    pilot.loss_settled = True
    suspects.settled(manager, pilot)
    block = state.block_of(pilot)
    said = f"; block {block.id}'s job {block.job} was {block.reason}" if loss.explained and _is_told(block) else ""
    pilot.note(state.now, f"counted as lost: {loss.value}{said}")
    _record(manager, pilot, pilot.lost_at, PilotEnd.WALLTIME if loss is LossReason.WALLTIME else PilotEnd.LOST, loss)


def _record(manager: Manager, pilot: Pilot, until: float, end: PilotEnd, loss: LossReason | None) -> None:
    if pilot.source:
        manager.out.append(RecordStay(pilot.source, until - pilot.notes[0][0], end, loss))


def _is_told(block: Block | None) -> TypeGuard[Block]:
    """True if the batch system has said how the job of a block ended, in words that follow "was"."""
    return block is not None and block.loss in (LossReason.CANCELLED, LossReason.PREEMPTED) and bool(block.reason)


def _count(state: State, loss: LossReason, change: int) -> None:
    state.losses[loss] = state.losses.get(loss, 0) + change
