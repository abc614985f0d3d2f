from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from live.peers import Manager, Peer, Peers, pilot_hello, until, welcomed

from stoker.contexts.recipe import BARE
from stoker.manager.live import keeper
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallSpec, FailureKind
from stoker.protocol.session import SessionFolder

FAILING = """
from stoker.manager.core import dispatch, story

arrive, tell = dispatch.submit_calls, story.tell_story

def failing_arrive(core, group, specs):
    arrive(core, group, specs)
    if group.function.name == "boom":
        raise ZeroDivisionError("division by zero")

def failing_tell(state, subject):
    if subject == "boom":
        raise KeyError(subject)
    return tell(state, subject)

dispatch.submit_calls, story.tell_story = failing_arrive, failing_tell
"""
"""A manager whose core raises on accepted calls of the function `boom`, and on requests to explain these calls."""


@pytest.fixture
def failing(folder: SessionFolder) -> Iterator[Manager]:
    with closing(Manager(folder, patch=FAILING)) as manager:
        yield manager


def hello(client: Peer, *, answer: type = to_client.ClientWelcome) -> Any:
    def answered() -> Any:
        client.send(say.ClientHello(wire.VERSION, client.session), numbered=False)
        client.listen(0.5)
        return next((each for each in client.heard if isinstance(each, answer)), None)

    client.heard.clear()
    found = until(answered, what="an answer to a hello")
    # this message may answer an earlier hello, so read until no message follows
    while isinstance(found, to_client.ClientWelcome) and client.listen(0.1):
        pass
    return found


def submit(client: Peer, call: int, function: str = "good") -> bytes:
    return client.send(say.Submit(function, "bare", [CallSpec(call, b"")]))  # type: ignore[arg-type]


def ended_by(manager: Manager, client: Peer, frame: bytes) -> int:
    for _ in range(20):
        try:
            return manager.ended(seconds=2.0)
        except subprocess.TimeoutExpired:
            client.socket.send(frame)
    return manager.ended()


def test_message_that_crashes_the_manager_cancels_only_its_calls(failing: Manager, peers: Peers) -> None:
    client, pilot = welcomed(peers, "client", "pilot")
    client.send(
        say.DefineRecipe(BARE),
        say.DefineFunction("good", "good", b""),  # type: ignore[arg-type]
        say.DefineFunction("boom", "boom", b""),  # type: ignore[arg-type]
    )
    submit(client, 1)
    pilot.hear(to_pilot.StartLibrary)
    pilot.send(say.LibraryReady(1, 0.1, 0.1))  # type: ignore[arg-type]
    pilot.hear(to_pilot.RunCalls)
    bad = submit(client, 2, "boom")
    assert failing.ended() == keeper.MANAGER_FAILED
    failing.start()
    held = say.LibraryFacts(1, "bare", ("cpu:0",), True, (1,))  # type: ignore[arg-type]
    hello(client)
    pilot.send(pilot_hello("test", libraries=(held,)), numbered=False)
    pilot.hear(to_pilot.PilotWelcome)
    client.socket.send(bad)  # the client repeats the unacknowledged frame
    [end] = client.hear(to_client.Results).ends
    assert (end.call, end.failure.kind) == (2, FailureKind.CANCELLED)
    assert "ZeroDivisionError: division by zero" in end.failure.message
    submit(client, 3)
    pilot.send(say.CallsEnded(1, [CallEnd(1, True, b"result")]))  # type: ignore[arg-type]
    assert [each.call for each in client.hear(to_client.Results).ends] == [1]
    assert [spec.call for spec in pilot.hear(to_pilot.RunCalls).calls] == [3]
    status = client.status()
    assert "division by zero" in status.notices[-1].text
    assert "Traceback" in failing.folder.manager_log.read_text()
    assert failing.process.poll() is None, "the repeated message is not handled again"


def test_client_that_crashes_the_manager_repeatedly_is_refused(failing: Manager, peers: Peers) -> None:
    client = peers("client")
    client.hear(to_client.ClientWelcome)  # the call numbers show that this client is the first
    other = peers("client")
    client.send(say.DefineRecipe(BARE), say.DefineFunction("boom", "boom", b""))  # type: ignore[arg-type]
    for number in range(3):
        assert ended_by(failing, client, submit(client, number, "boom")) == keeper.MANAGER_FAILED
        failing.start()
        refused = hello(client, answer=to_client.ClientWelcome if number < 2 else to_client.ClientRefused)
    assert "division by zero" in refused.reason
    hello(other)


def test_question_that_the_manager_cannot_answer_is_refused(failing: Manager, peers: Peers) -> None:
    [client] = welcomed(peers, "client")
    client.send(say.AskStory("boom"), numbered=False)
    assert client.status().refused == {"question that the manager could not answer": 1}
