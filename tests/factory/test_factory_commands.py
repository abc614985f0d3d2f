from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from live.peers import until

from stoker.manager.factory.batch import BatchSystemError
from stoker.manager.factory.commands import CommandResult, CommandRunner, remove_batch_variables
from stoker.manager.factory.local import LocalBatch
from stoker.protocol.blocks import BlockPhase
from stoker.protocol.ids import BlockId

# ---- commands


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function that delays the time limit of a command until the command has made a file, because its shell
    may start slowly.
    """

    def count_once(made: Path) -> None:
        communicate = subprocess.Popen.communicate

        def later(process: subprocess.Popen[bytes], *given: Any, **more: Any) -> Any:
            until(made.exists, what="the command")
            return communicate(process, *given, **more)

        monkeypatch.setattr(subprocess.Popen, "communicate", later)

    return count_once


def test_command_returns_its_output(tmp_path: Path) -> None:
    said = CommandRunner(limit_s=10, folder=tmp_path).run(["sh", "-c", "pwd; echo no >&2; exit 3"])
    assert (said.code, said.out, said.err) == (3, f"{tmp_path}\n", "no\n")


def test_hanging_command_is_killed_with_all_its_children(tmp_path: Path, once: Callable[[Path], None]) -> None:
    started = time.monotonic()
    once(tmp_path / "begun")
    with pytest.raises(BatchSystemError, match=r"^squeue has not answered for 0.5 s$"):
        CommandRunner(limit_s=0.5, folder=tmp_path).run(
            ["sh", "-c", "sleep 500 & echo $! > child; setsid sleep 500 & echo $! >> child; touch begun; wait"],
            name="squeue",
        )
    assert time.monotonic() - started < 100
    for pid in (tmp_path / "child").read_text().split():
        until(lambda pid=pid: not psutil.pid_exists(int(pid)), what=f"the end of {pid}")


@pytest.mark.parametrize("where", ["2", "1"], ids=["stderr", "stdout"])
def test_output_before_a_timeout_is_part_of_the_error(tmp_path: Path, where: str, once: Callable[[Path], None]) -> None:
    once(tmp_path / "said")
    line = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
    with pytest.raises(BatchSystemError) as caught:
        CommandRunner(limit_s=0.5, folder=tmp_path).run(
            ["sh", "-c", f"echo '{line}' >&{where}; touch said; sleep 500"], name="sbatch"
        )
    said = "after it printed: Slurm temporarily unable to accept job, sleeping and retrying"
    assert str(caught.value) == f"sbatch has not answered for 0.5 s, {said}"


def test_missing_command_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BatchSystemError, match="sbitch cannot be run"):
        CommandRunner(limit_s=5, folder=tmp_path).run(["sbitch"])


def test_missing_working_folder_of_commands_is_created(tmp_path: Path) -> None:
    commands = CommandRunner(limit_s=10, folder=tmp_path / "submit")
    assert commands.run(["pwd"]).out == f"{tmp_path}/submit\n"
    with pytest.raises(BatchSystemError, match="cannot be run"):
        CommandRunner(limit_s=10, folder=tmp_path / "no session" / "submit").run(["pwd"])


def test_large_outputs_are_read(tmp_path: Path) -> None:
    said = CommandRunner(limit_s=20, folder=tmp_path).run([sys.executable, "-c", "print('x' * 3_000_000)"])
    assert len(said.out) == 3_000_001


def test_slurm_variables_of_this_process_are_hidden() -> None:
    given = {"PATH": "/bin", "SLURM_JOB_ID": "1", "SBATCH_PARTITION": "x", "SQUEUE_FORMAT": "%i", "SLURM_CONF": "/c"}
    assert remove_batch_variables(given) == {"PATH": "/bin", "SLURM_CONF": "/c"}


@pytest.mark.parametrize(
    ("err", "words"),
    [
        (
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "invalid partition specified: nope; Batch job submission failed: Invalid partition name specified",
        ),
        ("slurm_load_jobs error: Invalid job id specified\n", "slurm_load_jobs error: Invalid job id specified"),
        ("", "exit code 1, no output"),
    ],
)
def test_failure_is_reported_in_the_words_of_the_command(err: str, words: str) -> None:
    assert CommandResult(1, "", err).failure_reason == words


# ---- local blocks


B0, B1 = BlockId("b0"), BlockId("b1")


class Place:
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
    until(lambda: not batch.find(), what="the end of the started processes")


def test_local_pilot_is_started_watched_and_ended(place: Place) -> None:
    batch = place.batch()
    job = batch.submit(B0)
    assert batch.query([job])[job].phase is BlockPhase.RUNNING, "the process belongs to the block from its start"
    batch.cancel([job])
    until(lambda: batch.query([job])[job].phase is BlockPhase.ENDED, what="the end")


def test_end_of_a_local_pilot_has_its_reason(place: Place) -> None:
    batch = place.batch()
    place.program = "import sys; sys.exit('no such folder')"
    job = batch.submit(B0)
    look = until(lambda: (looked := batch.query([job])[job]).phase is BlockPhase.ENDED and looked, what="the end")
    assert look.reason == "exit code 1: no such folder"


def test_another_factory_finds_and_ends_running_pilots(place: Place, tmp_path: Path) -> None:
    init = f"touch {tmp_path}/begun; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    first = LocalBatch(session="k3v9", folder=place.folder / "submit", command=place.command, worker_init=init)
    job = first.submit(B1)
    until((tmp_path / "begun").exists, what="worker_init")
    assert place.batch().find() == {job: B1}
    (tmp_path / "go").touch()
    until(lambda: place.program in psutil.Process(int(job)).cmdline(), what="the pilot")
    other = place.batch()
    assert other.find() == {job: B1}
    other.cancel([job])
    until(lambda: not other.find(), what="the end")
    assert other.query([job])[job].reason == "its process is gone"


def test_pilots_of_other_sessions_are_ignored(place: Place, tmp_path: Path) -> None:
    other = Place(tmp_path / "other")
    batch = other.batch()
    job = batch.submit(B0)
    until(lambda: batch.find(), what="the other's pilot")
    assert not place.batch().find()
    batch.cancel([job])
    until(lambda: not batch.find(), what="its end")


def test_worker_init_runs_before_a_local_pilot(place: Place) -> None:
    place.program = "import os, sys; sys.exit(f'{os.getpid()} of {os.environ[chr(83)]}')"
    (place.folder / "activate").write_text("export S=${1-'two words'}\n")
    init = f"source {shlex.quote(str(place.folder / 'activate'))}"
    batch = LocalBatch(session="k3v9", folder=place.folder / "submit", command=place.command, worker_init=init)
    job = batch.submit(B0)
    look = until(lambda: (looked := batch.query([job])[job]).phase is BlockPhase.ENDED and looked, what="the end")
    assert look.reason == f"exit code 1: {job} of two words"
