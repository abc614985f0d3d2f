"""Pilots keep, lose and refuse connections. A pilot exits if its job loses its resources."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from fake_manager import FakeManager, gone, recipe
from polling import PATIENCE_S, polls

from stoker.pilot.agent.scratch import ParentProcess, Scratch
from stoker.pilot.library.process import ScratchGuard
from stoker.protocol.blocks import LossReason
from stoker.protocol.session import PYTHON
from stoker.protocol.to_manager import LibraryGone, PilotLeaving
from stoker.protocol.to_pilot import PilotRefused, PilotWelcome


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_results_are_sent_when_an_absent_manager_is_back(served: FakeManager) -> None:
    assert served.hello().ends_in_s == 0, "its job has no walltime"
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
    pilot = manager.start_pilot(settings="from stoker.pilot.core import presence; presence.WELCOME_LIMIT_S = 0.5")
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


def test_pilot_whose_working_folder_was_removed_serves_calls(manager: FakeManager) -> None:
    folder = manager.base / "gone"
    folder.mkdir()
    manager.start_pilot(folder=folder)
    manager.hello()
    shutil.rmtree(folder)
    manager.ready(recipe())
    assert manager.results(manager.run(_sleep, [(0.0,)])) == [0.0]


# ---- resources of the job


def scratch_of(manager: FakeManager) -> Path:
    [folder] = manager.base.glob("scratch/stoker-*/pilot-*")
    return folder


def clear(folder: Path) -> None:
    """Remove a folder in which the pilot and its libraries may still create files."""
    for _ in polls(PATIENCE_S):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    raise AssertionError(f"{folder} does not go")


def write_when_cleared(folder: str) -> None:
    while os.path.exists(folder):
        time.sleep(0.005)
    with open("made", "w") as file:
        file.write("x")


def sleep_while(path: str) -> str:
    open(f"{path}-began", "w").close()
    while not os.path.exists(path):
        time.sleep(0.01)
    return "done"


def test_pilot_leaves_and_returns_calls_if_its_scratch_is_cleared(alone: FakeManager) -> None:
    alone.ready(recipe())
    folder = scratch_of(alone)
    running, waiting = alone.run(write_when_cleared, [(str(folder),), (str(folder),)])
    alone.until(lambda: alone.heartbeats, what="a heartbeat")
    clear(folder.parent)
    left = alone.gone()
    assert left.failure is None, "the context is not blamed"
    assert set(left.running) | set(left.unstarted) == {running, waiting}
    leaving = alone.wait_for(PilotLeaving)
    assert leaving.loss is LossReason.SCRATCH_GONE
    assert "scratch folder" in leaving.reason
    assert alone.ends() == {}, "no call ended"
    assert alone.pilots[0].wait(PATIENCE_S) == 0


_LOOKS_NOT_BY_ITSELF = "from stoker.pilot.agent import loop; loop.report_lost_resources = lambda _agent: False"
"""Code that disables the checks of a pilot, so that a start order arrives before the pilot misses its folder."""


def test_library_started_without_a_scratch_folder_blames_the_pilot(manager: FakeManager) -> None:
    manager.start_pilot(settings=_LOOKS_NOT_BY_ITSELF)
    manager.hello()
    clear(scratch_of(manager))
    manager.start(recipe())
    left = manager.wait_for(LibraryGone)
    assert (left.failure, left.loading) == (None, True)
    assert manager.wait_for(PilotLeaving).loss is LossReason.SCRATCH_GONE


@pytest.mark.parametrize("source", ["lab", ""])
def test_pilot_of_a_batch_job_leaves_when_its_parent_has_exited(
    manager: FakeManager, source: str, tmp_path: Path
) -> None:
    """The parent of a pilot exits if condor_master is killed. A local pilot does not watch its parent."""
    command = [sys.executable, "-m", "stoker.pilot.main", "--session", str(manager.folder.path), "--devices", "cpu:1"]
    options = ["--scratch", str(manager.base / "scratch"), *(["--source", source] if source else [])]
    starter = subprocess.Popen(["/bin/sh", "-c", '"$@"; :', "starter", *command, *options], cwd=manager.base)
    pilot = manager.hello().pid
    manager.ready(recipe())
    done = tmp_path / "done"
    [call] = manager.run(sleep_while, [(str(done),)])
    manager.until((tmp_path / "done-began").exists, what="the call to begin")
    starter.kill()
    starter.wait()
    if source:
        left = manager.gone()
        assert (left.failure, left.running) == (None, (call,))
        leaving = manager.wait_for(PilotLeaving)
        assert leaving.loss is LossReason.NODE_LOST
        assert "its parent, sh (process" in leaving.reason
    else:
        seen = len(manager.heartbeats)
        manager.until(lambda: len(manager.heartbeats) > seen + 2, what="heartbeats for another second")
        done.touch()
        assert manager.results([call]) == ["done"]
        os.kill(pilot, signal.SIGTERM)
        manager.wait_for(PilotLeaving)
    assert gone([pilot])


def test_parent_that_is_init_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)
    parent = ParentProcess(ends_with_parent=True)
    monkeypatch.setattr(os, "getppid", lambda: 77)
    assert parent.describe_fault() == ""


def test_removed_or_recreated_scratch_folder_is_noticed(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, pilot="p1")
    assert (scratch.describe_fault(), ScratchGuard(str(scratch.path)).is_gone) == ("", False)
    guard = ScratchGuard(str(scratch.path))
    shutil.rmtree(scratch.path)
    assert "is gone" in scratch.describe_fault()
    assert guard.is_gone
    scratch.path.mkdir()
    assert "was removed while it ran" in scratch.describe_fault()
    assert guard.is_gone
    assert ScratchGuard(str(tmp_path / "removed before the first call")).is_gone
    scratch.remove()


def test_pilot_of_another_python_than_its_session_accepts_no_calls(manager: FakeManager) -> None:
    manager.folder.write(msgspec.structs.replace(manager.folder.read(), python="3.0"))
    manager.start_pilot()
    hello = manager.hello()
    assert f"the pilot runs Python {PYTHON} ({sys.executable}), but its session runs Python 3.0" in hello.lacks
    assert [device.fault for device in hello.devices] == [hello.lacks] * 2
