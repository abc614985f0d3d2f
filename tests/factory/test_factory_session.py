"""Run programs on a batch system. Only Slurm is fake; it runs jobs on this machine."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from factory.fake_slurm import FakeSlurm
from live.peers import until

import stoker

SITE = """
name = "lab"
sites = [{more}]
[provider]
kind = "slurm"
poll = "0.3 s"
command_limit = "10 s"
{provider}
[pilot]
devices = "cpu:1"
{pilot}
[session]
heartbeat = "1 s"
lease = "30 s"
interface = "127.0.0.1"
[policy]
provisioning = "{policy}"
"""
FACTORY, MANAGER = "stoker.manager.factory.main", "stoker.manager.main"
LOCAL = 'name = "here"\n[pilot]\ndevices = "cpu:1"\n'


def site(folder: Path, *, more: str = "", provider: str = "", pilot: str = "", policy: str = "fixed") -> Path:
    (folder / "lab.toml").write_text(SITE.format(more=more, provider=provider, pilot=pilot, policy=policy))
    return folder / "lab.toml"


@stoker.app()
def block_of_this(meeting=None, number=0):

    import psutil

    if meeting is not None:
        (meeting / str(number)).touch()
        while not (meeting / str(1 - number)).exists():
            time.sleep(0.02)
    words = next(parent.cmdline() for parent in psutil.Process().parents() if "stoker.pilot.main" in parent.cmdline())
    return words[words.index("--block") + 1], "--source" in words


def processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if str(folder) in " ".join(words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return [process for process in found if process.pid != os.getpid()]


@pytest.mark.long
def test_session_runs_blocks_on_two_sites(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.run_jobs()
    (tmp_path / "here.toml").write_text(LOCAL)
    with stoker.load(site(tmp_path, more='"here.toml"'), run_dir=str(tmp_path / "runs")) as session:
        until(lambda: len(session.status(30).pilots) == 2, what="both pilots", seconds=120)
        calls = [block_of_this(tmp_path, number) for number in (0, 1)]
        assert {call.result(120)[1] for call in calls} == {True, False}
        assert {block.source for block in session.status(30).jobs} == {"lab", "here"}
    until(lambda: not processes_of(session.folder), what="the end of all processes of the session")


def running(folder: Path, module: str) -> list[psutil.Process]:
    """Return processes that run a module. A child shows its parent's command line until it runs its own command."""
    found = []
    for process in processes_of(folder):
        with suppress(psutil.NoSuchProcess):
            parent = process.parent()
            if module in process.cmdline() and not (parent is not None and module in parent.cmdline()):
                found.append(process)
    return found


def test_block_is_submitted_right_after_a_factory_restart(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.run_jobs()
    on_demand = site(tmp_path, pilot="init_blocks = 0", policy="opportunistic")
    with stoker.load(on_demand, run_dir=str(tmp_path / "runs")) as session:
        log = session.folder / "factory.log"
        hello = "the manager reports 0 blocks"
        until(lambda: log.exists() and log.read_text().count(hello) == 1, what="the first hello", seconds=60)
        [factory] = running(session.folder, FACTORY)
        os.kill(factory.pid, signal.SIGKILL)
        until(lambda: log.read_text().count(hello) == 2, what="the other factory's hello", seconds=60)
        assert block_of_this().result(120) == ("b1", True)


def test_site_that_accepts_no_jobs_fails_the_calls_with_its_message(slurm: FakeSlurm, tmp_path: Path) -> None:
    with stoker.load(site(tmp_path, provider='partition = "nope"'), run_dir=str(tmp_path / "runs")):
        call = block_of_this()
        with pytest.raises(stoker.StokerError, match="Invalid partition name specified"):
            call.result(120)
