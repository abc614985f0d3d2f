"""What the factory says of blocks."""

from __future__ import annotations

from stoker.manager.core import block_orders, blocks, losses, pilot_states
from stoker.manager.core.manager import Manager
from stoker.manager.core.phases import PilotState
from stoker.manager.core.sources import Block
from stoker.manager.core.state import JOURNAL_LOST
from stoker.manager.protocol import to_client
from stoker.manager.protocol.blocks import BlockPhase
from stoker.manager.protocol.to_manager import BlockNews, SourceTrouble

# So many blocks that are over are kept for their stories.
KEPT_BLOCKS = 1000

_KEPT_NOTES = 50


def news(manager: Manager, message: BlockNews) -> None:
    """The batch system has said something about a block."""
    state = manager.state
    block = state.blocks.get(message.block) or _adopted(manager, message)
    if block is None:
        return
    if message.source not in ("", block.source.source.name):
        state.refuse("news of a block of another source")
        return
    block.job = message.job or block.job
    block.expected_at = state.now + message.expected_in_s if message.expected_in_s > 0 else 0.0
    if message.phase is not block.phase or message.reason != block.reason:
        said = f" as job {block.job}" if block.job and block.phase is BlockPhase.ASKED else ""
        block.notes.append((state.now, f"{message.phase.value}{said}{f': {message.reason}' if message.reason else ''}"))
        del block.notes[1:-_KEPT_NOTES]
    block.loss = message.loss or (None if message.phase is BlockPhase.RUNNING else block.loss)
    if message.phase is not block.phase:
        blocks.enter(manager, block, message.phase)
    block.reason = message.reason
    if message.cause and not block.held_for:
        _held(manager, block, message)
    if block.phase.over:
        _over(manager, block)
    losses.block_said(manager, block)


def _held(manager: Manager, block: Block, message: BlockNews) -> None:
    """The batch system holds a job, for a cause that it names. When it held the block before for the same, a third
    would go the same way: the source is stopped, with what to do, and what waits of it is withdrawn."""
    source = block.source
    block.held_for = message.cause
    again, source.held_for = source.held_for == message.cause, message.cause
    if not again or source.stopped:
        return
    source.stopped = (
        f"two jobs in a row were held for the same cause: {message.reason.removeprefix('held: ').rstrip('. ')}"
    )
    source.stopped += f"; {message.advice}" if message.advice else ""
    for other in [source.blocks[id] for id in source.coming]:
        block_orders.release(manager, other, "its source is stopped")
    manager.demand_changed = True


def _adopted(manager: Manager, message: BlockNews) -> Block | None:
    """News of a block that the manager does not know. The factory names its source where the manager may have lost it:
    then it is taken for its own, with the pilots that it has brought. One that was over is cancelled."""
    state, id = manager.state, message.block
    number = id.removeprefix("b")
    if message.source and number.isascii() and number.isdigit():
        state.next_block = max(state.next_block, int(number) + 1)
    if not message.source:
        state.refuse("news of a block that is not known or is over")
    if not message.source or message.phase.over or state.ending:
        return None
    source = state.sources.get(message.source)
    if source is None or id in state.past_blocks:
        factory = blocks.factory_of(state)
        if factory is not None:
            manager.tell(factory, to_client.CancelBlocks((id,), "it was over, or its site is no longer the session's"))
        return None
    state.notice(JOURNAL_LOST)
    block = block_orders.made(manager, source, id)
    block.notes[:1] = [(state.now, f"found in the batch system of source {message.source}")]
    manager.demand_changed = True
    return block


def _over(manager: Manager, block: Block) -> None:
    """A block is over. Pilots of it that are cut off will not come back; connected ones leave by themselves."""
    state, source = manager.state, block.source
    del state.blocks[block.id]
    for books in (source.blocks, source.staying, source.coming, source.filling, source.abandoned):
        books.pop(block.id, None)
    how = "refused" if block.phase is BlockPhase.REFUSED else block.reason.partition(":")[0] or "ended"
    state.ended_blocks[how] = state.ended_blocks.get(how, 0) + 1
    state.past_blocks[block.id] = block
    if len(state.past_blocks) > KEPT_BLOCKS:
        del state.past_blocks[next(iter(state.past_blocks))]
    if not block.leaving:
        blocks.judge(block, state.now)
    for id in tuple(block.pilots):
        if state.pilots[id].state is PilotState.CUT:
            pilot_states.lost(manager, id, f"its block {block.id} is over: {block.reason or block.phase.value}")
    manager.demand_changed = True
    manager.supply_changed |= bool(state.hungry)


def trouble(manager: Manager, message: SourceTrouble) -> None:
    """A batch system does not answer, or does again."""
    source = manager.state.sources.get(message.source)
    if source is None:
        manager.state.refuse("trouble of a source that is not known")
        return
    source.trouble = message.text
