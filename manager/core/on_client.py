"""What clients say, and what is done about it."""

from __future__ import annotations

import math
from typing import assert_never

import msgspec

from stoker.contexts.recipe import NO_LIMITS
from stoker.manager.core import (
    block_orders,
    departures,
    dispatch,
    ending,
    objects,
    outlook,
    pilots,
    registry,
    report,
    seams,
    story,
)
from stoker.manager.core.events import FromClient, ToClient
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Client, PilotState
from stoker.manager.core.state import JOURNAL_LOST
from stoker.protocol import bounds, to_client, to_manager
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec, Failure, FailureKind
from stoker.protocol.ids import CLIENT_SHIFT, ClientId
from stoker.protocol.to_manager import (
    AskCalls,
    AskStatus,
    AskStory,
    BlockUpdate,
    Cancel,
    ClientHello,
    DefineFunction,
    DefineManifest,
    DefineRecipe,
    EndSession,
    MapReport,
    PiecesTaken,
    Received,
    ReleaseBlock,
    Resubmitted,
    SourceTrouble,
    Submit,
    WantPilots,
)
from stoker.protocol.to_pilot import FunctionBlob
from stoker.protocol.wire import why_not

MOST_CLIENTS = 1 << 20
"""A client's number is the high part of its calls' ids, which must fit 63 bits."""


def on_client_frame(manager: Manager, event: FromClient) -> None:
    """Take a client's frame, unless it was taken before."""
    state = manager.state
    client = state.clients.get(event.client)
    messages = event.messages
    if messages and isinstance(messages[0], ClientHello):
        client = _hello(manager, event.client, messages[0])
        messages = messages[1:]
    elif client is None or client.gone:
        state.refuse("frame of a client that has not said hello")
        return
    if client is None:
        return
    if not client.inbox.accept(event.sequence):
        state.refuse("repeated or early frame of a client")
        manager.tell(client, to_client.Ack(client.inbox.last))
        return
    for message in messages:
        wrong = "" if type(message) is Submit else bounds.wrong_with(message)
        if wrong:
            state.refuse("message of a client with a value that cannot be")
            manager.tell(client, to_client.Rejected(wrong))
        else:
            _message(manager, client, message)
    if event.sequence:
        manager.tell(client, to_client.Ack(event.sequence))


def _message(manager: Manager, client: Client, message: to_manager.FromClient) -> None:
    state = manager.state
    match message:
        case Submit():
            _submit(manager, client, message)
        case Received(total=total):
            _received(client, total)
            if message.unused:
                departures.forget_functions(manager, client, message.unused)
        case DefineFunction(key=key):
            registry.define_function(state, client, FunctionBlob(key, message.name, message.blob, message.place))
        case DefineRecipe():
            context = registry.define_context(manager, message.recipe)
            client.defined.add(message.recipe.key)
            if registry.set_client_limits(manager, client, context, message.recipe.limits):
                dispatch.apply_limits(manager, context)
        case Cancel(calls=ids):
            for id in ids:
                call = state.calls.get(id)
                if call is not None and call.group.client is client:
                    ending.cancel_call(manager, call, reason="cancelled by its client", running=message.running)
        case MapReport():
            outlook.record_map_report(state, client, message)
        case AskStatus():
            manager.tell(client, report.session_status(state))
        case AskStory(subject=subject):
            manager.tell(client, story.tell_story(state, subject))
        case AskCalls(limit=limit, state=only):
            manager.tell(client, report.list_calls(state, limit=limit, only=only))
        case WantPilots(blocks=said, ended=ended, most_pilots=most):
            state.said_blocks = dict(said)
            registry.bring_pilots(state, client, most)
            for pilot in [each for each in state.pilots.values() if each.block in ended]:
                if pilot.state is PilotState.CUT:
                    pilots.pilot_lost(manager, pilot.id, f"its block {pilot.block} has ended")
            manager.supply_changed |= bool(state.hungry)
        case BlockUpdate() | SourceTrouble():
            _from_factory(manager, client, message)
        case DefineManifest(object=name, manifest=manifest):
            objects.define_manifest(manager, name, manifest)
        case ReleaseBlock(block=block):
            for pilot in state.pilots.values():
                if pilot.block == block:
                    pilots.release_pilot(manager, pilot, f"block {block} is released")
        case EndSession(reason=reason):
            departures.end_session(manager, reason or "its client ended it")
        case PiecesTaken():
            state.refuse("pieces in a frame that is journalled")
        case Resubmitted():
            pilots.client_resubmitted(manager, client)
        case ClientHello():
            state.refuse("hello in the middle of a frame")
        case _:
            assert_never(message)


def _from_factory(manager: Manager, client: Client, message: BlockUpdate | SourceTrouble) -> None:
    if not client.factory:
        manager.state.refuse("update of blocks from a client that is not the factory")
    elif isinstance(message, BlockUpdate):
        block_orders.record_block_update(manager, message)
    else:
        block_orders.record_source_trouble(manager, message)


# ---- coming and going


def _hello(manager: Manager, id: ClientId, message: ClientHello) -> Client | None:
    state = manager.state
    if wrong := why_not(message, session=state.session) or bounds.wrong_with(message):
        state.refuse("client of another session or version")
        manager.out.append(ToClient(id, to_client.ClientRefused(wrong)))
        return None
    if banned := state.banned.get(id, ""):
        manager.out.append(ToClient(id, to_client.ClientRefused(banned)))
        return None
    client = state.clients.get(id)
    is_new = client is None
    if client is None:
        client = _joins(manager, id, message)
        if client is None:
            return None
    lost = client.inbox.skip_to(message.acknowledged)
    lost |= _had(manager, client, message.received, is_new=is_new)
    if lost and not client.observer:
        pilots.ask_client_again(manager, client)
    elif lost and not is_new:
        state.notice(JOURNAL_LOST)
    if client.unnamed is not None:
        client.inbox.last = message.acknowledged
    was_gone = client.gone
    client.connected, client.gone = True, False
    if was_gone:
        for context in registry.recompute_client_limits(manager, client):
            dispatch.apply_limits(manager, context)
    manager.tell(client, to_client.ClientWelcome(state.session, client.number, again=client.unnamed is not None))
    if client.unacked and client.unnamed is None:
        manager.tell(client, to_client.Results(client.first_unacked, list(client.unacked)))
    if client.factory:
        block_orders.factory_connected(manager, client)
    if state.ending:
        manager.tell(client, to_client.SessionOver(state.ending))
    return client


def _joins(manager: Manager, id: ClientId, message: ClientHello) -> Client | None:
    """A client that the manager does not know: it is new, or it was in the part of the journal that is lost."""
    state = manager.state
    if message.observer or message.factory:
        return registry.add_observer(state, id, factory=message.factory)
    number = state.next_client if message.number < 0 else message.number
    if number in state.clients_by_number or number > MOST_CLIENTS:
        state.refuse("client whose number is another client's")
        wrong = f"its calls carry the number {number}, which is another client's since the journal lost its end"
        manager.out.append(ToClient(id, to_client.ClientRefused(wrong)))
        return None
    return registry.add_client(state, id, number)


def _had(manager: Manager, client: Client, received: int, *, is_new: bool) -> bool:
    """A client says how many ends of calls it has had. True if the manager knows of fewer, so that it has lost some."""
    known, client.known_ends = client.known_ends, None
    if is_new:
        client.first_unacked = received
        return received > 0
    if known is not None and received > known:  # ends that were made since are new to the client, and get new numbers
        for _ in range(known - client.first_unacked):
            client.unacked.popleft()
        client.first_unacked = received
        return True
    if received > client.first_unacked + len(client.unacked):
        manager.state.refuse("client has more results than there are")
    else:
        _received(client, received)
    return False


def _received(client: Client, total: int) -> None:
    unacked = client.unacked
    count = min(total - client.first_unacked, len(unacked))
    if count == len(unacked):
        unacked.clear()
    else:
        for _ in range(count):
            unacked.popleft()
    client.first_unacked += max(0, count)


# ---- calls


def _are_of(client: Client, specs: list[CallSpec]) -> bool:
    """Whether all these calls carry the client's number."""
    ids = [spec.call for spec in specs]
    return not ids or min(ids) >> CLIENT_SHIFT == max(ids) >> CLIENT_SHIFT == client.number


def _options(message: Submit, *, now: float) -> CallOptions:
    """The options of calls that come now, with their deadline on the manager's clock."""
    options, due_in_s = message.options, message.due_in_s
    if due_in_s is None:
        return options
    deadline_at = now + due_in_s or math.ulp(0.0)  # 0 would mean that there is none
    return msgspec.structs.replace(
        options, objective=msgspec.structs.replace(options.objective, deadline_at=deadline_at)
    )


def _submit(manager: Manager, client: Client, message: Submit) -> None:
    state, options = manager.state, _options(message, now=manager.state.now)
    context, function = state.contexts.get(message.recipe), state.functions.get(message.function)
    if (context is None or function is None) and (client.inbox.has_hole or client.unnamed is not None):
        state.refuse("calls whose context or function was defined in a part of the journal that is lost")
        return  # the client says all of it again
    wrong = ""
    if client.observer:
        wrong = "an observer submits nothing"
    elif state.ending:
        wrong = f"the session is ending: {state.ending}"
    elif context is None:
        wrong = f"context {message.recipe} was not defined"
    elif function is None:
        wrong = f"function {message.function} was not defined"
    elif not _are_of(client, message.calls):
        wrong = f"calls of client {client.number} carry another client's number"
    else:
        wrong = bounds.wrong_with(message)
    if client.unnamed is not None:
        client.unnamed.difference_update([spec.call for spec in message.calls])
        told = {end.call for end in client.unacked}
        fresh = [spec for spec in message.calls if spec.call not in told]
        message = msgspec.structs.replace(message, calls=fresh)
    key = (client.number, message.function, message.recipe, options)
    said = context.said_limits.get(client.id, NO_LIMITS) if context is not None else NO_LIMITS
    unhonoured = ""
    if not wrong and (key not in state.groups or said != NO_LIMITS):
        unhonoured = seams.refusal(options, manager.policies.honours, limits=said)
    if unhonoured:
        state.refuse("wish that the policy does not honour")
        failure = Failure(FailureKind.DROPPED, unhonoured)
        ends = [CallEnd(spec.call, False, b"", 0.0, failure) for spec in message.calls if spec.call not in state.calls]
        manager.results_of(client).extend(ends)
        return
    if wrong or context is None or function is None:
        state.refuse("submit that names what is not there")
        failure = Failure(FailureKind.CANCELLED, wrong)
        ends = [CallEnd(spec.call, False, b"", 0.0, failure) for spec in message.calls if spec.call not in state.calls]
        manager.results_of(client).extend(ends)
        return
    group = registry.group_of(manager, client, function, context, options)
    fresh = departures.end_kept(manager, client, message.calls) if state.kept_ends else message.calls
    if fresh:
        dispatch.submit_calls(manager, group, fresh)
