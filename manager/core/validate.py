"""What must hold after every event. Tests call it all the time; it is slow and never runs in production."""

from __future__ import annotations

from stoker.manager.core.state import CallState, Gang, Library, LibraryState, PilotState, State


def validate(state: State) -> None:
    """Raise AssertionError, naming what is broken."""
    for pilot in state.pilots.values():
        for device in pilot.devices.values():
            promised = sum(library.promised_bytes for library in device.libraries.values())
            _hold(
                device.promised_bytes == promised,
                f"{device.id}: promised {device.promised_bytes}, libraries {promised}",
            )
            _hold(0 <= promised <= device.facts.memory_bytes, f"{device.id}: promised twice")
        _hold(pilot.state is not PilotState.GONE or not pilot.libraries, f"{pilot.id} is gone but holds libraries")
    for library in state.libraries.values():
        _library(state, library)
    for call in state.calls.values():
        holders = [library for library in state.libraries.values() if library.held.get(call.id) is call]
        if call.state is CallState.WAITING:
            _hold(call.holder is None and not holders, f"call {call.id} waits and is held")
        elif call.state is CallState.HELD:
            members = call.holder.members if isinstance(call.holder, Gang) else (call.holder,)
            ended = set(call.holder.ends) if isinstance(call.holder, Gang) else set()
            expected = [x for x in members if x is not None and x.id not in ended]
            _hold(set(map(id, holders)) == set(map(id, expected)), f"call {call.id} is held by others than it thinks")
        else:
            _hold(False, f"call {call.id} has ended and is still open")
    for context in state.contexts.values():
        waiting = sum(
            call.state is CallState.WAITING and call.group.context is context for call in state.calls.values()
        )
        queued = list(context.queue)
        _hold(
            context.queue.count == waiting == len(queued),
            f"{context.recipe.name}: {context.queue.count} in the queue's count, {len(queued)} in it, {waiting} wait",
        )
        _hold(len({call.id for call in queued}) == len(queued), f"{context.recipe.name}: a call is queued twice")
        _hold((context.recipe.key in state.hungry) == bool(waiting), f"{context.recipe.name}: hungry is wrong")
    for client in state.clients.values():
        mine = sum(call.group.client is client for call in state.calls.values())
        _hold(client.open_calls == mine, f"{client.id}: {client.open_calls} open calls, {mine} found")


def _library(state: State, library: Library) -> None:
    context, name = library.context, f"library {library.id}"
    _hold(library.state is not LibraryState.GONE, f"{name} is gone but listed")
    _hold(context.libraries.get(library.id) is library, f"{name} is not its context's")
    _hold(library.pilot.libraries.get(library.id) is library, f"{name} is not its pilot's")
    usable = library.state is LibraryState.READY and library.pilot.state is PilotState.HERE
    free = usable and library.load < library.slots
    _hold((library.id in context.idle) == free, f"{name}: idle set is wrong")
    over = usable and library.load > library.slots
    _hold((library.id in context.backlogged) == over, f"{name}: backlogged set is wrong")
    _hold(not (library.zombies & set(library.held)), f"{name}: a zombie is also held")
    for id, call in library.held.items():
        _hold(state.calls.get(id) is call, f"{name} holds call {id}, which is not open")


def _hold(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)
