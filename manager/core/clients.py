"""What clients say, and what is done about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from stoker.manager.core import calls, report, story
from stoker.manager.core.actions import release
from stoker.manager.core.commands import AskAdvice, EndManager
from stoker.manager.core.events import FromClient
from stoker.manager.core.state import CallState, Client, Context, Group, PilotState
from stoker.manager.protocol import to_client
from stoker.manager.protocol.calls import CallEnd, Failure, FailureKind
from stoker.manager.protocol.ids import ClientId
from stoker.manager.protocol.to_manager import (
    AskStatus,
    AskStory,
    Cancel,
    ClientHello,
    DefineFunction,
    DefineRecipe,
    EndSession,
    Received,
    ReleaseBlock,
    Submit,
    WantPilots,
)
from stoker.manager.protocol.to_pilot import Exit, FunctionBlob
from stoker.manager.protocol.wire import VERSION

if TYPE_CHECKING:
    from stoker.manager.core.core import Core


def frame(core: Core, event: FromClient) -> None:
    """Take a client's frame, unless it was taken before."""
    state = core.state
    client = state.clients.get(event.client)
    if client is None or client.gone:
        if not event.messages or not isinstance(event.messages[0], ClientHello):
            state.refuse("frame of a client that has not said hello")
            return
    elif not client.inbox.accept(event.sequence):
        state.refuse("repeated or early frame of a client")
        core.tell(client, to_client.Ack(client.inbox.last))
        return
    for message in event.messages:
        match message:
            case ClientHello():
                client = _hello(core, event.client, message)
                if client is None:
                    return
            case _ if client is None:
                return
            case Submit():
                _submit(core, client, message)
            case Received():
                _received(core, client, message)
            case DefineFunction():
                state.functions[message.key] = FunctionBlob(message.key, message.name, message.blob)
            case DefineRecipe():
                _recipe(core, message)
            case Cancel():
                for id in message.calls:
                    call = state.calls.get(id)
                    if call is not None and call.group.client is client:
                        calls.cancel(core, call, reason="cancelled by its client", running=message.running)
            case AskStatus():
                core.tell(client, report.status(state))
            case AskStory():
                core.tell(client, story.tell(state, message.subject))
            case WantPilots():
                state.blocks = dict(message.blocks)
                core.supply_changed = bool(state.hungry)
            case ReleaseBlock():
                for pilot in state.pilots.values():
                    if pilot.block == message.block:
                        release(core, pilot, f"block {message.block} is released")
            case EndSession():
                end_session(core, message.reason or "its client ended it")
            case _:
                assert_never(message)
    if event.sequence and client is not None:
        core.tell(client, to_client.Ack(event.sequence))


def _hello(core: Core, id: ClientId, message: ClientHello) -> Client | None:
    state = core.state
    client = state.clients.get(id)
    if message.protocol != VERSION or message.session != state.session:
        stranger = client or Client(id, number=-1, observer=True)
        state.refuse("client of another session or version")
        core.tell(
            stranger,
            to_client.ClientRefused(
                f"this is session {state.session}, protocol {VERSION}; you asked for session {message.session}, "
                f"protocol {message.protocol}"
            ),
        )
        return None
    if client is None:
        number = -1 if message.observer else len(state.clients_by_number)
        client = state.clients[id] = Client(id, number=number, observer=message.observer)
        if not message.observer:
            state.clients_by_number[number] = client
    client.connected, client.gone = True, False
    core.tell(client, to_client.ClientWelcome(state.session, client.number))
    if message.received > client.first_unacked + len(client.unacked):
        state.refuse("client has more results than there are")
        return client
    _received(core, client, message.received)
    if client.unacked:
        core.tell(client, to_client.Results(client.first_unacked, list(client.unacked)))
    return client


def _received(core: Core, client: Client, message: Received | int) -> None:
    total = message if isinstance(message, int) else message.total
    unacked = client.unacked
    while unacked and client.first_unacked < total:
        unacked.popleft()
        client.first_unacked += 1


def _recipe(core: Core, message: DefineRecipe) -> None:
    recipe = message.recipe
    if recipe.key not in core.state.contexts:
        core.state.contexts[recipe.key] = Context(recipe)
        core.out.append(AskAdvice(recipe.key))  # type: ignore[arg-type]


def _submit(core: Core, client: Client, message: Submit) -> None:
    state = core.state
    context, function = state.contexts.get(message.recipe), state.functions.get(message.function)
    wrong = ""
    if client.observer:
        wrong = "an observer submits nothing"
    elif state.ending:
        wrong = f"the session is ending: {state.ending}"
    elif context is None:
        wrong = f"context {message.recipe} was not defined"
    elif function is None:
        wrong = f"function {message.function} was not defined"
    elif any(spec.call >> 40 != client.number for spec in message.calls):
        wrong = f"calls of client {client.number} carry another client's number"
    elif not 1 <= message.options.gang[0] <= message.options.gang[1]:
        wrong = f"a gang of {message.options.gang[0]} to {message.options.gang[1]}"
    if wrong or context is None or function is None:
        state.refuse("submit that names what is not there")
        for spec in message.calls:
            core.deliver(client, CallEnd(spec.call, False, b"", 0.0, Failure(FailureKind.CANCELLED, wrong)))
        return
    key = (client.number, message.function, message.recipe, message.options)
    group = state.groups.get(key)
    if group is None or group.function is not function:
        group = state.groups[key] = Group(client, function, context, message.options)
    calls.arrive(core, group, message.calls)


def gone(core: Core, id: ClientId) -> None:
    """A client will not come back. The session that nobody else uses ends with it."""
    state = core.state
    client = state.clients.get(id)
    if client is None or client.gone:
        return
    client.gone, client.connected = True, False
    client.unacked.clear()
    if client.observer:
        del state.clients[id]
        return
    for call in [call for call in state.calls.values() if call.group.client is client]:
        calls.cancel(core, call, reason="its client is gone", running=True)
    if all(other.gone or other.observer for other in state.clients.values()):
        end_session(core, "its client is gone")


def end_session(core: Core, reason: str) -> None:
    """End every call that is left, let the pilots go, and stop the manager."""
    state = core.state
    if state.ending:
        return
    state.ending = reason
    for call in list(state.calls.values()):
        if call.state is not CallState.ENDED:
            call.holder = None
            if call.state is CallState.HELD:
                call.state = CallState.WAITING
                call.group.context.queue.count += 1
            calls.fail(core, call, Failure(FailureKind.CANCELLED, f"the session ended before it was done: {reason}"))
    for library in state.libraries.values():
        library.held.clear()
    core.sends.clear()
    for pilot in state.pilots.values():
        if pilot.state is not PilotState.GONE:
            core.say(pilot, Exit(reason))
    for client in state.clients.values():
        if client.connected:
            core.tell(client, to_client.SessionOver(reason))
    core.out.append(EndManager(reason))
