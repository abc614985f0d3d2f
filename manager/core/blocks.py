"""Track blocks, the sources (sites) that provide blocks, and the losses of pilots.

The reason of a pilot's loss is *settled* when the batch system has reported it, or after `LOSS_REASON_WAIT_S` seconds.
If a block is refused, or ends before a pilot joins, this counts as a failure of its source. Blocks whose pilots ended
early are counted separately.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.manager.core import deadlines, retries
from stoker.manager.core.events import RecordPilots, RecordStay, RecordWait
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Client, Pilot
from stoker.manager.core.state import Block, SourceState, State, forget_oldest
from stoker.protocol import to_client
from stoker.protocol.blocks import AllowedNodes, BlockPhase, LossReason, PilotEnd, Source
from stoker.protocol.ids import BlockId
from stoker.protocol.to_manager import BlockUpdate

LOSS_REASON_WAIT_S = 60.0  # Seconds to wait until the batch system reports why a pilot was lost


def _record_loss(manager: Manager, pilot: Pilot, loss: LossReason) -> None:
    state = manager.state
    block = state.find_block_of_pilot(pilot)
    said = block.loss if block is not None else None
    loss = said or loss
    pilot.loss, pilot.lost_at, pilot.is_loss_settled = loss, state.now, False
    state.losses[loss] += 1
    if said is not None or block is None or block.phase.is_over:
        _settle_loss(manager, pilot, loss)
    else:
        block.pilots_without_loss_reason[pilot.id] = pilot
        manager.set_timer(f"loss/{block.id}", state.now + LOSS_REASON_WAIT_S)


def uncount_pilot_loss(manager: Manager, pilot: Pilot) -> None:
    if pilot.loss is None:
        return
    manager.state.losses[pilot.loss] -= 1
    block = manager.state.find_block_of_pilot(pilot)
    if block is not None:
        block.pilots_without_loss_reason.pop(pilot.id, None)
    pilot.loss, pilot.is_loss_settled = None, False
    retries.remove_call_losses_of_pilot(manager.state, pilot)


def finalize_loss_reasons(manager: Manager, block: Block) -> None:
    pilots, block.pilots_without_loss_reason = block.pilots_without_loss_reason, {}
    for pilot in pilots.values():
        assert pilot.loss is not None
        _settle_loss(manager, pilot, block.loss or pilot.loss)


def finalize_loss_reasons_by_id(manager: Manager, id: str) -> None:
    block = manager.state.blocks.get(BlockId(id))
    if block is not None:
        finalize_loss_reasons(manager, block)


def record_departure(manager: Manager, pilot: Pilot) -> None:
    end = PilotEnd.WALLTIME if deadlines.is_near_walltime_end(pilot, manager.state.now) else PilotEnd.RELEASED
    _record_stay(manager, pilot, manager.state.now, end, None)


def _settle_loss(manager: Manager, pilot: Pilot, loss: LossReason) -> None:
    state = manager.state
    if loss.is_unspecific and deadlines.is_near_walltime_end(pilot, pilot.lost_at):
        loss = LossReason.WALLTIME
    if loss is not pilot.loss:
        assert pilot.loss is not None
        state.losses[pilot.loss] -= 1
        state.losses[loss] += 1
        pilot.loss = loss
    pilot.is_loss_settled = True
    retries.recheck_calls_of_lost_pilot(manager, pilot)
    block = state.find_block_of_pilot(pilot)
    told = block is not None and block.loss in (LossReason.CANCELLED, LossReason.PREEMPTED) and block.reason
    said = f"; block {block.id}'s job {block.job} was {block.reason}" if block and told and loss.is_explained else ""
    pilot.note(state.now, f"counted as lost: {loss.value}{said}")
    _record_stay(
        manager, pilot, pilot.lost_at, PilotEnd.WALLTIME if loss is LossReason.WALLTIME else PilotEnd.LOST, loss
    )


def _record_stay(manager: Manager, pilot: Pilot, until: float, end: PilotEnd, loss: LossReason | None) -> None:
    if pilot.source:
        manager.commands.append(RecordStay(pilot.source, until - pilot.notes[0][0], end, loss))


SHORT_LIVED_S = 60.0  # A block is short-lived if its pilots loaded nothing and left within this many seconds
KEPT_BLOCKS = 1000  # Number of ended blocks whose histories are kept


def replace_sources(manager: Manager, sources: Iterable[Source]) -> None:
    state, before = manager.state, manager.state.sources
    state.sources = {}
    for source in sources:
        known = before.get(source.name) or SourceState(source)
        known.source = source
        # the user may have corrected the site file, so use the source again
        known.last_hold_cause = known.hold_reason = known.stop_reason = ""
        state.sources[source.name] = known
    manager.demand_changed = True


def add_block(state: State, source: SourceState, id: BlockId, allowed: AllowedNodes) -> Block:
    block = state.blocks[id] = Block(id, source, state.now, allowed)
    if not block.probed_node:
        source.blocks[id] = block
    _update_block_lists(block)
    return block


def mark_released(block: Block, reason: str, now: float) -> None:
    block.release_reason = reason
    _update_block_lists(block)
    block.note(now, f"released: {reason}")


def update_block(manager: Manager, block: Block, message: BlockUpdate) -> None:
    now = manager.state.now
    block.job = message.job or block.job
    block.expected_at = now + message.expected_in_s if message.expected_in_s > 0 else 0.0
    if message.phase is not block.phase or message.reason != block.reason:
        as_job = f" as job {block.job}" if block.job and block.phase is BlockPhase.ASKED else ""
        block.note(now, f"{message.phase.value}{as_job}{f': {message.reason}' if message.reason else ''}")
    block.loss = message.loss or (None if message.phase is BlockPhase.RUNNING else block.loss)
    if message.phase is not block.phase:
        _set_phase(manager, block, message.phase)
    block.reason = message.reason


def record_hold(block: Block, message: BlockUpdate) -> bool:
    """Record that the batch system holds the job of a block. Return True if no more blocks may be requested."""
    source = block.source
    if not message.cause or block.probed_node:
        return False
    again, source.last_hold_cause = source.last_hold_cause == message.cause, message.cause
    why = message.reason if message.reason.startswith("held: ") else f"held: {message.cause}"
    why = why.removeprefix("held: ").rstrip(". ")
    source.hold_reason = f"{why}; {message.advice}" if message.advice else why
    if not again or source.stop_reason:
        return False
    source.stop_reason = f"jobs were held twice in a row for the same cause: {source.hold_reason}"
    return True


def remove_block(state: State, block: Block) -> None:
    del state.blocks[block.id]
    source = block.source
    for listed in (
        source.blocks,
        source.staying_blocks,
        source.coming_blocks,
        source.filling_blocks,
        source.abandoned_blocks,
    ):
        listed.pop(block.id, None)
    if not block.probed_node:
        how = "refused" if block.phase is BlockPhase.REFUSED else block.reason.partition(":")[0] or "ended"
        state.ended_blocks[how] += 1
    state.past_blocks[block.id] = block
    forget_oldest(state.past_blocks, max_records=KEPT_BLOCKS)
    if not block.release_reason and not block.probed_node:
        _update_source_failures(block, state.now)


def _update_block_lists(block: Block) -> None:
    source = block.source
    for listed, belongs in (
        (source.abandoned_blocks, block.is_abandoned), (source.staying_blocks, block.is_staying),
        (source.coming_blocks, block.has_expected_pilot), (source.filling_blocks, block.lacks_some_pilots),
    ):  # fmt: skip
        if belongs:
            listed[block.id] = None
        else:
            listed.pop(block.id, None)


def cancel_block(manager: Manager, block: Block) -> None:
    if (factory := find_connected_factory(manager.state)) is not None:
        manager.send_to_client(factory, to_client.CancelBlocks((block.id,), block.release_reason))


def _set_phase(manager: Manager, block: Block, phase: BlockPhase) -> None:
    block.phase, block.phase_since = phase, manager.state.now
    if phase is BlockPhase.RUNNING:
        block.runs_since = manager.state.now
    if phase is BlockPhase.PENDING:
        block.emptied_at = None
    _update_block_lists(block)
    manager.demand_changed = True


def _update_source_failures(block: Block, now: float) -> None:
    source = block.source
    if not block.hold_cause:
        source.last_hold_cause = source.hold_reason = ""
    if not block.joined_pilots:
        source.failures += 1
        source.failed_at = now
        source.has_unusable_pilots = False
        source.last_failure = block.reason or "the job ended before one of its pilots reached the manager"
    elif _is_short_lived_block(block, now) and block.reason:
        source.last_failure = block.reason
    elif not _is_short_lived_block(block, now):
        source.short_lived_count = 0


def _is_short_lived_block(block: Block, now: float) -> bool:
    return not block.has_loaded_context and now - block.first_pilot_joined_at < SHORT_LIVED_S


def attach_pilot(manager: Manager, block: Block, pilot: Pilot) -> str:
    """Add a pilot to its block. Return why the pilots of the block cannot run calls; empty if they can."""
    block.pilots[pilot.id] = None
    block.joined_pilots += 1
    if block.joined_pilots == 1:
        block.first_pilot_joined_at = manager.state.now
    mark_block_running(manager, block)
    if block.probed_node:
        return ""
    source = block.source
    pilot.source = source.source.name
    if pilot.lacks:
        return _record_useless_block(manager, block, pilot)
    source.failures = 0
    source.devices = tuple(device.facts for device in pilot.devices.values())
    return ""


def mark_block_running(manager: Manager, block: Block) -> None:
    block.emptied_at = None
    if block.phase in (BlockPhase.ASKED, BlockPhase.PENDING):
        block.note(manager.state.now, "running: its first pilot has joined")
        _set_phase(manager, block, BlockPhase.RUNNING)
    _update_block_lists(block)


def _record_useless_block(manager: Manager, block: Block, pilot: Pilot) -> str:
    source, here = block.source, [manager.state.pilots[id] for id in block.pilots]
    if block.joined_pilots < source.source.nodes or not all(each.lacks for each in here):
        return ""
    source.failures += 1
    source.failed_at = manager.state.now
    source.last_failure, source.has_unusable_pilots = pilot.lacks, True
    return "" if block.release_reason else pilot.lacks


def mark_context_loaded_in_block(manager: Manager, pilot: Pilot) -> None:
    block = manager.state.blocks.get(BlockId(pilot.block))
    if block is not None:
        block.has_loaded_context = True
        block.source.short_lived_count = 0


def remove_pilot_from_block(manager: Manager, pilot: Pilot, *, loss: LossReason | None) -> None:
    """Remove an ended pilot from its block. `loss`: why the pilot was lost; None if it exited properly."""
    block = manager.state.blocks.get(BlockId(pilot.block))
    if block is not None:
        block.pilots.pop(pilot.id, None)
    if loss is not None:
        _record_loss(manager, pilot, loss)
    elif not manager.state.end_reason:
        record_departure(manager, pilot)
    if block is None:
        return
    record_pilot_count(manager, block.source)
    manager.demand_changed = True
    if not block.pilots and block.phase is BlockPhase.RUNNING:
        block.emptied_at = manager.state.now
        manager.set_timer(f"emptied/{block.id}", manager.state.now + manager.state.lease_s)
    _update_block_lists(block)
    if block.pilots:
        return
    if block.release_reason:
        cancel_block(manager, block)
    elif _is_short_lived_block(block, manager.state.now):
        source = block.source
        source.short_lived_count += 1
        source.failed_at = manager.state.now
        source.last_failure = "lost"


def build_wait_record(block: Block, pilot: Pilot) -> RecordWait:
    first = next((device.facts for device in pilot.devices.values()), None)
    kind, memory = (first.kind, first.memory_bytes) if first is not None else ("", 0)
    asked_at = block.notes[0][0]
    runs_since = block.phase_since if block.phase is BlockPhase.RUNNING else block.first_pilot_joined_at
    wait_s, boot_s = runs_since - asked_at, block.first_pilot_joined_at - runs_since
    return RecordWait(block.source.source.name, wait_s, boot_s, kind, len(pilot.devices), memory)


def record_pilot_count(manager: Manager, source: SourceState) -> None:
    manager.commands.append(
        RecordPilots(source.source.name, sum(len(block.pilots) for block in source.blocks.values()))
    )


def find_connected_factory(state: State) -> Client | None:
    return next((client for client in state.clients.values() if client.factory and client.connected), None)
