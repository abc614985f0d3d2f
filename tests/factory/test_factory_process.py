from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factory.fake_slurm import FakeSlurm
from factory.manager_end import ManagerEnd
from live.peers import until as wait_until

from stoker.config import write_sites
from stoker.manager.factory.factory import FactoryEnd, write_jobs_left
from stoker.manager.live import lease
from stoker.protocol import to_client
from stoker.protocol.blocks import BlockPhase, KnownBlock
from stoker.protocol.ids import BlockId
from stoker.protocol.session import SessionFolder
from stoker.site import Duration, Provider, ProviderKind, Session, Site

# ---- process


PENDING, RUNNING, ENDED, REFUSED = BlockPhase.PENDING, BlockPhase.RUNNING, BlockPhase.ENDED, BlockPhase.REFUSED


def until(true: Callable[[], Any], *, what: str) -> Any:
    return wait_until(true, what=what, seconds=60)


def slurm_site(name: str = "lab", *, lease_s: float = 60.0, **provider: object) -> Site:
    quick = {"command_limit_s": Duration(4), "poll_s": Duration(0.2), "listing_lag_s": Duration(1), **provider}
    return Site(
        name=name,
        provider=Provider(kind=ProviderKind.SLURM, **quick),  # type: ignore[arg-type]
        session=Session(heartbeat_s=Duration(0.5), lease_s=Duration(lease_s)),
    )


@pytest.fixture(autouse=True)
def _sites(folder: SessionFolder, slurm: FakeSlurm) -> None:
    write_sites(folder.sites, [slurm_site()])


def test_blocks_are_submitted_watched_and_cancelled(
    manager: ManagerEnd, slurm: FakeSlurm, folder: SessionFolder
) -> None:
    factory = manager.start_factory()
    manager.submit("b0", "b1")
    job = manager.hear("b0", PENDING, where=lambda news: news.reason == "Priority").job
    other = manager.hear("b1", PENDING).job
    slurm.put(job, state="RUNNING", nodes="n014")
    assert manager.hear("b0", RUNNING).reason == "on n014"
    before = len(slurm.asked("squeue"))
    manager.until(lambda: len(slurm.asked("squeue")) >= before + 8, what="eight more polls at 0.2 s each")
    scripts = "".join(Path(file).read_text() for file in folder.submit.glob("*.sh"))
    assert "stoker.pilot.main" in scripts
    assert not [role for role in ("client", "pilot", "server") if folder.read_key(role).secret in scripts]
    manager.cancel("b1")
    assert manager.hear("b1", ENDED).reason == "cancelled: nothing to do"
    assert slurm.jobs()[other]["state"] == "CANCELLED"
    assert manager.end(factory) == FactoryEnd.OVER
    assert slurm.jobs()[job]["state"] == "CANCELLED"


def test_refused_and_unknown_blocks_are_reported(manager: ManagerEnd, folder: SessionFolder, slurm: FakeSlurm) -> None:
    write_sites(folder.sites, [slurm_site(partition="nope")])
    manager.start_factory()
    manager.submit("b0")
    assert "Invalid partition name specified" in manager.hear("b0", REFUSED).reason
    manager.submit("b1", source="moon")
    assert manager.hear("b1", REFUSED).reason == "the session has no site file named moon; its site files: lab"
    manager.cancel("b9")
    assert manager.hear("b9", ENDED).reason == "cancelled: it was never submitted"


def test_hanging_sbatch_is_reported_and_submits_nothing_twice(manager: ManagerEnd, slurm: FakeSlurm) -> None:
    manager.start_factory()
    slurm.fault("sbatch", hang="after")
    manager.submit("b0")
    manager.hear_trouble("sbatch has not answered for 4 s")
    slurm.fault("sbatch")
    manager.hear("b0", PENDING)
    manager.submit("b1")
    manager.hear("b1", PENDING)
    assert [job["name"] for job in slurm.jobs().values()] == ["stoker-k3v9-b0", "stoker-k3v9-b1"]


def test_job_absent_from_listings_is_lost_after_listing_lag(
    manager: ManagerEnd, folder: SessionFolder, slurm: FakeSlurm
) -> None:
    write_sites(folder.sites, [slurm_site(), slurm_site("slow", listing_lag_s=Duration(3600))])
    factory = manager.start_factory()
    manager.submit("b0")
    manager.submit("b1", source="slow")
    job, other = manager.hear("b0", PENDING).job, manager.hear("b1", PENDING).job
    for each in (job, other):
        slurm.put(each, state="RUNNING", forgotten="everywhere")
    assert manager.hear("b0", ENDED).reason == "Slurm no longer knows this job"
    asked = len(slurm.asked("scontrol"))
    manager.until(lambda: len(slurm.asked("scontrol")) > asked + 5, what="five more queries")
    assert [update for update in manager.news if update.block == "b1" and update.phase is ENDED] == []
    assert manager.end(factory) == FactoryEnd.OVER
    assert {each["state"] for each in slurm.jobs().values()} == {"CANCELLED"}


def test_hanging_site_delays_no_other_site(manager: ManagerEnd, folder: SessionFolder, slurm: FakeSlurm) -> None:
    pbs = Site(name="other", provider=Provider(kind=ProviderKind.PBS))
    write_sites(folder.sites, [slurm_site(command_limit_s=Duration(60)), pbs])
    manager.start_factory()
    slurm.fault("sbatch", hang="before")
    manager.submit("b0")
    until(lambda: slurm.asked("sbatch"), what="sbatch")
    manager.submit("b1", source="other")
    assert "no qsub on its PATH" in manager.hear("b1", REFUSED).reason


def test_delayed_listings_cause_no_second_submission(
    manager: ManagerEnd, folder: SessionFolder, slurm: FakeSlurm
) -> None:
    write_sites(folder.sites, [slurm_site(listing_lag_s=Duration(3600))])
    factory = manager.start_factory()
    slurm.fault("squeue", silent=True)
    slurm.fault("sbatch", hang="after", before="2026", after="see the news")
    manager.submit("b0")
    until(slurm.jobs, what="the job")
    os.kill(factory.pid, signal.SIGKILL)
    factory.wait(10)
    slurm.fault("sbatch", before="2026", after="see the news")
    manager.known = tuple(KnownBlock(BlockId(block), "lab", BlockPhase.ASKED) for block in ("b0", "b1"))
    second = manager.start_factory()
    asked = len(slurm.asked("squeue"))
    manager.until(lambda: len(slurm.asked("squeue")) > asked + 5, what="five searches")
    assert len(slurm.jobs()) == 1, "a second job would run at the same time"
    slurm.fault("squeue")
    assert manager.hear("b0", PENDING).job == "101"
    assert manager.hear("b1", PENDING).job == "102"
    assert manager.end(second) == FactoryEnd.OVER
    assert [job["state"] for job in slurm.jobs().values()] == ["CANCELLED"] * 2


@pytest.mark.long
def test_manager_that_never_returns_ends_the_factory(
    manager: ManagerEnd, folder: SessionFolder, slurm: FakeSlurm
) -> None:
    write_sites(folder.sites, [slurm_site(lease_s=2.0)])
    factory = manager.start_factory()
    manager.submit("b0", "b1")
    waiting, running = manager.hear("b0", PENDING).job, manager.hear("b1", PENDING).job
    slurm.put(running, state="RUNNING", nodes="n1")
    manager.hear("b1", RUNNING)
    manager.leave()
    assert manager.ended(factory) == FactoryEnd.MANAGER_AWAY
    states = {job: facts["state"] for job, facts in slurm.jobs().items()}
    assert states == {waiting: "CANCELLED", running: "RUNNING"}


def test_jobs_that_cannot_be_cancelled_are_named(manager: ManagerEnd, slurm: FakeSlurm, folder: SessionFolder) -> None:
    factory = manager.start_factory("--end-limit-s", "2")
    manager.submit("b0")
    job = manager.hear("b0", PENDING).job
    (slurm.bin / "scancel").write_text("#!/bin/sh\nexit 0\n")
    assert manager.end(factory) == FactoryEnd.JOBS_LEFT
    assert (folder.path / "jobs-left").read_text() == f"lab: {job}\n"
    assert job in (folder.path / "factory.log").read_text()


def test_job_in_submission_at_the_end_is_cancelled(
    manager: ManagerEnd, slurm: FakeSlurm, folder: SessionFolder
) -> None:
    write_sites(folder.sites, [slurm_site(command_limit_s=Duration(60))])
    factory = manager.start_factory()
    slurm.fault("sbatch", held=True)
    manager.submit("b0", "b1")
    until(slurm.jobs, what="the job")
    manager.tell(to_client.SessionOver("the program is done"))
    log = folder.path / "factory.log"
    manager.until(lambda: "the session is over" in log.read_text(), what="the factory to receive the order")
    slurm.fault("sbatch")
    assert manager.ended(factory) == FactoryEnd.OVER
    assert [job["state"] for job in slurm.jobs().values()] == ["CANCELLED"]


def test_job_of_a_submission_that_hangs_at_session_end_is_named(
    manager: ManagerEnd, slurm: FakeSlurm, folder: SessionFolder
) -> None:
    write_sites(folder.sites, [slurm_site(command_limit_s=Duration(600))])
    factory = manager.start_factory("--end-limit-s", "1")
    slurm.fault("sbatch", hang="after")
    manager.submit("b0")
    until(slurm.jobs, what="the job")
    assert manager.end(factory) == FactoryEnd.JOBS_LEFT
    assert (folder.path / "jobs-left").read_text() == "lab: stoker-k3v9-b0\n"
    until(lambda: not slurm.hanging(), what="the end of the command that hangs")


def test_factory_that_the_manager_refuses_exits(manager: ManagerEnd, slurm: FakeSlurm) -> None:
    factory = manager.start_factory()
    manager.tell(to_client.ClientRefused("this manager speaks version 9"))
    assert manager.ended(factory) == FactoryEnd.REFUSED


def test_jobs_of_a_session_that_ended_without_factory_are_cancelled(manager: ManagerEnd, slurm: FakeSlurm) -> None:
    manager.leave()
    lease.take_lease(manager.folder.lease).release(over="the program is done")
    slurm.put("900", name="stoker-k3v9-b1", state="RUNNING", folder=str(manager.folder.submit))
    factory = manager.start_factory(wait=False)
    assert manager.ended(factory) == FactoryEnd.OVER
    assert slurm.jobs()["900"]["state"] == "CANCELLED"
    assert (manager.folder.path / "jobs-left").read_text() == ""


# ---- leftover jobs


def test_failure_to_write_the_remaining_jobs_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "jobs-left"
    write_jobs_left(file, ["lab: 7 8", "other: 9"])
    assert file.read_text() == "lab: 7 8\nother: 9\n"
    write_jobs_left(file, [])
    assert file.read_text() == ""
    file.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3, hard))
        write_jobs_left(file, ["lab: 7 8"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not file.exists()
    assert "jobs-left cannot be written: File too large" in caplog.text
