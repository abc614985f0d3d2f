from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from factory.manager_end import ManagerEnd
from live.peers import key_pair

from stoker.config import parse_site, write_sites
from stoker.manager.factory.factory import FactoryEnd
from stoker.protocol import to_client
from stoker.protocol.blocks import BlockPhase, KnownBlock, LossReason
from stoker.protocol.ids import BlockId
from stoker.protocol.session import SessionFolder

if TYPE_CHECKING:
    from batch.condor.pool import Pool

PENDING, RUNNING, ENDED, REFUSED = BlockPhase.PENDING, BlockPhase.RUNNING, BlockPhase.ENDED, BlockPhase.REFUSED
SITE = """
name = "lab"
[provider]
kind = "condor"
poll = "200 ms"
listing_lag = "1 s"
requirements = "{requirements}"
[pilot]
cache_size = "1 GB"
[environment]
python = "{python}"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SessionFolder:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    folder = SessionFolder(tmp_path / "session")
    folder.create_folders()
    for role in ("server", "client", "pilot"):
        folder.write_key(role, key_pair())
    write_site(folder)
    return folder


def write_site(folder: SessionFolder, *, requirements: str = "") -> None:
    sleeper = folder.path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 300\n")
    sleeper.chmod(0o755)
    write_sites(folder.sites, [parse_site(SITE.format(python=sleeper, requirements=requirements), file="lab.toml")])


@pytest.fixture
def manager(folder: SessionFolder) -> Iterator[ManagerEnd]:
    manager = ManagerEnd(folder)
    yield manager
    manager.close()


def test_blocks_are_submitted_watched_and_cancelled(pool: Pool, manager: ManagerEnd) -> None:
    factory = manager.start_factory()
    manager.submit("b0", "b1")
    job = manager.hear("b0", RUNNING).job
    other = manager.hear("b1", RUNNING).job
    pool.evict(job)
    assert manager.hear("b0", ENDED).loss is LossReason.PREEMPTED
    manager.submit("b2")
    job = manager.hear("b2", RUNNING).job
    manager.cancel("b1")
    manager.hear("b1", ENDED)
    pool.wait(other, 3)
    processes = manager.until(lambda: pool.processes(job), what="the processes of a job")
    manager.tell(to_client.SessionOver("the program is done"))
    assert manager.ended(factory) == FactoryEnd.OVER
    assert pool.queued() == []
    assert not any(process.is_running() for process in processes)


def test_blocks_continue_after_an_outage_of_the_schedd(make_pool: Callable[..., Pool], manager: ManagerEnd) -> None:
    from batch.condor.machines import machine

    pool = make_pool(machine("n1"))
    manager.start_factory()
    manager.submit("b0")
    manager.hear("b0", RUNNING)
    pool.stop_schedd()
    manager.hear_trouble("Failed to connect to")
    manager.submit("b1")
    pool.start_schedd()
    manager.hear_trouble("")
    manager.hear("b1", RUNNING)
    assert len(pool.queued()) == 2


@pytest.mark.parametrize("moment", ["before", "after"])
def test_factory_killed_during_submission_submits_nothing_twice(
    make_pool: Callable[..., Pool], manager: ManagerEnd, moment: str
) -> None:
    from batch.condor.machines import machine
    from live.peers import until

    pool = make_pool(machine("n1"))
    submit, waits = pool.bin / "condor_submit", pool.folder / "waits"
    real = submit.read_text()
    runs = real.removeprefix("#!/bin/sh\n").replace("exec ", "") if moment == "after" else ""
    submit.write_text(f"#!/bin/sh\n{runs}echo $$ > '{waits}'\nexec sleep 300\n")
    factory = manager.start_factory()
    manager.submit("b0")
    pid = until(lambda: waits.exists() and waits.read_text().strip(), what="condor_submit", seconds=60)
    os.killpg(factory.pid, signal.SIGKILL)
    factory.wait(10)
    os.kill(int(pid), signal.SIGKILL)
    submit.write_text(real)
    manager.known = (KnownBlock(BlockId("b0"), "lab", BlockPhase.ASKED),)
    manager.start_factory()
    manager.hear("b0", RUNNING)
    assert len(pool.queued()) == 1
