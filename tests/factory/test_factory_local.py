"""Pilots of this machine beside those of a batch system: started, found by a later factory, ended."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from live.peers import until

from stoker.manager.factory.local import LocalBatch
from stoker.protocol.blocks import BlockPhase
from stoker.protocol.ids import BlockId

B0, B1 = BlockId("b0"), BlockId("b1")


class Place:
    """A session's folder, and what stands in for a pilot: a program with a pilot's command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "submit").mkdir(parents=True)
        self.program = "import time; time.sleep(300)"
        self.made: list[LocalBatch] = []

    def batch(self) -> LocalBatch:
        batch = LocalBatch(session="k3v9", folder=self.folder / "submit", command=self.command)
        self.made.append(batch)
        return batch

    def command(self, block: BlockId) -> str:
        words = ["stoker.pilot.main", "--session", str(self.folder), "--block", block]
        return shlex.join([sys.executable, "-c", self.program, *words])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "ses sion")
    yield place
    batch = place.batch()
    batch.cancel(list(batch.find()))
    until(lambda: not batch.find(), what="the end of what was started")


def test_started_watched_and_ended(place: Place) -> None:
    batch = place.batch()
    job = batch.submit(B0)
    assert batch.query([job])[job].phase is BlockPhase.RUNNING, "from its first moment on"
    batch.cancel([job])
    until(lambda: batch.query([job])[job].phase is BlockPhase.ENDED, what="the end")


def test_why_it_ended(place: Place) -> None:
    batch = place.batch()
    place.program = "import sys; sys.exit('no such folder')"
    job = batch.submit(B0)
    look = until(lambda: (looked := batch.query([job])[job]).phase is BlockPhase.ENDED and looked, what="the end")
    assert look.reason == "exit code 1: no such folder"


def test_another_factory_finds_what_runs(place: Place) -> None:
    job = place.batch().submit(B1)
    other = place.batch()
    until(lambda: other.find() == {job: B1}, what="the pilot to be there")
    other.cancel([job])
    until(lambda: not other.find(), what="the end")
    assert other.query([job])[job].reason == "its process is gone"


def test_another_factory_finds_a_pilot_in_its_worker_init(place: Place, tmp_path: Path) -> None:
    """A factory that was killed a moment after it started the shell is followed by one that starts no second pilot."""
    init = f"touch {tmp_path}/begun; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    first = LocalBatch(session="k3v9", folder=place.folder / "submit", command=place.command, worker_init=init)
    job = first.submit(B1)
    until((tmp_path / "begun").exists, what="worker_init")
    assert place.batch().find() == {job: B1}
    (tmp_path / "go").touch()
    until(lambda: place.program in psutil.Process(int(job)).cmdline(), what="the pilot")
    assert place.batch().find() == {job: B1}


def test_pilots_of_other_sessions_are_none_of_ours(place: Place, tmp_path: Path) -> None:
    other = Place(tmp_path / "other")
    batch = other.batch()
    job = batch.submit(B0)
    until(lambda: batch.find(), what="the other's pilot")
    assert not place.batch().find()
    batch.cancel([job])
    until(lambda: not batch.find(), what="its end")


def test_worker_init_runs_before_a_local_pilot_which_keeps_the_process_id_of_the_job(
    place: Place,
) -> None:
    place.program = "import os, sys; sys.exit(f'{os.getpid()} of {os.environ[chr(83)]}')"
    (place.folder / "activate").write_text("export S=${1-'two words'}\n")
    init = f"source {shlex.quote(str(place.folder / 'activate'))}"
    batch = LocalBatch(session="k3v9", folder=place.folder / "submit", command=place.command, worker_init=init)
    job = batch.submit(B0)
    look = until(lambda: (looked := batch.query([job])[job]).phase is BlockPhase.ENDED and looked, what="the end")
    assert look.reason == f"exit code 1: {job} of two words"
