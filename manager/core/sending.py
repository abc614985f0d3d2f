"""Send what an event collected: calls, drops, ends of calls; and pass on pieces of results.

Pieces are in no journal, so they decide nothing and never pass `Core.handle`. A pilot repeats unacknowledged pieces,
and a client asks for missed ones, so the end of a call means that its client has every piece.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter

from stoker.manager.core import blame, holding
from stoker.manager.core.events import Command, FromClient, FromPilot, ToClient, ToPilot
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, CallState, Group, Library, PilotState
from stoker.manager.core.state import State
from stoker.protocol import bounds, to_client, to_manager, to_pilot
from stoker.protocol.calls import CallSpec
from stoker.protocol.ids import FunctionKey
from stoker.protocol.to_pilot import CancelCalls, FunctionBlob, RunCalls

_GROUP = attrgetter("group")


def send_calls(manager: Manager) -> None:
    """Send libraries the calls that they got, one message for a group."""
    sends, manager.sends = manager.sends, {}
    for library, given in sends.items():
        if not given:
            continue
        group = given[0].group
        specs = [call.spec for call in given if call.group is group]  # the hot path: nearly always all of them
        if len(specs) == len(given):
            _send(manager, library, group, specs)
        else:
            for group, some in groupby(given, _GROUP):
                _send(manager, library, group, [call.spec for call in some])


def _send(manager: Manager, library: Library, group: Group, specs: list[CallSpec]) -> None:
    blob = blob_for(library, group)
    manager.say(library.pilot, RunCalls(library.id, group.function.key, specs, group.options, blob))
    blame.watch_printing(manager, library)


def blob_for(library: Library, group: Group) -> FunctionBlob | None:
    """Return the function of a group if the library does not have it."""
    function = group.function
    if function.key in library.functions:
        return None
    library.functions.add(function.key)
    return function


def forget_sent(library: Library, *functions: FunctionKey) -> None:
    """A library lost these functions, or may have lost any: send them again."""
    library.functions.difference_update(functions or tuple(library.functions))


def send_drops(manager: Manager) -> None:
    """Tell libraries which calls to drop."""
    for (library, running, grace_s), dropped in manager.drops.items():
        manager.say(library.pilot, CancelCalls(library.id, tuple(dropped), running, grace_s))
    manager.drops.clear()


def send_results(manager: Manager) -> None:
    """Number ends of calls and send them to connected clients."""
    results, manager.results = manager.results, {}
    for client, ends in results.items():
        if not ends:
            continue
        first = client.first_unacked + len(client.unacked)
        client.unacked.extend(ends)
        if client.connected and client.unnamed is None:
            manager.tell(client, to_client.Results(first, ends))


def are_pieces(event: FromPilot | FromClient) -> bool:
    """True if a frame has only pieces or acknowledgements of pieces."""
    if event.sequence or not event.messages:
        return False
    lane = to_manager.CallYielded if isinstance(event, FromPilot) else to_manager.PiecesTaken
    return all(type(message) is lane for message in event.messages)


def pass_pieces_on(state: State, event: FromPilot | FromClient, now: float) -> list[Command]:
    """Return commands that pass on the pieces of a frame."""
    out: list[Command] = []
    if isinstance(event, FromPilot):
        pilot = state.pilots.get(event.pilot)
        if pilot is None or pilot.state not in _SPEAKS or pilot.hellos_asked:
            return out
        for said in event.messages:
            if type(said) is to_manager.CallYielded and not bounds.wrong_with(said):
                _came(state, pilot.libraries.get(said.library), said, out, now)
    else:
        for taken in event.messages:
            if type(taken) is to_manager.PiecesTaken and not bounds.wrong_with(taken):
                call = state.calls.get(taken.call)
                if call is not None and call.group.client.id == event.client:
                    _taken(state, call, taken, out)
    return out


_SPEAKS = (PilotState.HERE, PilotState.DRAINING)


def _came(
    state: State, library: Library | None, message: to_manager.CallYielded, out: list[Command], now: float
) -> None:
    call = library.held.get(message.call) if library is not None else None
    if call is None or not call.group.options.stream or call.holder is not library:
        return
    facts = holding.stream_of(state, call.id, message.run)
    facts.sent = max(facts.sent, message.first + len(message.items))
    if message.waits and facts.sent > facts.taken and facts.waits_since is None:
        facts.waits_since = now
    client = call.group.client
    if client.connected:
        said = to_client.Pieces(call.id, message.run, message.first, message.items, message.waits)
        out.append(ToClient(client.id, said))


def _taken(state: State, call: Call, message: to_manager.PiecesTaken, out: list[Command]) -> None:
    library = call.holder
    if call.state is not CallState.HELD or not isinstance(library, Library):
        return
    facts = state.streams.get(call.id)
    if facts is not None and facts.run == message.run and message.upto > facts.taken:
        facts.taken, facts.waits_since = message.upto, None
    if library.pilot.state in _SPEAKS:
        said = to_pilot.AckPieces(library.id, call.id, message.run, message.upto, message.again)
        out.append(ToPilot(library.pilot.id, said))
