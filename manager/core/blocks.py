"""Blocks: asked for by the provisioning policy, submitted and watched by the factory, counted by the pilots they bring.

A block is over when the batch system says so. What it brought until then decides whether that is ordinary (pilots on
borrowed machines are killed all day) or a sign that the source does not work: a block that was refused, or that ended
without ever bringing a pilot, counts as a failure of its source, and a pilot that joins wipes the count. Pilots that
die young, before anything was loaded on them, are counted by themselves: one is chance, several are a broken job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.manager.core import losses
from stoker.manager.core.commands import RecordPilots, RecordWait
from stoker.manager.core.phases import PilotState
from stoker.manager.core.sources import Block, SourceState
from stoker.manager.core.state import JOURNAL_LOST, Client, Pilot, State
from stoker.manager.protocol import to_client
from stoker.manager.protocol.blocks import BlockOrder, BlockPhase, BlockStatus, KnownBlock, LossReason, Source
from stoker.manager.protocol.ids import BlockId
from stoker.manager.protocol.show_blocks import READ_JOB, SILENT_S
from stoker.manager.protocol.to_manager import BlockNews, SourceTrouble
from stoker.units import show_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker.manager.core.core import Core

YOUNG_S = 60.0
"""A pilot that died before was of no use, unless something had been loaded on it."""

KEPT_BLOCKS = 1000
"""So many blocks that are over are kept for their stories."""


def define(core: Core, sources: Iterable[Source]) -> None:
    """The session's sources, as its site files have them now."""
    before = core.state.sources
    core.state.sources = {}
    for source in sources:
        known = before.get(source.name)
        if known is None:
            core.state.sources[source.name] = SourceState(source)
        else:
            known.source = source
            known.held_for = known.stopped = ""  # the site file may have been mended
            core.state.sources[source.name] = known
    core.demand_changed = True


def want(core: Core, source: SourceState, count: int) -> None:
    """Ask for more blocks of a source."""
    state = core.state
    orders: list[BlockOrder] = []
    for _ in range(count):
        id = BlockId(f"b{state.next_block}")
        state.next_block += 1
        _made(core, source, id)
        orders.append(BlockOrder(id, source.source.name))
    factory = factory_of(core.state)
    if factory is not None:
        core.tell(factory, to_client.SubmitBlocks(tuple(orders)))


def release(core: Core, block: Block, reason: str) -> None:
    """Let a block go: pilots that it has brought finish what they run, then its job is cancelled; one that waits is
    cancelled at once."""
    from stoker.manager.core import pilots

    if block.leaving:
        return
    block.leaving = reason
    _book(block)
    block.notes.append((core.state.now, f"let go: {reason}"))
    for id in tuple(block.pilots):
        pilots.release(core, core.state.pilots[id], reason)
    if not block.pilots:
        _cancel(core, block)


def _book(block: Block) -> None:
    """Keep its source's books of a block that has changed. They are asked for often, blocks change seldom."""
    source = block.source
    for books, belongs in (
        (source.abandoned, block.abandoned),
        (source.staying, block.staying),
        (source.coming, block.coming),
        (source.filling, block.filling),
    ):
        if belongs:
            books[block.id] = None
        else:
            books.pop(block.id, None)


def _cancel(core: Core, block: Block) -> None:
    factory = factory_of(core.state)
    if factory is not None:
        core.tell(factory, to_client.CancelBlocks((block.id,), block.leaving))


# ---- what the factory says


def factory_came(core: Core, client: Client) -> None:
    """A factory joins, or comes back: it is told every block that is not over, and which of them to cancel.

    It is the one that hears of blocks from now on. Whoever was it before is dead, or this one could not have come; but
    that may not be noticed for some seconds, and an order that went there would be carried out by nobody: the new one
    was told of the blocks that there were, and learns of others from their orders alone.
    """
    for other in core.state.clients.values():
        if other.factory and other is not client:
            other.connected = False
    core.state.factory_trouble = ""
    blocks = core.state.blocks.values()
    known = (KnownBlock(block.id, block.source.source.name, block.phase, block.job) for block in blocks)
    core.tell(client, to_client.KnownBlocks(tuple(known)))
    for block in blocks:
        if block.leaving and not block.pilots:
            core.tell(client, to_client.CancelBlocks((block.id,), block.leaving))


def news(core: Core, message: BlockNews) -> None:
    """The batch system has said something about a block."""
    state = core.state
    block = state.blocks.get(message.block) or _adopted(core, message)
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
        _enter(core, block, message.phase)
    block.reason = message.reason
    if message.cause and not block.held_for:
        _held(core, block, message)
    if block.phase.over:
        _over(core, block)
    losses.block_said(core, block)


def _held(core: Core, block: Block, message: BlockNews) -> None:
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
        release(core, other, "its source is stopped")
    core.demand_changed = True


def _adopted(core: Core, message: BlockNews) -> Block | None:
    """News of a block that the manager does not know. The factory names its source where the manager may have lost it:
    then it is taken for its own, with the pilots that it has brought. One that was over is cancelled."""
    state, id = core.state, message.block
    number = id.removeprefix("b")
    if message.source and number.isascii() and number.isdigit():
        state.next_block = max(state.next_block, int(number) + 1)
    if not message.source:
        state.refuse("news of a block that is not known or is over")
    if not message.source or message.phase.over or state.ending:
        return None
    source = state.sources.get(message.source)
    if source is None or id in state.past_blocks:
        factory = factory_of(state)
        if factory is not None:
            core.tell(factory, to_client.CancelBlocks((id,), "it was over, or its site is no longer the session's"))
        return None
    state.notice(JOURNAL_LOST)
    block = _made(core, source, id)
    block.notes[:1] = [(state.now, f"found in the batch system of source {message.source}")]
    core.demand_changed = True
    return block


def _made(core: Core, source: SourceState, id: BlockId) -> Block:
    """A block that the manager did not know. Where the journal lost its records, pilots of it may be here already."""
    state = core.state
    block = state.blocks[id] = source.blocks[id] = Block(id, source, state.now)
    _book(block)
    for pilot in state.pilots.values():
        if pilot.block == id:
            _join(core, block, pilot)
    return block


def _enter(core: Core, block: Block, phase: BlockPhase) -> None:
    """A block is in another phase. One whose job waits again may bring pilots again."""
    block.phase, block.since = phase, core.state.now
    if phase is BlockPhase.PENDING:
        block.emptied_at = None
    _book(block)
    core.demand_changed = True


_KEPT_NOTES = 50


def _over(core: Core, block: Block) -> None:
    """A block is over. Pilots of it that are cut off will not come back; connected ones leave by themselves."""
    from stoker.manager.core import pilots

    state, source = core.state, block.source
    del state.blocks[block.id]
    for books in (source.blocks, source.staying, source.coming, source.filling, source.abandoned):
        books.pop(block.id, None)
    how = "refused" if block.phase is BlockPhase.REFUSED else block.reason.partition(":")[0] or "ended"
    state.ended_blocks[how] = state.ended_blocks.get(how, 0) + 1
    state.past_blocks[block.id] = block
    if len(state.past_blocks) > KEPT_BLOCKS:
        del state.past_blocks[next(iter(state.past_blocks))]
    if not block.leaving:
        _judge(block, state.now)
    for id in tuple(block.pilots):
        if state.pilots[id].state is PilotState.CUT:
            pilots.lost(core, id, f"its block {block.id} is over: {block.reason or block.phase.value}")
    core.demand_changed = True
    core.supply_changed |= bool(state.hungry)


def _judge(block: Block, now: float) -> None:
    """What the end of a block that nobody wanted to end says of its source."""
    source = block.source
    if not block.held_for:
        source.held_for = ""
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


def trouble(core: Core, message: SourceTrouble) -> None:
    """A batch system does not answer, or does again."""
    source = core.state.sources.get(message.source)
    if source is None:
        core.state.refuse("trouble of a source that is not known")
        return
    source.trouble = message.text


# ---- what pilots do to them


def pilot_came(core: Core, pilot: Pilot) -> None:
    """A pilot has joined: its block works, and so does its source."""
    block = core.state.blocks.get(BlockId(pilot.block))
    if block is None:
        return
    _join(core, block, pilot)
    if block.brought == 1:
        core.out.append(_waited(block, pilot))
    _count(core, block.source)
    if block.leaving:
        from stoker.manager.core import pilots

        pilots.release(core, pilot, block.leaving)


def _join(core: Core, block: Block, pilot: Pilot) -> None:
    block.pilots[pilot.id] = None
    block.brought += 1
    if block.brought == 1:
        block.brought_at = core.state.now
    _is_here(core, block)
    source = block.source
    pilot.source = source.source.name
    if pilot.lacks:
        _useless(core, block, pilot)
    else:
        source.failures = 0
        source.devices = tuple(device.facts for device in pilot.devices.values())


def pilot_back(core: Core, pilot: Pilot) -> None:
    """A pilot that was given up is here again."""
    from stoker.manager.core import pilots

    block = core.state.blocks.get(BlockId(pilot.block))
    if block is None:
        return
    block.pilots[pilot.id] = None
    _is_here(core, block)
    _count(core, block.source)
    if block.leaving:
        pilots.release(core, pilot, block.leaving)


def _is_here(core: Core, block: Block) -> None:
    """A pilot of a block is connected: its job runs, also where the batch system's last listing is older than that."""
    block.emptied_at = None
    if block.phase in (BlockPhase.ASKED, BlockPhase.PENDING):
        block.notes.append((core.state.now, "running: a pilot of it is here"))
        _enter(core, block, BlockPhase.RUNNING)
    _book(block)


def _useless(core: Core, block: Block, pilot: Pilot) -> None:
    """A pilot has come that lacks what its site asks for. A block of such pilots alone counts as one that brought none,
    and is let go."""
    source, here = block.source, [core.state.pilots[id] for id in block.pilots]
    if block.brought < source.source.nodes or not all(each.lacks for each in here):
        return
    source.failures += 1
    source.failed_at = core.state.now
    source.last_failure, source.useless = pilot.lacks, True
    if not block.leaving:
        release(core, block, pilot.lacks)


def proved(core: Core, pilot: Pilot) -> None:
    """A pilot has loaded a context: its block is of use."""
    block = core.state.blocks.get(BlockId(pilot.block))
    if block is not None:
        block.proved = True
        block.source.short_lived = 0


def pilot_left(core: Core, pilot: Pilot, *, loss: LossReason | None) -> None:
    """A pilot is gone: a block that was let go has its job cancelled with the last of them. `loss`: why it was lost;
    None if it left by itself, or was told to."""
    block = core.state.blocks.get(BlockId(pilot.block))
    if block is not None:
        block.pilots.pop(pilot.id, None)
    if loss is not None:
        losses.lost(core, pilot, loss)
    elif not core.state.ending:
        losses.left(core, pilot)
    if block is None:
        return
    _count(core, block.source)
    core.demand_changed = True
    if not block.pilots and block.phase is BlockPhase.RUNNING:
        block.emptied_at = core.state.now
        core.set_timer(f"emptied/{block.id}", core.state.now + core.state.lease_s)
    _book(block)
    if block.pilots:
        return
    if block.leaving:
        _cancel(core, block)
    elif _died_young(block, core.state.now):
        source = block.source
        source.short_lived += 1
        source.failed_at = core.state.now
        source.last_failure = "lost"


def emptied(core: Core, id: str) -> None:
    """A block has been without its pilots for as long as one may be away. If the batch system still says that it runs,
    its node is gone, or unreachable: the job is cancelled, and another block may take its place at once."""
    block = core.state.blocks.get(BlockId(id))
    if block is None or block.emptied_at is None or block.leaving or block.phase is not BlockPhase.RUNNING:
        return
    gone_s = show_seconds(core.state.now - block.emptied_at)
    block.abandoned = True
    release(core, block, f"its pilots went {gone_s} ago, and the batch system still says that its job runs")
    core.demand_changed = True


# ---- what is remembered of a source, for whoever plans with it


def _waited(block: Block, pilot: Pilot) -> RecordWait:
    """What it took until the first pilot of a block came, which has just happened."""
    first = next((device.facts for device in pilot.devices.values()), None)
    kind, memory = (first.kind, first.memory_bytes) if first is not None else ("", 0)
    asked_at = block.notes[0][0]
    runs_since = block.since if block.phase is BlockPhase.RUNNING else block.brought_at
    wait_s, boot_s = runs_since - asked_at, block.brought_at - runs_since
    return RecordWait(block.source.source.name, wait_s, boot_s, kind, len(pilot.devices), memory)


def _count(core: Core, source: SourceState) -> None:
    here = sum(len(block.pilots) for block in source.blocks.values())
    core.out.append(RecordPilots(source.source.name, here))


def session_over(core: Core) -> None:
    """Pilots that are here stay no longer, whatever their source would have given."""
    for block in core.state.blocks.values():
        losses.settle_all(core, block)
    for pilot in core.state.pilots.values():
        losses.left(core, pilot)
    for name in core.state.sources:
        core.out.append(RecordPilots(name, 0))


# ---- the factory


def factory_of(state: State) -> Client | None:
    """The one that hears of blocks; None if none is connected, as far as anybody knows."""
    return next((client for client in state.clients.values() if client.factory and client.connected), None)


# ---- in words


def tell(now: float, block: Block) -> BlockStatus:
    """A block for `stoker status`."""
    return BlockStatus(
        block=block.id,
        source=block.source.source.name,
        phase=block.phase.value,
        job=block.job,
        reason=block.leaving if block.leaving and not block.reason else block.reason,
        since_s=now - block.since,
        expected_in_s=max(0.0, block.expected_at - now) if block.expected_at else 0.0,
        pilots=tuple(block.pilots),
        emptied_s=max(0.001, now - block.emptied_at) if block.emptied_at is not None else 0.0,
        leaving=bool(block.leaving),
    )


def in_words(now: float, block: Block) -> str:
    """`pending: Priority, expected to start in 11 min`."""
    words = block.phase.value + (f": {block.reason}" if block.reason else "")
    if block.expected_at > now and block.phase is BlockPhase.PENDING:
        words += f", expected to start in {show_seconds(block.expected_at - now)}"
    if block.phase is BlockPhase.RUNNING and block.coming and now - block.since > SILENT_S:
        words += f" for {show_seconds(now - block.since)} without a pilot: {READ_JOB}"
    return words


def failing(source: SourceState) -> str:
    """What the last blocks of a source say that were of no use; empty if there is nothing to say."""
    if source.stopped:
        return f"no more jobs are asked for: {source.stopped}"
    times = source.failures or source.short_lived
    if source.failures:
        often = f", {times} times in a row" if times > 1 else ""
        said = f"its last block was of no use{often}" if source.useless else f"no pilot came of its last block{often}"
    elif times > 1:
        said = f"{times} blocks in a row brought pilots that loaded nothing"
    else:
        return ""
    return f"{said}: {source.last_failure}"
