"""Run programs on a batch system. Only Slurm is fake and runs jobs on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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
    import time

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


def test_calls_run_in_blocks_and_no_job_remains(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.run_jobs()
    with stoker.load(site(tmp_path), run_dir=str(tmp_path / "runs")) as session:
        assert block_of_this().result(120) == ("b1", True)
        until(lambda: session.status(30).jobs[0].reason == "on n1", what="an update of the block", seconds=60)
        [block] = session.status(30).jobs
        assert (block.phase, block.source) == ("running", "lab")
        assert slurm.jobs()[block.job]["name"] == f"stoker-{session.id}-b1"
    assert {job["state"] for job in slurm.jobs().values()} <= {"CANCELLED", "COMPLETED"}
    until(lambda: not processes_of(session.folder), what="the end of all processes of the session")
    assert (session.folder / "jobs-left").read_text() == ""


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


def another(folder: Path, module: str, *, than: Sequence[psutil.Process]) -> psutil.Process:
    return until(
        lambda: next((each for each in running(folder, module) if each not in than), None),
        what=f"another {module}",
        seconds=60,
    )


def fail(slurm: FakeSlurm, job: dict[str, Any]) -> None:
    os.killpg(job["pid"], signal.SIGKILL)
    slurm.put(job["id"], state="NODE_FAIL")


@pytest.mark.long
def test_killed_factory_is_replaced(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.run_jobs()
    with stoker.load(site(tmp_path), run_dir=str(tmp_path / "runs")) as session:
        assert block_of_this().result(120) == ("b1", True)
        [factory] = running(session.folder, FACTORY)
        os.kill(factory.pid, signal.SIGKILL)
        another(session.folder, FACTORY, than=[factory])
        assert block_of_this().result(120) == ("b1", True)
    assert len(slurm.jobs()) == 1
    assert {job["state"] for job in slurm.jobs().values()} <= {"CANCELLED", "COMPLETED"}


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


@pytest.mark.long
def test_managers_that_die_early_leave_one_working_factory(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.run_jobs()
    with stoker.load(site(tmp_path), run_dir=str(tmp_path / "runs")) as session:
        assert block_of_this().result(120) == ("b1", True)
        [manager], [factory] = running(session.folder, MANAGER), running(session.folder, FACTORY)
        for also, after_s in ((None, 0.0), (factory, 0.0), (None, 0.3)):
            before = running(session.folder, FACTORY)
            for process in (manager, also):
                if process is not None:
                    process.kill()
            manager = another(session.folder, MANAGER, than=[manager])
            another(session.folder, FACTORY, than=before)
            time.sleep(after_s)
        manager.kill()
        another(session.folder, MANAGER, than=[manager])
        [job] = slurm.jobs().values()
        fail(slurm, job)
        # the manager skips block numbers that the lost part of the journal may have used
        each_leaves_a_gap = ("b400", True)
        assert block_of_this().result(120) == each_leaves_a_gap
        until(lambda: len(running(session.folder, FACTORY)) == 1, what="one factory alone", seconds=60)


def test_site_that_accepts_no_jobs_fails_the_calls_with_its_message(slurm: FakeSlurm, tmp_path: Path) -> None:
    with stoker.load(site(tmp_path, provider='partition = "nope"'), run_dir=str(tmp_path / "runs")):
        call = block_of_this()
        with pytest.raises(stoker.StokerError, match="Invalid partition name specified"):
            call.result(120)
