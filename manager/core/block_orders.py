"""Request and release blocks (batch jobs with pilots), and process the factory's reports about blocks."""

from __future__ import annotations

from stoker.manager.core import blocks, pilots
from stoker.manager.core.events import RecordPilots
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Client, Pilot, PilotState
from stoker.manager.core.state import JOURNAL_LOST, Block, SourceState
from stoker.protocol import show_status, to_client
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockOrder, BlockPhase, KnownBlock
from stoker.protocol.ids import BlockId
from stoker.protocol.to_manager import BlockUpdate, SourceTrouble
from stoker.units import show_seconds


def request_blocks(manager: Manager, source: SourceState, count: int, *, probed: str = "") -> None:
    """Request blocks. `probed`: a node that the block only tests, for one minute; empty if the blocks run calls."""
    state = manager.state
    excluded = () if probed else tuple(record.node for record in state.excluded_nodes(source))
    allowed = AllowedNodes(exclude=excluded, only=probed)
    orders: list[BlockOrder] = []
    for _ in range(count):
        id = BlockId(f"b{state.next_block}")
        state.next_block += 1
        _adopt_block(manager, source, id, allowed)
        orders.append(BlockOrder(id, source.source.name, allowed))
    factory = blocks.find_connected_factory(state)
    if factory is not None:
        manager.send_to_client(factory, to_client.SubmitBlocks(tuple(orders)))


def release_block(manager: Manager, block: Block, reason: str) -> None:
    """Let the running calls of the block end, and then cancel its batch job."""
    if block.release_reason:
        return
    blocks.mark_released(block, reason, manager.state.now)
    for id in tuple(block.pilots):
        pilots.release_pilot(manager, manager.state.pilots[id], reason)
    if not block.pilots:
        blocks.cancel_block(manager, block)


def send_blocks_to_factory(manager: Manager, client: Client) -> None:
    """Send a new factory the blocks that have not ended, and the blocks to cancel. Earlier factories are ignored."""
    for other in manager.state.clients.values():
        if other.factory and other is not client:
            other.connected = False
    here = manager.state.blocks.values()
    known = (KnownBlock(block.id, block.source.source.name, block.phase, block.job, block.allowed) for block in here)
    manager.send_to_client(client, to_client.KnownBlocks(tuple(known)))
    for block in here:
        if block.release_reason and not block.pilots:
            manager.send_to_client(client, to_client.CancelBlocks((block.id,), block.release_reason))


def _adopt_block(manager: Manager, source: SourceState, id: BlockId, allowed: AllowedNodes = ANYWHERE) -> Block:
    state = manager.state
    block = blocks.add_block(state, source, id, allowed)
    for pilot in state.pilots.values():
        if pilot.block == id and (useless := blocks.attach_pilot(manager, block, pilot)):
            release_block(manager, block, useless)
    return block


def add_pilot_to_block(manager: Manager, pilot: Pilot, *, has_returned: bool = False) -> None:
    """Add a pilot to its block. `has_returned`: True if the pilot was counted as lost and has reconnected."""
    block = manager.state.blocks.get(BlockId(pilot.block))
    if block is None:
        return
    if has_returned:
        block.pilots[pilot.id] = None
        blocks.mark_block_running(manager, block)
    else:
        if useless := blocks.attach_pilot(manager, block, pilot):
            release_block(manager, block, useless)
        if block.joined_pilots == 1 and not block.probed_node:
            manager.commands.append(blocks.build_wait_record(block, pilot))
    blocks.record_pilot_count(manager, block.source)
    if block.release_reason:
        pilots.release_pilot(manager, pilot, block.release_reason)


def release_block_without_pilots(manager: Manager, id: str) -> None:
    block = manager.state.blocks.get(BlockId(id))
    if block is None or block.emptied_at is None or block.release_reason or block.phase is not BlockPhase.RUNNING:
        return
    gone_s = show_seconds(manager.state.now - block.emptied_at)
    block.is_abandoned = True
    job = "has suspended its job" if show_status.is_suspended(block.reason) else "still lists its job as running"
    release_block(manager, block, f"its pilots left {gone_s} ago, but the batch system {job}")
    manager.demand_changed = True


def write_final_pilot_records(manager: Manager) -> None:
    """At the end of the session, record that each pilot has ended and that each source has no pilots."""
    for block in manager.state.blocks.values():
        blocks.finalize_loss_reasons(manager, block)
    for pilot in manager.state.pilots.values():
        blocks.record_departure(manager, pilot)
    for name in manager.state.sources:
        manager.commands.append(RecordPilots(name, 0))


_SOURCE_IS_STOPPED = "its source is stopped"


def record_block_update(manager: Manager, message: BlockUpdate) -> None:
    state = manager.state
    block = state.blocks.get(message.block) or _adopt_unknown_block(manager, message)
    if block is None:
        return
    if message.source not in ("", block.source.source.name):
        state.count_refusal("update of a block of another source")
        return
    blocks.update_block(manager, block, message)
    if message.holds > block.holds:
        _handle_hold(manager, block, message)
    block.hold_cause, block.holds = message.cause, message.holds
    if block.phase.is_over:
        _handle_ended_block(manager, block)
    if block.loss is not None or block.phase.is_over:
        blocks.finalize_loss_reasons(manager, block)


def _handle_hold(manager: Manager, block: Block, message: BlockUpdate) -> None:
    """Stop using a source if the batch system held two of its jobs in a row for the same cause. In this case, release
    the held block and the blocks that have not started.
    """
    source = block.source
    if not blocks.record_hold(block, message):
        return
    for other in [source.blocks[id] for id in source.coming_blocks]:
        if not other.phase.is_over:
            release_block(manager, other, _SOURCE_IS_STOPPED)
    if message.phase is BlockPhase.RUNNING:
        release_block(manager, block, _SOURCE_IS_STOPPED)
    elif not block.release_reason and not message.phase.is_over:  # the block's pilots ended when its job was held
        blocks.mark_released(block, _SOURCE_IS_STOPPED, manager.state.now)
        blocks.cancel_block(manager, block)
    manager.demand_changed = True


def _adopt_unknown_block(manager: Manager, message: BlockUpdate) -> Block | None:
    state, id = manager.state, message.block
    number = id.removeprefix("b")
    if message.source and number.isascii() and number.isdigit():
        state.next_block = max(state.next_block, int(number) + 1)
    if not message.source:
        state.count_refusal("update of an unknown or ended block")
    if not message.source or message.phase.is_over or state.end_reason:
        return None
    source = state.sources.get(message.source)
    if source is None or id in state.past_blocks:
        factory = blocks.find_connected_factory(state)
        if factory is not None:
            why = "the block was over, or its site is no longer in the session"
            manager.send_to_client(factory, to_client.CancelBlocks((id,), why))
        return None
    state.add_notice(JOURNAL_LOST)
    block = _adopt_block(manager, source, id)
    block.notes[:1] = [(state.now, f"found in the batch system of source {message.source}")]
    manager.demand_changed = True
    return block


def _handle_ended_block(manager: Manager, block: Block) -> None:
    state = manager.state
    blocks.remove_block(state, block)
    for id in tuple(block.pilots):
        if state.pilots[id].state is PilotState.CUT:
            pilots.remove_ended_pilot(manager, id, f"its block {block.id} is over: {block.reason or block.phase.value}")
    manager.demand_changed = True
    manager.supply_changed |= bool(state.waiting_contexts)


def record_source_trouble(manager: Manager, message: SourceTrouble) -> None:
    source = manager.state.sources.get(message.source)
    if source is None:
        manager.state.count_refusal("error report of an unknown source")
        return
    source.trouble = message.text
