"""Send what an event collected: calls, drops, ends of calls, pieces of results.

What leaves at the end of an event: calls to libraries, orders to drop some, and ends of calls to clients.

The lane of pieces: what running calls yield goes to their clients, and what clients have goes back.

Nothing here decides anything or changes what decides: pieces are in no journal, so a replay must come to the same
without them. They never pass `Core.handle`. What is kept of a call's pieces serves its story alone (`StreamFacts`).

Pieces are passed on only from the library that holds the call, and only to a client that is there. Others are dropped:
a pilot keeps what is not acknowledged and says it again after a welcome, and a client that has joined asks for what it
may have missed. Acknowledgements come from the client alone, so a call's end means that its client has every piece.
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
from stoker.protocol.to_pilot import CancelCalls, FunctionBlob, RunCalls

_GROUP = attrgetter("group")


def send_calls(manager: Manager) -> None:
    """Send libraries the calls that they were given, one message for those of one group."""
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
    """The function of these calls, if the library has not been sent it."""
    function = group.function
    if function.key in library.functions:
        return None
    library.functions.add(function.key)
    return function


def forget_sent_function(library: Library, group: Group) -> None:
    """A library has lost the function of these calls: it is sent again."""
    library.functions.discard(group.function.key)


def forget_sent_functions(library: Library) -> None:
    """A library may have lost functions that it was sent: each is sent again."""
    library.functions.clear()


def send_drops(manager: Manager) -> None:
    """Tell libraries which calls to drop."""
    for (library, running, grace_s), dropped in manager.drops.items():
        manager.say(library.pilot, CancelCalls(library.id, tuple(dropped), running, grace_s))
    manager.drops.clear()


def send_results(manager: Manager) -> None:
    """Number the ends that wait for their clients, and send them to those that are connected."""
    results, manager.results = manager.results, {}
    for client, ends in results.items():
        if not ends:
            continue
        first = client.first_unacked + len(client.unacked)
        client.unacked.extend(ends)
        if client.connected and client.unnamed is None:
            manager.tell(client, to_client.Results(first, ends))


# ---- pieces of results
def are_pieces(event: FromPilot | FromClient) -> bool:
    """True for a frame of the lane alone."""
    if event.sequence or not event.messages:
        return False
    lane = to_manager.CallYielded if isinstance(event, FromPilot) else to_manager.PiecesTaken
    return all(type(message) is lane for message in event.messages)


def pass_pieces_on(state: State, event: FromPilot | FromClient, now: float) -> list[Command]:
    """What is to be sent for a frame of the lane."""
    out: list[Command] = []
    if isinstance(event, FromPilot):
        pilot = state.pilots.get(event.pilot)
        if pilot is None or pilot.state not in _SPEAKS or pilot.hellos_asked:
            return out
        for message in event.messages:
            library = pilot.libraries.get(message.library) if type(message) is to_manager.CallYielded else None
            if type(message) is to_manager.CallYielded and library is not None and not bounds.wrong_with(message):
                _came(state, library, message, out, now)
    else:
        for taken in event.messages:
            call = state.calls.get(taken.call) if type(taken) is to_manager.PiecesTaken else None
            if type(taken) is not to_manager.PiecesTaken or call is None or bounds.wrong_with(taken):
                continue
            if call.group.client.id == event.client:
                _taken(state, call, taken, out)
    return out


_SPEAKS = (PilotState.HERE, PilotState.DRAINING)


def _came(state: State, library: Library, message: to_manager.CallYielded, out: list[Command], now: float) -> None:
    call = library.held.get(message.call)
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
