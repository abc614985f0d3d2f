"""Blocks: asked for by the provisioning policy, submitted and watched by the factory, counted by the pilots they bring.

A block is over when the batch system says so. What it brought until then decides whether that is ordinary (pilots on
borrowed machines are killed all day) or a sign that the source does not work: a block that was refused, or that ended
without ever bringing a pilot, counts as a failure of its source, and a pilot that joins wipes the count. Pilots that
die young, before anything was loaded on them, are counted by themselves: one is chance, several are a broken job.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.manager.core import losses
from stoker.manager.core.client import Client
from stoker.manager.core.commands import RecordPilots, RecordWait
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Pilot
from stoker.manager.core.sources import Block, SourceState
from stoker.manager.core.state import State
from stoker.protocol import to_client
from stoker.protocol.blocks import BlockPhase, LossReason, Source
from stoker.protocol.ids import BlockId
from stoker.protocol.to_manager import BlockUpdate

YOUNG_S = 60.0
"""A pilot that died before was of no use, unless something had been loaded on it."""

# So many blocks that are over are kept for their stories.
KEPT_BLOCKS = 1000
BLOCK_GAP = 100

# ---- sources


def define(state: State, sources: Iterable[Source]) -> None:
    """The session's sources, as its site files have them now."""
    before = state.sources
    state.sources = {}
    for source in sources:
        known = before.get(source.name)
        if known is None:
            state.sources[source.name] = SourceState(source)
        else:
            known.source = source
            known.held_for = known.hold = known.stopped = ""  # the site file may have been mended
            state.sources[source.name] = known


def trouble(source: SourceState, text: str) -> None:
    """A batch system does not answer, or does again (empty)."""
    source.trouble = text


def no_factory(state: State, reason: str) -> None:
    """Nobody submits blocks, for this reason; empty: somebody does."""
    state.factory_trouble = reason


# ---- a block's way


def next_id(state: State) -> BlockId:
    """The number of the next block."""
    id = BlockId(f"b{state.next_block}")
    state.next_block += 1
    return id


def number_is_known(state: State, number: int) -> None:
    """The factory knows a block by this number: give it to no other."""
    state.next_block = max(state.next_block, number + 1)


def leave_gap(state: State) -> None:
    """Begin the next blocks' numbers at a round one behind those that may have been given away."""
    state.next_block += BLOCK_GAP - state.next_block % BLOCK_GAP


def add(state: State, source: SourceState, id: BlockId) -> Block:
    """A block is asked of a source."""
    block = state.blocks[id] = source.blocks[id] = Block(id, source, state.now)
    relist(block)
    return block


def found(state: State, block: Block) -> None:
    """A block that the manager did not know is the session's."""
    block.found(state.now)


def let_go(block: Block, reason: str, now: float) -> None:
    """A block is to end."""
    block.leaving = reason
    relist(block)
    block.note(now, f"let go: {reason}")


def abandon(block: Block) -> None:
    """A block's pilots were lost, and it stands in no other's way."""
    block.abandoned = True


def said(manager: Manager, block: Block, message: BlockUpdate) -> None:
    """The batch system has said how a block is."""
    now = manager.state.now
    block.job = message.job or block.job
    block.expected_at = now + message.expected_in_s if message.expected_in_s > 0 else 0.0
    if message.phase is not block.phase or message.reason != block.reason:
        as_job = f" as job {block.job}" if block.job and block.phase is BlockPhase.ASKED else ""
        block.note(now, f"{message.phase.value}{as_job}{f': {message.reason}' if message.reason else ''}")
    block.loss = message.loss or (None if message.phase is BlockPhase.RUNNING else block.loss)
    if message.phase is not block.phase:
        enter(manager, block, message.phase)
    block.reason = message.reason


def held(block: Block, message: BlockUpdate) -> bool:
    """The batch system has held a block once more. True if the hold before, of any block of the source, was for the
    same cause: no more blocks are asked of the source then."""
    source = block.source
    if not message.cause:
        return False
    again, source.held_for = source.held_for == message.cause, message.cause
    why = message.reason if message.reason.startswith("held: ") else f"held: {message.cause}"
    why = why.removeprefix("held: ").rstrip(". ")
    source.hold = f"{why}; {message.advice}" if message.advice else why
    if not again or source.stopped:
        return False
    source.stopped = f"jobs were held twice in a row for the same cause: {source.hold}"
    return True


def over(state: State, block: Block) -> None:
    """A block is over."""
    source = block.source
    del state.blocks[block.id]
    for listed in (source.staying, source.coming, source.filling, source.abandoned):
        listed.pop(block.id, None)
    source.blocks.pop(block.id, None)
    how = "refused" if block.phase is BlockPhase.REFUSED else block.reason.partition(":")[0] or "ended"
    state.ended_blocks[how] = state.ended_blocks.get(how, 0) + 1
    state.past_blocks[block.id] = block
    if len(state.past_blocks) > KEPT_BLOCKS:
        del state.past_blocks[next(iter(state.past_blocks))]
    if not block.leaving:
        judge(block, state.now)


def back(manager: Manager, block: Block, pilot: Pilot) -> None:
    """A pilot of a block that was given up is here again."""
    block.pilots[pilot.id] = None
    is_here(manager, block)


def relist(block: Block) -> None:
    """List a block that has changed where its source keeps it: that is asked for often, and blocks change seldom."""
    source = block.source
    for listed, belongs in (
        (source.abandoned, block.abandoned),
        (source.staying, block.staying),
        (source.coming, block.coming),
        (source.filling, block.filling),
    ):
        if belongs:
            listed[block.id] = None
        else:
            listed.pop(block.id, None)


def cancel(manager: Manager, block: Block) -> None:
    """Tell the factory to cancel a block's job."""
    factory = factory_of(manager.state)
    if factory is not None:
        manager.tell(factory, to_client.CancelBlocks((block.id,), block.leaving))


def enter(manager: Manager, block: Block, phase: BlockPhase) -> None:
    """A block is in another phase. One whose job waits again may bring pilots again."""
    block.phase, block.since = phase, manager.state.now
    if phase is BlockPhase.PENDING:
        block.emptied_at = None
    relist(block)
    manager.demand_changed = True


def judge(block: Block, now: float) -> None:
    """What the end of a block that nobody wanted to end says of its source."""
    source = block.source
    if not block.held_for:
        source.held_for = source.hold = ""
    if not block.brought:
        source.failures += 1
        source.failed_at = now
        source.useless = False
        source.last_failure = block.reason or "the job ended before a pilot of it reached the manager"
    elif _died_young(block, now) and block.reason:
        source.last_failure = block.reason
    elif not _died_young(block, now):
        source.short_lived = 0


def _died_young(block: Block, now: float) -> bool:
    return not block.proved and now - block.brought_at < YOUNG_S


def join(manager: Manager, block: Block, pilot: Pilot) -> str:
    """A block has brought a pilot. Returns why it is to be let go: all its pilots lack what its site asks for."""
    block.pilots[pilot.id] = None
    block.brought += 1
    if block.brought == 1:
        block.brought_at = manager.state.now
    is_here(manager, block)
    source = block.source
    pilot.source = source.source.name
    if pilot.lacks:
        return _useless(manager, block, pilot)
    source.failures = 0
    source.devices = tuple(device.facts for device in pilot.devices.values())
    return ""


def is_here(manager: Manager, block: Block) -> None:
    """A pilot of a block is connected: its job runs, also where the batch system's last listing is older than that."""
    block.emptied_at = None
    if block.phase in (BlockPhase.ASKED, BlockPhase.PENDING):
        block.note(manager.state.now, "running: a pilot of it is here")
        enter(manager, block, BlockPhase.RUNNING)
    relist(block)


def _useless(manager: Manager, block: Block, pilot: Pilot) -> str:
    """A pilot has come that lacks what its site asks for. A block of such pilots alone counts as one that brought none,
    and is to be let go, for the reason that is returned."""
    source, here = block.source, [manager.state.pilots[id] for id in block.pilots]
    if block.brought < source.source.nodes or not all(each.lacks for each in here):
        return ""
    source.failures += 1
    source.failed_at = manager.state.now
    source.last_failure, source.useless = pilot.lacks, True
    return "" if block.leaving else pilot.lacks


def proved(manager: Manager, pilot: Pilot) -> None:
    """A pilot has loaded a context: its block is of use."""
    block = manager.state.blocks.get(BlockId(pilot.block))
    if block is not None:
        block.proved = True
        block.source.short_lived = 0


def pilot_left(manager: Manager, pilot: Pilot, *, loss: LossReason | None) -> None:
    """A pilot is gone: a block that was let go has its job cancelled with the last of them. `loss`: why it was lost;
    None if it left by itself, or was told to."""
    block = manager.state.blocks.get(BlockId(pilot.block))
    if block is not None:
        block.pilots.pop(pilot.id, None)
    if loss is not None:
        losses.lost(manager, pilot, loss)
    elif not manager.state.ending:
        losses.record_departure(manager, pilot)
    if block is None:
        return
    count_pilots(manager, block.source)
    manager.demand_changed = True
    if not block.pilots and block.phase is BlockPhase.RUNNING:
        block.emptied_at = manager.state.now
        manager.set_timer(f"emptied/{block.id}", manager.state.now + manager.state.lease_s)
    relist(block)
    if block.pilots:
        return
    if block.leaving:
        cancel(manager, block)
    elif _died_young(block, manager.state.now):
        source = block.source
        source.short_lived += 1
        source.failed_at = manager.state.now
        source.last_failure = "lost"


# ---- what is remembered of a source, for whoever plans with it


def waited(block: Block, pilot: Pilot) -> RecordWait:
    """What it took until the first pilot of a block came, which has just happened."""
    first = next((device.facts for device in pilot.devices.values()), None)
    kind, memory = (first.kind, first.memory_bytes) if first is not None else ("", 0)
    asked_at = block.notes[0][0]
    runs_since = block.since if block.phase is BlockPhase.RUNNING else block.brought_at
    wait_s, boot_s = runs_since - asked_at, block.brought_at - runs_since
    return RecordWait(block.source.source.name, wait_s, boot_s, kind, len(pilot.devices), memory)


def count_pilots(manager: Manager, source: SourceState) -> None:
    """Have it recorded how many pilots of a source are here."""
    here = sum(len(block.pilots) for block in source.blocks.values())
    manager.out.append(RecordPilots(source.source.name, here))


# ---- the factory


def factory_of(state: State) -> Client | None:
    """The one that hears of blocks; None if none is connected, as far as anybody knows."""
    return next((client for client in state.clients.values() if client.factory and client.connected), None)
