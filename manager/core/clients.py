"""Handle clients that join, submit, acknowledge results and leave; forward pieces of results; end the session.

If a program disconnects, the session keeps its results and definitions for a day.

If an event makes the core raise an exception, the manager restarts. In its journal the server replaces the event by an
`EventRefused`, so that the restarted core does not fail again.

Pieces of results (`stoker.stream`) are forwarded without `Core.handle` and are not in the journal, so no decision may
depend on them. Pilots repeat unacknowledged pieces, so a client has every piece when its call ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from stoker.contexts.recipe import NO_LIMITS, ObjectRef, Recipe
from stoker.manager.core import block_orders, dispatch, ending, events, holding, libraries, outlook, pilots, registry
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, CallState, Client, Library, PilotState
from stoker.manager.core.seams import describe_refused_options
from stoker.manager.core.state import State, StreamProgress, forget_oldest
from stoker.protocol import bounds, to_client
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec, Failure, FailureKind
from stoker.protocol.ids import CLIENT_SHIFT, CallId, ClientId, PilotId
from stoker.protocol.to_manager import CallYielded, Cancel, ClientHello, PiecesTaken, Submit
from stoker.protocol.to_pilot import AckPieces, Exit
from stoker.units import show_bytes, show_seconds

MAX_CLIENTS = 1 << 20  # The high bits of a call id are the number of its client, and the id must fit in 63 bits


def add_client(manager: Manager, id: ClientId, message: ClientHello) -> Client | None:
    state = manager.state
    if message.observer or message.factory:
        client = state.clients[id] = Client(id, number=-1, observer=True, factory=message.factory)
        return client
    number = state.next_client if message.number < 0 else message.number
    if number in state.clients_by_number or number > MAX_CLIENTS:
        state.count_refusal("client with the number of another client")
        wrong = f"another client has the number {number} of its calls, because the journal lost its last records"
        manager.commands.append(events.ToClient(id, to_client.ClientRefused(wrong)))
        return None
    client = state.clients[id] = state.clients_by_number[number] = Client(id, number=number, observer=False)
    state.next_client = max(state.next_client, number + 1)
    return client


def reconcile_received_results(manager: Manager, client: Client, received: int, *, is_new: bool) -> bool:
    """Drop the results whose receipt a client confirms. Return True if the journal has lost results."""
    known, client.known_ends = client.known_ends, None
    if is_new:
        client.first_unacked = received
        return received > 0
    if known is not None and received > known:  # results since the restart get new numbers: the client lacks them
        for _ in range(min(known - client.first_unacked, len(client.unacked))):
            client.unacked.popleft()
        client.first_unacked = received
        return True
    if received > client.first_unacked + len(client.unacked):
        manager.state.count_refusal("client acknowledged more results than were sent")
    else:
        drop_acknowledged_results(client, received)
    return False


def drop_acknowledged_results(client: Client, total: int) -> None:
    unacked = client.unacked
    count = min(total - client.first_unacked, len(unacked))
    if count == len(unacked):
        unacked.clear()
    else:
        for _ in range(count):
            unacked.popleft()
    client.first_unacked += max(0, count)


def mark_client_connected(manager: Manager, client: Client) -> None:
    was_gone, client.connected, client.gone = client.gone, True, False
    for context in registry.recompute_client_limits(manager, client) if was_gone else ():
        dispatch.apply_limits(manager, context)


def define_recipe(manager: Manager, client: Client, recipe: Recipe) -> None:
    context = registry.define_context(manager, recipe)
    client.defined.add(recipe.key)
    if registry.set_client_limits(manager, client, context, recipe.limits):
        dispatch.apply_limits(manager, context)


# ---- submitting
def needs_resubmission(state: State, client: Client, message: Submit) -> bool:
    if message.recipe in state.contexts and message.function in state.functions:
        return False
    if not client.inbox.lost_handled_frames and client.unnamed is None:
        return False
    state.count_refusal("calls whose context or function definition was lost with a part of the journal")
    return True


def build_call_options(message: Submit, *, now: float) -> CallOptions:
    options, due_in_s = message.options, message.due_in_s
    if due_in_s is None:
        return options
    deadline_at = now + due_in_s or math.ulp(0.0)  # because 0 means no deadline
    objective = msgspec.structs.replace(options.objective, deadline_at=deadline_at)
    return msgspec.structs.replace(options, objective=objective)


def find_submit_failure(
    manager: Manager, client: Client, message: Submit, options: CallOptions, *, is_known: bool
) -> Failure | None:
    """Return why submitted calls are refused, or None. `is_known`: True if earlier calls had equal options."""
    state = manager.state
    context = state.contexts.get(message.recipe)
    ids = [spec.call for spec in message.calls]
    if client.observer:
        wrong = "an observer cannot submit calls"
    elif state.end_reason:
        wrong = f"the session is ending: {state.end_reason}"
    elif context is None:
        wrong = f"context {message.recipe} was not defined"
    elif message.function not in state.functions:
        wrong = f"function {message.function} was not defined"
    elif ids and not min(ids) >> CLIENT_SHIFT == max(ids) >> CLIENT_SHIFT == client.number:
        wrong = f"calls of client {client.number} carry another client's number"
    elif is_known:  # the options were checked when the first calls of this group arrived
        wrong = bounds.describe_invalid_calls(message.calls)
    else:
        wrong = bounds.describe_invalid_message(message)
    if wrong:
        state.count_refusal("submit with an unknown context or function, or with invalid calls")
        return Failure(FailureKind.CANCELLED, wrong)
    limits = context.reported_limits.get(client.id, NO_LIMITS) if context is not None else NO_LIMITS
    if is_known and limits == NO_LIMITS:
        return None
    if unhonoured := describe_refused_options(options, manager.policies.honours, limits=limits):
        state.count_refusal("option that the policy does not support")
        return Failure(FailureKind.DROPPED, unhonoured)
    return None


def remove_ended_calls(client: Client, message: Submit) -> Submit:
    """Return the message without those resubmitted calls whose results have already been sent."""
    if client.unnamed is None:
        return message
    client.unnamed.difference_update([spec.call for spec in message.calls])
    told = {end.call for end in client.unacked}
    return msgspec.structs.replace(message, calls=[spec for spec in message.calls if spec.call not in told])


def fail_unaccepted_calls(manager: Manager, client: Client, ids: Iterable[CallId], failure: Failure) -> None:
    ends = [CallEnd(id, False, b"", 0.0, failure) for id in ids if id not in manager.state.calls]
    manager.pending_results_of(client).extend(ends)


def cancel_calls(manager: Manager, client: Client, message: Cancel) -> None:
    for id in message.calls:
        call = manager.state.calls.get(id)
        if call is not None and call.group.client is client:
            ending.cancel_call(manager, call, reason="cancelled by its client", running=message.running)


# ---- leaving
KEEP_RESULTS_S = 86_400.0  # Seconds that a session of `stoker up` keeps the results of a program that has disconnected
MAX_KEPT_BYTES = 64_000_000  # Maximum bytes of kept results of a disconnected program; results in files do not count
SIZE_CHECK_AFTER_S = 60.0  # Seconds after a program has disconnected until the size of its results is checked
KEPT_BANS = 1000


def handle_gone_client(manager: Manager, id: ClientId) -> None:
    """Cancel the calls of a client that did not reconnect. End a session that has no other client, unless `stoker up`
    started the session.
    """
    state = manager.state
    client = state.clients.get(id)
    if client is None or client.gone:
        return
    client.gone, client.connected, client.gone_at = True, False, state.now
    if client.observer:
        registry.forget_client(state, client)
        return
    outlook.recount_unsent_calls(state, client)
    for context in registry.recompute_client_limits(manager, client):
        dispatch.apply_limits(manager, context)
    if state.outlives_clients:
        manager.set_timer(f"gone/{id}", state.now + SIZE_CHECK_AFTER_S)
    for call in [call for call in state.calls.values() if call.group.client is client]:
        ending.cancel_call(manager, call, reason="its client is gone", running=True)
    if not state.outlives_clients and all(other.gone or other.observer for other in state.clients.values()):
        end_session(manager, "its client is gone")


def forget_absent_client(manager: Manager, id: str) -> None:
    """Drop the results of an absent client if they are too large. After a day, remove the client."""
    state = manager.state
    client = state.clients.get(ClientId(id))
    if client is None:
        _forget_unused_records(manager, id)
        return
    if not client.gone:
        return
    size = sum(len(end.payload) for end in client.unacked if isinstance(end.payload, bytes))
    away_s = state.now - client.gone_at
    is_over = away_s >= KEEP_RESULTS_S
    if client.unacked and (is_over or size > MAX_KEPT_BYTES):
        why = f"after {show_seconds(away_s)}" if is_over else f"because they were {show_bytes(size)}"
        _drop_results(manager, client, why)
    if is_over:
        if client.id not in state.ban_reasons:
            why = "this program was disconnected for too long, and the session has removed it; start the program again"
            ban_peer(state, client.id, why)
        registry.forget_client(state, client)
        ending.record_runs(manager)
        _forget_unused_records(manager, id)
    else:
        manager.set_timer(f"gone/{id}", client.gone_at + KEEP_RESULTS_S)


def ban_peer(state: State, name: str, why: str) -> None:
    state.ban_reasons[name] = why
    forget_oldest(state.ban_reasons, max_records=KEPT_BANS)


def _drop_results(manager: Manager, client: Client, why: str) -> None:
    for end in client.unacked:
        if isinstance(end.payload, ObjectRef):
            manager.commands.append(events.DiscardObject(end.payload.source))
    count = len(client.unacked)
    manager.state.add_notice(f"{count} results of a program that did not reconnect were dropped {why}")
    ban_peer(
        manager.state, client.id, f"this program was disconnected for too long: its {count} results were dropped {why}"
    )
    client.first_unacked += count
    client.unacked.clear()


def _forget_unused_records(manager: Manager, id: str) -> None:
    state = manager.state
    for pilot in state.gone_pilots.values():
        if state.now - pilot.lost_at >= KEEP_RESULTS_S:
            pilot.restorable_libraries = None
    libraries.forget_failures_on_gone_pilots(state)
    if registry.forget_unused_definitions(manager):
        manager.set_timer(f"gone/{id}", state.now + KEEP_RESULTS_S)


# ---- the end of the session
def end_session(manager: Manager, reason: str) -> None:
    state = manager.state
    if state.end_reason:
        return
    state.end_reason = reason
    failure = Failure(FailureKind.CANCELLED, f"the session ended before the call did: {reason}")
    for call in list(state.calls.values()):
        if call.state is CallState.HELD:
            holding.withdraw_call(manager, call, stops_running=True)
        ending.fail_call(manager, call, failure)
    ending.send_results(manager)
    manager.calls_to_send.clear()
    manager.calls_to_drop.clear()
    for pilot in state.pilots.values():
        manager.send_to_pilot(pilot, Exit(reason))
    ending.record_runs(manager)
    block_orders.write_final_pilot_records(manager)
    for client in state.clients.values():
        if client.connected:
            manager.send_to_client(client, to_client.SessionOver(reason))
    manager.commands.append(events.EndManager(reason))


# ---- lost records of the journal
def mark_journal_records_lost(state: State) -> None:
    """Until the next hello of each sender, accept frames with any number, because the journal has lost records."""
    state.count_refusal("damaged records of the journal")
    inboxes = [client.inbox for client in state.clients.values()]
    inboxes += [pilot.inbox for pilot in (*state.pilots.values(), *state.gone_pilots.values())]
    for inbox in inboxes:
        inbox.lost_handled_frames = True


def deliver_kept_results(manager: Manager, client: Client, specs: list[CallSpec]) -> list[CallSpec]:
    """Send a client the kept results of its calls that have already ended. Return the other calls."""
    state, rest = manager.state, []
    for spec in specs:
        end = state.results_of_old_journal.pop(spec.call, None)
        if end is None or spec.call in state.calls:
            rest.append(spec)
            continue
        client.last_call = max(client.last_call, spec.call)
        state.done += 1
        manager.pending_results_of(client).append(end)
    return rest


# ---- refused events
ROUND_PAUSE_S = 60.0  # Seconds until the next planning round of a policy if its last round raised an exception
MAX_REFUSED_EVENTS_OF_CLIENT = 3  # A client is banned after this many messages that made the core raise an exception


def build_refused_event(event: events.Event, reason: str) -> events.EventRefused:
    match event:
        case events.FromClient(client=client, sequence=sequence, messages=messages):
            calls = [spec.call for message in messages if isinstance(message, Submit) for spec in message.calls]
            return events.EventRefused("client", client, sequence, reason, calls)
        case events.FromPilot(pilot=pilot, sequence=sequence):
            return events.EventRefused("pilot", pilot, sequence, reason)
        case events.PilotLost(pilot=pilot):
            return events.EventRefused("pilot", pilot, 0, reason)
        case events.ClientGone(client=client):
            return events.EventRefused("client", client, 0, reason)
        case events.TimerFired(key=key):
            return events.EventRefused("timer", key, 0, reason)
        case _:
            return events.EventRefused("manager", type(event).__name__, 0, reason)


def handle_refused_event(manager: Manager, event: events.EventRefused) -> None:
    """Handle an event that made the core raise an exception: fail its calls, or ban its sender and remove the pilot."""
    state = manager.state
    state.core_failure_times.append(state.now)
    whose = f"the timer {event.name}" if event.role == "timer" else f"a message of {event.role} {event.name}"
    state.add_notice(f"the manager failed on {whose}, was started again and refused it: {event.reason}")
    match event.role:
        case "client":
            _refuse_event_of_client(manager, event)
        case "pilot":
            _ban_event_peer(manager, event)
            why = f"the manager failed on one of its messages: {event.reason}"
            pilots.remove_ended_pilot(manager, PilotId(event.name), why)
        case "timer":
            state.timers.pop(event.name, None)
            if event.name.startswith("round/"):
                manager.set_timer(event.name, state.now + ROUND_PAUSE_S)


def _refuse_event_of_client(manager: Manager, event: events.EventRefused) -> None:
    client = manager.state.clients.get(ClientId(event.name))
    if client is None or not event.sequence:
        _ban_event_peer(manager, event)
        return
    client.refusals += 1
    if client.refusals >= MAX_REFUSED_EVENTS_OF_CLIENT:
        _ban_event_peer(manager, event)
    client.inbox.skip_to(event.sequence)
    client.last_call = max([client.last_call, *event.calls])
    failure = Failure(FailureKind.CANCELLED, f"the manager failed on the message with this call: {event.reason}")
    fail_unaccepted_calls(manager, client, event.calls, failure)


def _ban_event_peer(manager: Manager, event: events.EventRefused) -> None:
    ban_peer(manager.state, event.name, f"the manager failed on a message of this peer: {event.reason}")


# ---- pieces of results
_CONNECTED = (PilotState.HERE, PilotState.DRAINING)


def has_only_result_pieces(event: events.FromPilot | events.FromClient) -> bool:
    if event.sequence or not event.messages:
        return False
    lane = CallYielded if isinstance(event, events.FromPilot) else PiecesTaken
    return all(type(message) is lane for message in event.messages)


def forward_result_pieces(
    state: State, event: events.FromPilot | events.FromClient, now: float
) -> list[events.Command]:
    out: list[events.Command] = []
    if isinstance(event, events.FromPilot):
        pilot = state.pilots.get(event.pilot)
        if pilot is None or pilot.state not in _CONNECTED or pilot.hello_requests:
            return out
        for said in event.messages:
            if type(said) is CallYielded and not bounds.describe_invalid_message(said):
                _forward_pieces(state, pilot.libraries.get(said.library), said, out, now)
    else:
        for taken in event.messages:
            if type(taken) is PiecesTaken and not bounds.describe_invalid_message(taken):
                call = state.calls.get(taken.call)
                if call is not None and call.group.client.id == event.client:
                    _forward_acknowledgement(state, call, taken, out)
    return out


def _forward_pieces(
    state: State, library: Library | None, said: CallYielded, out: list[events.Command], now: float
) -> None:
    call = library.held.get(said.call) if library is not None else None
    if call is None or not call.group.options.stream or call.holder is not library:
        return
    facts = state.streams.get(call.id)
    if facts is None or facts.run != said.run:
        facts = state.streams[call.id] = StreamProgress(said.run)
    facts.sent = max(facts.sent, said.first + len(said.items))
    if said.waits and facts.sent > facts.taken and facts.waits_since is None:
        facts.waits_since = now
    client = call.group.client
    if client.connected:
        out.append(events.ToClient(client.id, to_client.Pieces(call.id, said.run, said.first, said.items, said.waits)))


def _forward_acknowledgement(state: State, call: Call, taken: PiecesTaken, out: list[events.Command]) -> None:
    library = call.holder
    if call.state is not CallState.HELD or not isinstance(library, Library):
        return
    facts = state.streams.get(call.id)
    if facts is not None and facts.run == taken.run and taken.upto > facts.taken:
        facts.taken, facts.waits_since = taken.upto, None
    if library.pilot.state in _CONNECTED:
        out.append(events.ToPilot(library.pilot.id, AckPieces(library.id, call.id, taken.run, taken.upto, taken.again)))
