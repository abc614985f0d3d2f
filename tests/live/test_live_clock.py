from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from live.peers import Manager, Peer, Peers, until, welcomed

from stoker.contexts.recipe import BARE
from stoker.manager.live.clock import Clock
from stoker.protocol import to_client, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallOptions, CallSpec, FailureKind, ListedState, Objective
from stoker.protocol.ids import CallId, FunctionKey, RecipeKey
from stoker.protocol.session import SessionFolder

JUMPING = """
import os, time
from pathlib import Path

ahead, really = Path(os.environ["CLOCK_AHEAD"]), time.time
time.time = lambda: really() + float(ahead.read_text())
"""
"""A manager whose wall clock is fast by the seconds in the file $CLOCK_AHEAD."""


@pytest.fixture
def jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], object]:
    """Return a function that sets the clock of `manager` fast by a number of seconds."""
    ahead = tmp_path / "ahead"
    ahead.write_text("0")
    monkeypatch.setenv("CLOCK_AHEAD", str(ahead))
    return lambda seconds: ahead.write_text(str(seconds))


@pytest.fixture
def manager(folder: SessionFolder, jump: Callable[[float], object]) -> Iterator[Manager]:
    with closing(Manager(folder, patch=JUMPING)) as manager:
        yield manager


def test_clock_jump_of_an_hour_loses_no_connected_pilot(
    manager: Manager, jump: Callable[[float], object], peers: Peers
) -> None:
    [client] = welcomed(peers, "client")

    def joined() -> Peer:
        pilot = peers("pilot", ends_in_s=1800.0)
        pilot.hear(to_pilot.PilotWelcome)
        return pilot

    def here() -> list[str]:
        stays.send(say.Heartbeat(), numbered=False)
        return [pilot.pilot for pilot in client.status().pilots]

    stays = joined()
    for jump_s in (-3600, 3600):
        leaves = joined()
        jump(jump_s)
        leaves.close()  # the manager notices the broken connection and waits for the usual time
        until(lambda: here() == [stays.name], what="the other pilot is given up")
        # the manager checks a few times for silent pilots and ended walltimes
        turns_until = time.monotonic() + 1.5
        while time.monotonic() < turns_until:
            assert here() == [stays.name]
            time.sleep(0.1)
    stays.listen()
    assert not [message for message in stays.heard if isinstance(message, to_pilot.Exit)]


def submit(client: Peer, *due_in_s: float) -> None:
    """Submit a call for each deadline; late calls are dropped."""
    client.define()
    options = CallOptions(objective=Objective(drop_late=True))
    for number, seconds in enumerate(due_in_s):
        calls = [CallSpec(CallId(number), b"")]
        client.send(say.Submit(FunctionKey("f"), RecipeKey(BARE.key), calls, options, seconds))


def waiting_due_in_s(client: Peer) -> list[float | None]:
    client.send(say.AskCalls(10, ListedState.WAITING), numbered=False)
    return [call.due_in_s for call in client.hear(to_client.Calls).calls]


@pytest.mark.parametrize("jump_s", [-7200, 7200])
def test_deadlines_stay_correct_across_clock_jumps_and_restarts(
    manager: Manager, jump: Callable[[float], object], peers: Peers, jump_s: int
) -> None:
    [client] = welcomed(peers, "client")
    jump(jump_s)
    submit(client, 60.0, 0.2)
    ends = client.hear(to_client.Results).ends
    assert [(end.call, end.failure.kind) for end in ends if end.failure] == [(1, FailureKind.DROPPED)]
    assert waiting_due_in_s(client) == [pytest.approx(60, abs=15)]
    client.hear(to_client.Ack, where=lambda ack: ack.sequence == client.sequence)  # the call is in the journal
    [before] = waiting_due_in_s(client)
    manager.kill()
    jump(2 * jump_s)
    manager.start()
    observer = peers("client", observer=True)
    observer.hear(to_client.ClientWelcome)
    [after] = waiting_due_in_s(observer)
    assert before - 30 < after < before


def test_saved_clock_ignores_a_jump_of_the_system_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clock"
    first, really = Clock(file=file), time.time
    monkeypatch.setattr(time, "time", lambda: really() + 7200)
    assert Clock(file=file).now() == pytest.approx(first.now(), abs=5)
    assert Clock().now() == pytest.approx(first.now() + 7200, abs=5)
    assert Clock(file=file, not_before=first.now() + 900).now() == pytest.approx(first.now() + 7200, abs=5)


@pytest.mark.parametrize("kept", [b"", b"{", b"\xff", b'{"monotonic": "another machine", "ahead_s": 1.0}'])
def test_foreign_or_damaged_clock_is_ignored(tmp_path: Path, kept: bytes) -> None:
    file = tmp_path / "clock"
    file.write_bytes(kept)
    assert Clock(file=file).now() == pytest.approx(time.time(), abs=5)
    assert Clock(file=file, not_before=9e9).now() == pytest.approx(9e9, abs=5)
