from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_manager import FakeManager, recipe
from polling import PATIENCE_S

from stoker.protocol.to_pilot import PilotRefused, PilotWelcome


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_results_are_sent_when_an_absent_manager_is_back(served: FakeManager) -> None:
    served.ready(recipe())
    (pid,) = served.results(served.run(os.getpid, [()]))
    quick, slow, last = served.run(_sleep, [(0.2,), (1.5,), (0.0,)])
    time.sleep(0.1)
    served.hang_up()
    time.sleep(0.6)  # the first call ends while no manager listens
    before = len(served.hellos)
    served.listen()
    served.until(lambda: len(served.hellos) > before, what="a second hello")
    hello = served.hellos[-1]
    assert [facts.library for facts in hello.libraries] == [1]
    # A pilot lists a call until the manager has acknowledged the end of the call.
    assert hello.libraries[0].calls == (quick, slow, last)
    assert hello.libraries[0].ready
    assert served.results([quick, slow, last]) == [0.2, 1.5, 0.0]
    assert served.results(served.run(os.getpid, [()])) == [pid]


def test_pilot_repeats_its_hello_and_exits_if_it_is_refused(
    manager: FakeManager, capfd: pytest.CaptureFixture[str]
) -> None:
    manager.welcomes = False
    pilot = manager.start_pilot()
    manager.until(lambda: len(manager.hellos) > 1, what="the hello that follows an unanswered one")
    manager.send(PilotRefused(reason="both sides need the same version of Stoker"))
    assert pilot.wait(PATIENCE_S) == 3
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "stoker-pilot: the manager refused this pilot: both sides need the same version of Stoker"


def test_pilot_without_its_manager_ends_after_the_lease(alone: FakeManager) -> None:
    alone.ready(recipe())
    alone.send(PilotWelcome(session="test", heartbeat_s=0.5, lease_s=1.0))
    alone.results(alone.run(_sleep, [(0.0,)]))
    alone.hang_up()
    assert alone.pilots[0].wait(PATIENCE_S) == 2
    alone.listen()


def test_pilot_whose_session_ends_before_it_joins_leaves_at_once(manager: FakeManager) -> None:
    manager.hang_up()
    pilot = manager.start_pilot()
    manager.folder.lease.write_text('{"over": "its client is gone"}')
    assert pilot.wait(50) == 0
    [log] = manager.folder.path.glob("pilots/*/pilot.log")
    assert "leaving: the session is over: its client is gone" in log.read_text()
    manager.listen()


def test_disconnected_pilot_leaves_at_once_if_its_session_ended(alone: FakeManager) -> None:
    alone.ready(recipe())
    alone.hang_up()
    alone.folder.lease.write_text('{"over": "stoker down"}')
    assert alone.pilots[0].wait(PATIENCE_S) == 0
    alone.listen()


def test_invalid_frames_are_refused_and_counted(served: FakeManager) -> None:
    served.ready(recipe())
    served.socket.send_multipart([served.peer, b"\x93\x01\x02"])
    served.socket.send_multipart([served.peer, b""])
    served.until(lambda: [h for h in served.heartbeats if h.refused_frames == 2])
    assert served.results(served.run(_sleep, [(0.0,)])) == [0.0]


def test_missing_session_is_reported_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stoker.pilot.main", "--session", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_pilot_with_a_removed_folder_serves_calls(manager: FakeManager) -> None:
    folder = manager.base / "gone"
    folder.mkdir()
    manager.start_pilot(folder=folder)
    manager.hello()
    shutil.rmtree(folder)
    manager.ready(recipe())
    assert manager.results(manager.run(_sleep, [(0.0,)])) == [0.0]
