"""A command ended by a signal leaves no session, or a session that can be found by name."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from faults.world import World, command_of, until
from session.held import MANAGER, Held
from session.test_session_up import SITE, begin, stoker

from stoker.manager.cli.entry import Terminated, treat_signals_as_ctrl_c
from stoker.protocol.session import SessionFolder, is_session_folder


def sessions(world: World) -> list[Path]:
    return sorted(Path(world.environ["STOKER_HOME"]).glob("sessions.d/*"))


def kill(process: subprocess.Popen[str], number: int) -> int:
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    return process.returncode


@pytest.fixture
def manager(world: World) -> Held:
    return Held(world, MANAGER)


def test_session_of_a_killed_up_command_is_found_by_its_name(world: World, manager: Held) -> None:
    kill(begin(world, manager, "up", "one.toml"), signal.SIGKILL)
    [folder] = sessions(world)
    assert not is_session_folder(folder)
    manager.let_go()
    said = stoker(world, "status", folder.name, "--json")
    assert said.returncode == 0, said.stderr
    said = stoker(world, "down")  # `down` without a name selects the only session
    assert (said.returncode, f"session {folder.name} has ended" in said.stdout) == (0, True), said.stderr


def test_signal_ends_the_up_command_like_ctrl_c(world: World, manager: Held) -> None:
    assert kill(begin(world, manager, "up", "one.toml"), signal.SIGTERM) == 128 + signal.SIGTERM
    until(lambda: not world.of("stoker.manager.main"))
    assert sessions(world) == []
    assert "no session is known" in stoker(world, "sessions").stdout


def test_closed_terminal_ends_the_up_command_like_ctrl_c(world: World, manager: Held) -> None:
    (world.path / "one.toml").write_text(SITE)
    ours, theirs = os.openpty()
    up = subprocess.Popen(
        [sys.executable, "-m", "stoker.manager.cli.entry", "up", "one.toml"],
        cwd=world.path,
        env={**world.environ, **manager.environ},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
    )
    os.close(theirs)
    manager.wait()
    os.close(ours)
    assert up.wait(60) == 128 + signal.SIGHUP
    until(lambda: not world.of("stoker.manager.main"))
    assert sessions(world) == []


def test_command_does_not_wait_for_a_session_that_failed_to_start(world: World) -> None:
    (world.path / "bad.toml").write_text(SITE.replace("[session]", '[session]\ninterface = "192.0.2.7"'))
    said = stoker(world, "up", "bad.toml")
    assert said.returncode == 1
    [folder] = sessions(world)
    began = time.monotonic()
    said = stoker(world, "status", folder.name)
    assert f"no session '{folder.name}'" in said.stderr
    assert time.monotonic() - began < 40, "a starting manager has a minute"


def probe(world: World) -> tuple[subprocess.Popen[str], SessionFolder]:
    process = begin(world, Held(world, "stoker.pilot.main"), "doctor", "one.toml", "--probe", "--wait", "100")
    return process, SessionFolder(sessions(world)[0])


def test_signal_ends_a_probe_with_its_session(world: World) -> None:
    process, folder = probe(world)
    os.kill(process.pid, signal.SIGHUP)
    os.kill(process.pid, signal.SIGHUP)  # a closing terminal may send the signal twice
    process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGHUP
    assert not folder.path.exists() or folder.end_reason()
    until(lambda: not world.of("stoker.manager.main"))


@pytest.mark.long
def test_session_of_a_killed_probe_ends_by_itself(world: World) -> None:
    process, folder = probe(world)
    process.kill()
    process.communicate(timeout=30)
    managers = [command_of(pid) for pid in world.of("stoker.manager.main")]
    assert managers
    assert all("160" in command[command.index("--idle") + 1 :][:1] for command in managers)
    assert 'provisioning = "once"' in (folder.sites / "one.toml").read_text()
    assert stoker(world, "down", folder.path.name).returncode == 0


def test_only_the_first_signal_raises_and_a_late_second_one_kills() -> None:
    with treat_signals_as_ctrl_c() as came:
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        assert came == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    text = (
        "import os, signal, stoker.manager.cli.entry as endings\n"
        "endings._IGNORE_SIGNALS_S = 0.0\n"
        "with endings.treat_signals_as_ctrl_c():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGHUP)\n"
        "    except KeyboardInterrupt:\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        raise SystemExit(0)\n"
    )
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == -signal.SIGHUP


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with treat_signals_as_ctrl_c():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
