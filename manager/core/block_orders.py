"""Blocks are asked for, and let go."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.manager.core import blocks, losses, pilot_states
from stoker.manager.core.client import Client
from stoker.manager.core.commands import RecordPilots
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Pilot
from stoker.manager.core.sources import Block, SourceState
from stoker.protocol import show_status, to_client
from stoker.protocol.blocks import BlockOrder, BlockPhase, KnownBlock, Source
from stoker.protocol.ids import BlockId
from stoker.units import show_seconds


def define(manager: Manager, sources: Iterable[Source]) -> None:
    """The session's sources, as its site files have them now."""
    blocks.define(manager.state, sources)
    manager.demand_changed = True


def want(manager: Manager, source: SourceState, count: int) -> None:
    """Ask for more blocks of a source."""
    state = manager.state
    orders: list[BlockOrder] = []
    for _ in range(count):
        id = blocks.next_id(state)
        made(manager, source, id)
        orders.append(BlockOrder(id, source.source.name))
    factory = blocks.factory_of(manager.state)
    if factory is not None:
        manager.tell(factory, to_client.SubmitBlocks(tuple(orders)))


def release(manager: Manager, block: Block, reason: str) -> None:
    """Let a block go: pilots that it has brought finish what they run, then its job is cancelled; one that waits is
    cancelled at once."""
    if block.leaving:
        return
    blocks.let_go(block, reason, manager.state.now)
    for id in tuple(block.pilots):
        pilot_states.release(manager, manager.state.pilots[id], reason)
    if not block.pilots:
        blocks.cancel(manager, block)


def factory_came(manager: Manager, client: Client) -> None:
    """A factory joins, or comes back: it is told every block that is not over, and which of them to cancel.

    It is the one that hears of blocks from now on. Whoever was it before is dead, or this one could not have come; but
    that may not be noticed for some seconds, and an order that went there would be carried out by nobody: the new one
    was told of the blocks that there were, and learns of others from their orders alone.
    """
    for other in manager.state.clients.values():
        if other.factory and other is not client:
            other.connected = False
    blocks.no_factory(manager.state, "")
    here = manager.state.blocks.values()
    known = (KnownBlock(block.id, block.source.source.name, block.phase, block.job) for block in here)
    manager.tell(client, to_client.KnownBlocks(tuple(known)))
    for block in here:
        if block.leaving and not block.pilots:
            manager.tell(client, to_client.CancelBlocks((block.id,), block.leaving))


def made(manager: Manager, source: SourceState, id: BlockId) -> Block:
    """A block that the manager did not know. Where the journal lost its records, pilots of it may be here already."""
    state = manager.state
    block = blocks.add(state, source, id)
    for pilot in state.pilots.values():
        if pilot.block == id and (useless := blocks.join(manager, block, pilot)):
            release(manager, block, useless)
    return block


def pilot_came(manager: Manager, pilot: Pilot) -> None:
    """A pilot has joined: its block works, and so does its source."""
    block = manager.state.blocks.get(BlockId(pilot.block))
    if block is None:
        return
    if useless := blocks.join(manager, block, pilot):
        release(manager, block, useless)
    if block.brought == 1:
        manager.out.append(blocks.waited(block, pilot))
    blocks.count_pilots(manager, block.source)
    if block.leaving:
        pilot_states.release(manager, pilot, block.leaving)


def pilot_back(manager: Manager, pilot: Pilot) -> None:
    """A pilot that was given up is here again."""
    block = manager.state.blocks.get(BlockId(pilot.block))
    if block is None:
        return
    blocks.back(manager, block, pilot)
    blocks.count_pilots(manager, block.source)
    if block.leaving:
        pilot_states.release(manager, pilot, block.leaving)


def emptied(manager: Manager, id: str) -> None:
    """A block has been without its pilots for as long as one may be away. If the batch system still says that it runs,
    its node is gone, or unreachable: the job is cancelled, and another block may take its place at once."""
    block = manager.state.blocks.get(BlockId(id))
    if block is None or block.emptied_at is None or block.leaving or block.phase is not BlockPhase.RUNNING:
        return
    gone_s = show_seconds(manager.state.now - block.emptied_at)
    blocks.abandon(block)
    suspended = show_status.is_suspended(block.reason)
    job = "has suspended its job" if suspended else "still says that its job runs"
    release(manager, block, f"its pilots went {gone_s} ago, and the batch system {job}")
    manager.demand_changed = True


def session_over(manager: Manager) -> None:
    """Pilots that are here stay no longer, whatever their source would have given."""
    for block in manager.state.blocks.values():
        losses.settle_all(manager, block)
    for pilot in manager.state.pilots.values():
        losses.record_departure(manager, pilot)
    for name in manager.state.sources:
        manager.out.append(RecordPilots(name, 0))
