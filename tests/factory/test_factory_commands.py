"""Commands of a batch system: bounded in time, with nothing left behind, and without the user's defaults."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from live.peers import until

from stoker.manager.factory.batch import BatchTrouble
from stoker.manager.factory.commands import CommandResult, CommandRunner, clean_environment


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Have the time of a command count once it has made a file, however long its shell takes to come that far."""

    def count_once(made: Path) -> None:
        communicate = subprocess.Popen.communicate

        def later(process: subprocess.Popen[bytes], *given: Any, **more: Any) -> Any:
            until(made.exists, what="the command")
            return communicate(process, *given, **more)

        monkeypatch.setattr(subprocess.Popen, "communicate", later)

    return count_once


def test_what_it_says(tmp_path: Path) -> None:
    said = CommandRunner(limit_s=10, folder=tmp_path).run(["sh", "-c", "pwd; echo no >&2; exit 3"])
    assert (said.code, said.out, said.err) == (3, f"{tmp_path}\n", "no\n")


def test_one_that_hangs_is_killed_with_all_that_it_has_started(tmp_path: Path, once: Callable[[Path], None]) -> None:
    started = time.monotonic()
    once(tmp_path / "begun")
    with pytest.raises(BatchTrouble, match=r"^squeue has not answered for 0.5 s$"):
        CommandRunner(limit_s=0.5, folder=tmp_path).run(
            ["sh", "-c", "sleep 500 & echo $! > child; setsid sleep 500 & echo $! >> child; touch begun; wait"],
            name="squeue",
        )
    assert time.monotonic() - started < 100
    for pid in (tmp_path / "child").read_text().split():
        until(lambda pid=pid: not psutil.pid_exists(int(pid)), what=f"the end of {pid}")


@pytest.mark.parametrize("where", ["2", "1"], ids=["stderr", "stdout"])
def test_what_one_said_before_its_time_was_up_is_told(tmp_path: Path, where: str, once: Callable[[Path], None]) -> None:
    once(tmp_path / "said")
    line = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
    with pytest.raises(BatchTrouble) as caught:
        CommandRunner(limit_s=0.5, folder=tmp_path).run(
            ["sh", "-c", f"echo '{line}' >&{where}; touch said; sleep 500"], name="sbatch"
        )
    said = "after it had said: Slurm temporarily unable to accept job, sleeping and retrying"
    assert str(caught.value) == f"sbatch has not answered for 0.5 s, {said}"


def test_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BatchTrouble, match="sbitch cannot be run"):
        CommandRunner(limit_s=5, folder=tmp_path).run(["sbitch"])


def test_the_folder_that_they_run_in_is_made_again_if_it_was_removed(tmp_path: Path) -> None:
    commands = CommandRunner(limit_s=10, folder=tmp_path / "submit")
    assert commands.run(["pwd"]).out == f"{tmp_path}/submit\n"
    with pytest.raises(BatchTrouble, match="cannot be run"):
        CommandRunner(limit_s=10, folder=tmp_path / "no session" / "submit").run(["pwd"])


def test_large_answers_fit(tmp_path: Path) -> None:
    said = CommandRunner(limit_s=20, folder=tmp_path).run([sys.executable, "-c", "print('x' * 3_000_000)"])
    assert len(said.out) == 3_000_001


def test_what_slurm_said_to_this_process_and_the_users_defaults_are_hidden() -> None:
    given = {"PATH": "/bin", "SLURM_JOB_ID": "1", "SBATCH_PARTITION": "x", "SQUEUE_FORMAT": "%i", "SLURM_CONF": "/c"}
    assert clean_environment(given) == {"PATH": "/bin", "SLURM_CONF": "/c"}


@pytest.mark.parametrize(
    ("err", "words"),
    [
        (
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "invalid partition specified: nope; Batch job submission failed: Invalid partition name specified",
        ),
        ("slurm_load_jobs error: Invalid job id specified\n", "slurm_load_jobs error: Invalid job id specified"),
        ("", "exit code 1, and not a word"),
    ],
)
def test_why_it_failed_in_its_own_words(err: str, words: str) -> None:
    assert CommandResult(1, "", err).words == words


def test_a_command_holds_the_lock_of_its_factory(tmp_path: Path) -> None:
    """Whoever comes after a factory that was killed must be able to wait for what it left running."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from stoker.manager.factory import commands\n"
        "import fcntl\n"
        "lock = os.open('lock', os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "commands.inherit(lock)\n"
        "commands.CommandRunner(limit_s=60, folder=Path('.')).run(['sh', '-c', 'echo $$ > pid; exec sleep 60'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), what="the command"))
    try:
        process.kill()
        process.wait(10)
        with (tmp_path / "lock").open() as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.kill(pid, 9)
            until(lambda: _free(lock.fileno()), what="the lock")
    finally:
        process.kill()


def _free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
