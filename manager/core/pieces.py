"""Forward pieces of results (`stoker.stream`) to clients, and acknowledgements of pieces to pilots.

Pieces are not in the journal, so pieces affect no decision and never enter `Core.handle`. Pilots repeat pieces that are
not acknowledged, and clients request pieces that they missed, so a client has every piece when a call ends.
"""

from __future__ import annotations

from stoker.manager.core import holding
from stoker.manager.core.events import Command, FromClient, FromPilot, ToClient, ToPilot
from stoker.manager.core.nouns import Call, CallState, Library, PilotState
from stoker.manager.core.state import State
from stoker.protocol import bounds, to_client, to_manager, to_pilot


def has_only_result_pieces(event: FromPilot | FromClient) -> bool:
    if event.sequence or not event.messages:
        return False
    lane = to_manager.CallYielded if isinstance(event, FromPilot) else to_manager.PiecesTaken
    return all(type(message) is lane for message in event.messages)


def forward_result_pieces(state: State, event: FromPilot | FromClient, now: float) -> list[Command]:
    out: list[Command] = []
    if isinstance(event, FromPilot):
        pilot = state.pilots.get(event.pilot)
        if pilot is None or pilot.state not in _CONNECTED or pilot.hellos_asked:
            return out
        for said in event.messages:
            if type(said) is to_manager.CallYielded and not bounds.describe_invalid_message(said):
                _forward_pieces(state, pilot.libraries.get(said.library), said, out, now)
    else:
        for taken in event.messages:
            if type(taken) is to_manager.PiecesTaken and not bounds.describe_invalid_message(taken):
                call = state.calls.get(taken.call)
                if call is not None and call.group.client.id == event.client:
                    _forward_acknowledgement(state, call, taken, out)
    return out


_CONNECTED = (PilotState.HERE, PilotState.DRAINING)


def _forward_pieces(
    state: State, library: Library | None, message: to_manager.CallYielded, out: list[Command], now: float
) -> None:
    call = library.held.get(message.call) if library is not None else None
    if call is None or not call.group.options.stream or call.holder is not library:
        return
    facts = holding.get_or_create_stream(state, call.id, message.run)
    facts.sent = max(facts.sent, message.first + len(message.items))
    if message.waits and facts.sent > facts.taken and facts.waits_since is None:
        facts.waits_since = now
    client = call.group.client
    if client.connected:
        said = to_client.Pieces(call.id, message.run, message.first, message.items, message.waits)
        out.append(ToClient(client.id, said))


def _forward_acknowledgement(state: State, call: Call, message: to_manager.PiecesTaken, out: list[Command]) -> None:
    library = call.holder
    if call.state is not CallState.HELD or not isinstance(library, Library):
        return
    facts = state.streams.get(call.id)
    if facts is not None and facts.run == message.run and message.upto > facts.taken:
        facts.taken, facts.waits_since = message.upto, None
    if library.pilot.state in _CONNECTED:
        said = to_pilot.AckPieces(library.id, call.id, message.run, message.upto, message.again)
        out.append(ToPilot(library.pilot.id, said))
