from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from factory.fake_slurm import FakeSlurm
from live.peers import Manager, until

from stoker.config import write_sites
from stoker.manager.cli import doctor
from stoker.manager.cli.doctor_machine import Finding, FindingLevel
from stoker.manager.executor import engines
from stoker.manager.executor.processes import register_session
from stoker.manager.factory.batch import JOBS_LEFT
from stoker.manager.live import lease
from stoker.protocol.session import SessionFile, SessionFolder
from stoker.site import Engine, Provider, ProviderKind, Site

PilotOf = Callable[..., int]


def until_it_has_its_own_command_line(process: subprocess.Popen[bytes], word: str) -> None:
    until(lambda: any(word in each for each in psutil.Process(process.pid).cmdline()), what="a command line")


@pytest.fixture
def pilot_of() -> Iterator[PilotOf]:
    there: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, *, module: str = "stoker.pilot.main", **environ: str) -> int:
        command = [sys.executable, "-c", "import time; time.sleep(600)", "-m", module, "--session", str(folder)]
        there.append(subprocess.Popen(command, env={**os.environ, **environ}))
        until_it_has_its_own_command_line(there[-1], module)
        return there[-1].pid

    yield start
    for process in there:
        process.kill()
        process.wait()


def give_lease(folder: SessionFolder, manager: Manager, **how: object) -> None:
    holder = lease.read_lease(manager.folder.lease)
    folder.lease.write_bytes(msgspec.json.encode(msgspec.structs.replace(holder, **how)))


def left_behind() -> set[int]:
    return {pid for pid, _, _ in doctor.find_orphaned_processes()}


def test_manager_of_a_removed_folder_is_an_orphan(manager: Manager):
    assert manager.process.pid not in left_behind()
    os.rename(manager.folder.path, f"{manager.folder.path}-hidden")
    assert manager.process.pid in left_behind()


def test_only_processes_of_ended_sessions_are_reported_as_orphans(manager: Manager, pilot_of: PilotOf, tmp_path: Path):
    ended, stays, starts, copied = (SessionFolder(tmp_path / name) for name in ("ended", "stays", "starts", "copied"))
    for each in (ended, stays, starts, copied):
        each.create_folders()
    dead = subprocess.Popen(["true"])
    dead.wait()
    give_lease(ended, manager, pid=dead.pid, over="stoker down")
    give_lease(stays, manager, pid=dead.pid)
    (stays.path / "manager.json").write_text('{"session": "k1", "options": []}')
    copied.write(SessionFile("k2", 1, "tcp://127.0.0.1:1", "key"))
    left = {pilot_of(ended.path), pilot_of(ended.path, module="stoker.pilot.taskvine.main"), pilot_of(tmp_path / "no")}
    others = {pilot_of(each.path) for each in (manager.folder, stays, starts, copied)}
    others.add(pilot_of(ended.path, module="somebody.elses.pilot"))
    found = left_behind()
    assert left <= found
    assert not others & found


def test_taskvine_orphans_are_identified_by_environment_variable(manager: Manager, tmp_path: Path):
    worker = tmp_path / "vine_worker"
    worker.symlink_to("/bin/sleep")
    gone = str(tmp_path / "gone")
    pools = [{"STOKER_POOL": gone}, {"STOKER_POOL": str(manager.folder.path)}, {}]
    there = [subprocess.Popen([str(worker), "600"], env=pool) for pool in pools]
    try:
        for process in there:
            until_it_has_its_own_command_line(process, "vine_worker")
        found = [
            orphan for orphan in doctor.find_orphaned_processes() if orphan[0] in [process.pid for process in there]
        ]
    finally:
        for process in there:
            process.kill()
            process.wait()
    assert found == [(there[0].pid, "vine_worker", Path(gone))]


def test_pilot_is_an_orphan_after_its_manager_is_killed(manager: Manager, pilot_of: PilotOf):
    pilot = pilot_of(manager.folder.path)
    assert pilot not in left_behind()
    manager.kill()
    assert pilot in left_behind()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    slurm = FakeSlurm(tmp_path / "slurm")
    for name, value in slurm.environ().items():
        monkeypatch.setenv(name, value)
    yield slurm
    slurm.close()


@pytest.mark.parametrize("engine", list(Engine))
def test_remaining_jobs_of_a_session_are_listed_with_a_cancel_command(
    manager: Manager, slurm: FakeSlurm, tmp_path: Path, engine: Engine
):
    folder = SessionFolder(tmp_path / "over")
    folder.create_folders()
    folder.write(SessionFile("k1", 1, "tcp://127.0.0.1:1", "key"))
    register_session(folder)
    site = Site(name="lab", engine=engine, provider=Provider(kind=ProviderKind.SLURM))
    write_sites(folder.sites, [site])
    engines.write_taskvine_plans(folder, [site], session="k1", python_path="")
    slurm.put("41", name="stoker-k1-b1", state="RUNNING", folder=str(folder.submit))
    slurm.put("42", name="stoker-k2-b1", state="RUNNING", folder=str(folder.submit))

    def told() -> list[Finding]:
        return list(doctor.check_orphaned_jobs())

    assert told() == []  # the session has not ended yet
    give_lease(folder, manager, over="stoker down")
    assert told() == [Finding(FindingLevel.WARN, "left behind: jobs 41 of site lab, of session k1", "scancel 41")]
    (folder.path / JOBS_LEFT).write_text("")
    asked = len(slurm.asked("squeue"))
    assert bool(told()) == (engine is Engine.TASKVINE)  # Stoker's factory does not know jobs of TaskVine's factory
    assert bool(len(slurm.asked("squeue")) - asked) == (engine is Engine.TASKVINE)
