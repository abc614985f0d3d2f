"""What the factory says of blocks."""

from __future__ import annotations

from stoker.manager.core import block_orders, blocks, losses, pilot_states
from stoker.manager.core.manager import Manager
from stoker.manager.core.phases import PilotState
from stoker.manager.core.sources import Block
from stoker.manager.core.state import JOURNAL_LOST
from stoker.protocol import to_client
from stoker.protocol.blocks import BlockPhase
from stoker.protocol.to_manager import BlockUpdate, SourceTrouble

_STOPPED = "its source is stopped"


def record_block_update(manager: Manager, message: BlockUpdate) -> None:
    """The batch system has said something about a block."""
    state = manager.state
    block = state.blocks.get(message.block) or _adopted(manager, message)
    if block is None:
        return
    if message.source not in ("", block.source.source.name):
        state.refuse("update of a block of another source")
        return
    blocks.said(manager, block, message)
    if message.holds > block.holds:
        _held(manager, block, message)
    block.held_for, block.holds = message.cause, message.holds
    if block.phase.over:
        _over(manager, block)
    losses.block_said(manager, block)


def _held(manager: Manager, block: Block, message: BlockUpdate) -> None:
    """The batch system holds a job, or has held it since it was asked last. A second hold in a row for the same cause,
    of this block or of the one before, stops the source with what to do: a third would go the same way. What waits is
    withdrawn, and so is this block, which its batch system may let run again by itself."""
    source = block.source
    if not blocks.held(block, message):
        return
    for other in [source.blocks[id] for id in source.coming]:
        if not other.phase.over:
            block_orders.release(manager, other, _STOPPED)
    if message.phase is BlockPhase.RUNNING:
        block_orders.release(manager, block, _STOPPED)
    elif (
        not block.leaving and not message.phase.over
    ):  # the hold has ended its pilots: they are lost, and leave nothing to wait for
        blocks.let_go(block, _STOPPED, manager.state.now)
        blocks.cancel(manager, block)
    manager.demand_changed = True


def _adopted(manager: Manager, message: BlockUpdate) -> Block | None:
    """The factory tells of a block that the manager does not know. It names the block's source where the manager may
    have lost it: then the manager adopts the block, with the pilots that it has brought. One that was over is
    cancelled."""
    state, id = manager.state, message.block
    number = id.removeprefix("b")
    if message.source and number.isascii() and number.isdigit():
        blocks.number_is_known(state, int(number))
    if not message.source:
        state.refuse("update of a block that is not known or is over")
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
    blocks.found(state, block)
    manager.demand_changed = True
    return block


def _over(manager: Manager, block: Block) -> None:
    """A block is over. Pilots of it that are cut off will not come back; connected ones leave by themselves."""
    state = manager.state
    blocks.over(state, block)
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
    blocks.trouble(source, message.text)
