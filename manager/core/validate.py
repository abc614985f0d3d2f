"""What must hold after every event. Tests call it all the time; it is slow and never runs in production."""

from __future__ import annotations

from stoker.manager.core import variants
from stoker.manager.core.load_index import CLOSED, FREE, FULL
from stoker.manager.core.nouns import Call, Context, Gang, Library
from stoker.manager.core.phases import CallState, LibraryState, PilotState
from stoker.manager.core.state import State
from stoker.manager.core.validate_objects import broken
from stoker.protocol.ids import BlockId


def validate(state: State) -> None:
    """Raise AssertionError, naming what is broken."""
    for pilot in state.pilots.values():
        for device in pilot.devices.values():
            promised = sum(library.promised_bytes for library in device.libraries.values())
            _hold(
                device.promised_bytes == promised,
                f"{device.id}: promised {device.promised_bytes}, libraries {promised}",
            )
            _hold(promised >= 0 <= device.budget_bytes, f"{device.id}: promised twice")
        _hold((pilot.id in state.reserved) is (pilot.reserved is not None), f"{pilot.id} is reserved in one place only")
        if pilot.reserved is not None:
            trial = state.trials.get(pilot.reserved.id)
            _hold(
                trial is not None and trial.pilot is pilot, f"{pilot.id} is reserved for a call that does not know it"
            )
        _hold(pilot.state is not PilotState.GONE or not pilot.libraries, f"{pilot.id} is gone but holds libraries")
        _hold(
            pilot.block not in state.blocks or pilot.id in state.blocks[BlockId(pilot.block)].pilots,
            f"{pilot.id} is not among the pilots of its block",
        )
    for block in state.blocks.values():
        _hold(not block.phase.over, f"block {block.id} is over and listed")
        _hold(block.source.blocks.get(block.id) is block, f"block {block.id} is not its source's")
        source = block.source
        lists = tuple(block.id in one for one in (source.staying, source.coming, source.filling))
        _hold(
            lists == (block.staying, block.coming, block.filling), f"block {block.id} is in wrong lists of its source"
        )
        _hold(all(id in state.pilots for id in block.pilots), f"block {block.id} lists a pilot that is gone")
    for library in state.libraries.values():
        _library(state, library)
    for what in broken(state.transfers):
        _hold(False, what)
    for call in state.calls.values():
        _call(state, call)
    for context in state.contexts.values():
        _context(state, context)
    for client in state.clients.values():
        mine = sum(call.group.client is client for call in state.calls.values())
        _hold(client.open_calls == mine, f"{client.id}: {client.open_calls} open calls, {mine} found")
    for group in {call.group: None for call in state.calls.values()}:
        mine = sum(call.group is group for call in state.calls.values())
        _hold(group.open_calls == mine, f"{group.key}: {group.open_calls} open calls, {mine} found")
        _hold(state.groups.get(group.key) is group, f"{group.key} has open calls and is not listed")


def _call(state: State, call: Call) -> None:
    holders = [library for library in state.libraries.values() if library.held.get(call.id) is call]
    if call.state is CallState.WAITING:
        _hold(call.holder is None and not holders, f"call {call.id} waits and is held")
    elif call.state is CallState.HELD:
        members = call.holder.members if isinstance(call.holder, Gang) else (call.holder,)
        ended = set(call.holder.ends) if isinstance(call.holder, Gang) else set()
        expected = [x for x in members if x is not None and x.id not in ended]
        _hold(bool(expected), f"call {call.id} is held by nobody")
        _hold(set(map(id, holders)) == set(map(id, expected)), f"call {call.id} is held by others than it thinks")
    else:
        _hold(False, f"call {call.id} has ended and is still open")


def _context(state: State, context: Context) -> None:
    name, queued = context.recipe.name, list(context.queue)
    waiting = sum(call.state is CallState.WAITING and call.group.context is context for call in state.calls.values())
    _hold(
        context.queue.count == waiting == len(queued),
        f"{name}: {context.queue.count} in the queue's count, {len(queued)} in it, {waiting} wait",
    )
    _hold(len({call.id for call in queued}) == len(queued), f"{name}: a call is queued twice")
    _hold((context.recipe.key in state.hungry) == bool(waiting), f"{name}: hungry is wrong")
    starving = bool(waiting) and not any(library.usable for library in variants.libraries_for(context))
    _hold((context.starved_since is not None) == starving, f"{name}: starved_since is {context.starved_since}")


def _library(state: State, library: Library) -> None:
    context, name = library.context, f"library {library.id}"
    _hold(library.state is not LibraryState.GONE, f"{name} is gone but listed")
    _hold(context.libraries.get(library.id) is library, f"{name} is not its context's")
    _hold(library.pilot.libraries.get(library.id) is library, f"{name} is not its pilot's")
    usable = library.state is LibraryState.READY and library.pilot.state is PilotState.HERE
    usable = usable and library.suspect is None and library.pilot.reserved is None
    free = usable and library.load < library.slots
    suspects = [call for call in library.held.values() if call.by_itself]
    _hold(not suspects or library.load == 1, f"{name}: a suspect runs with others")
    _hold((library.id in context.idle) == free, f"{name}: idle set is wrong")
    level = (FREE if free else library.load - library.slots) if usable else None
    listed = context.index.level_of(library)
    _hold(listed == level or (listed, level) == (CLOSED, FULL), f"{name}: its level in the load index is wrong")
    _hold(not library.stuck or listed != FULL, f"{name} is stuck, and calls may wait in it")
    _hold(not (set(library.zombies) & set(library.held)), f"{name}: a zombie is also held")
    for id, call in library.held.items():
        _hold(state.calls.get(id) is call, f"{name} holds call {id}, which is not open")


def _hold(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)
