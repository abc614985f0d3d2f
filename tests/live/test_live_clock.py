"""The wall clock of the manager's host is set forward and back while a session runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live.peers import Peer, pilot_hello, until

from stoker.contexts.recipe import BARE
from stoker.manager.protocol import to_client, to_pilot
from stoker.manager.protocol import to_manager as say
from stoker.manager.protocol.calls import CallOptions, CallSpec, FailureKind, Objective
from stoker.manager.protocol.ids import CallId, FunctionKey, RecipeKey
from stoker.manager.protocol.listed import ListedState
from stoker.manager.protocol.session import SessionFolder

Peers = Callable[..., Peer]


@pytest.fixture
def wall_clock(folder: SessionFolder, tmp_path: Path) -> Iterator[Path]:
    """A manager runs; what is written into this file is added to its wall clock."""
    ahead = tmp_path / "ahead"
    ahead.write_text("0")
    here = Path(__file__).with_name("jumping_manager.py")
    command = [sys.executable, str(here), "--session", str(folder.path), "--name", "test", "--heartbeat", "1"]
    process = subprocess.Popen(command, env={**os.environ, "CLOCK_AHEAD": str(ahead)})
    until(folder.file.exists, seconds=30, what="manager listening")
    yield ahead
    process.kill()
    process.wait(5)


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_an_hour_that_nobody_lived_through_changes_nothing(wall_clock: Path, peers: Peers, jump_s: int) -> None:
    client = peers("client")
    client.hear(to_client.ClientWelcome)
    stays, leaves = peers("pilot", hello=False), peers("pilot", hello=False)
    for pilot in (stays, leaves):
        pilot.send(pilot_hello(pilot.session, ends_in_s=1800.0), numbered=False)
        pilot.hear(to_pilot.PilotWelcome)

    wall_clock.write_text(str(jump_s))
    leaves.close()  # its connection breaks: that is still noticed, and waited for no longer than usual

    def here() -> list[str]:
        stays.send(say.Heartbeat(), numbered=False)
        client.send(say.AskStatus(), numbered=False)
        return [pilot.pilot for pilot in client.hear(to_client.Status).pilots]

    until(lambda: here() == [stays.name], what="the other pilot is given up")
    turns_until = time.monotonic() + 1.5  # a few looks for silent pilots and walltimes that are over
    while time.monotonic() < turns_until:
        assert here() == [stays.name]
        time.sleep(0.1)
    stays.listen()
    assert not [message for message in stays.heard if isinstance(message, to_pilot.Exit)]


@pytest.mark.parametrize("jump_s", [-7200, 7200])
def test_a_deadline_is_over_when_its_seconds_have_passed(wall_clock: Path, peers: Peers, jump_s: int) -> None:
    client = peers("client")
    client.hear(to_client.ClientWelcome)
    client.send(say.DefineRecipe(BARE), say.DefineFunction(FunctionKey("f"), "f", b"code"))
    wall_clock.write_text(str(jump_s))
    options = CallOptions(objective=Objective(drop_late=True))
    for number, due_in_s in enumerate((60.0, 0.2)):
        calls = [CallSpec(CallId(number), b"")]
        client.send(say.Submit(FunctionKey("f"), RecipeKey(BARE.key), calls, options, due_in_s))
    ends = client.hear(to_client.Results).ends
    assert [(end.call, end.failure.kind) for end in ends if end.failure] == [(1, FailureKind.DROPPED)]
    client.send(say.AskCalls(10, ListedState.WAITING), numbered=False)
    [waiting] = client.hear(to_client.Calls).calls
    assert waiting.due_in_s == pytest.approx(60, abs=15)
