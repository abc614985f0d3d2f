"""Somebody removes the run folder of a program that runs: it is told what happened, and nothing stays behind."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from faults.world import until
from live.peers import session_folder

from stoker.errors import SessionError
from stoker.manager.executor import client, membership

PROGRAM = """
import os, sys, time
import stoker

def remove(folder):
    # By one step: a removal file by file fails where somebody just writes another.
    os.rename(folder, f"{folder}.gone")

def wait(number):
    time.sleep(max(0.05, number - 500))
    return number

session = stoker.load(run_dir=sys.argv[1])
print(list(stoker.map(wait, range(3))), flush=True)
results = iter(stoker.map(wait, range(400)))
if sys.argv[2] == "in a loop":
    next(results)
    remove(sys.argv[1])
    for _ in results:
        pass
elif sys.argv[2] == "in a future":
    future = stoker.app(wait)(600)
    remove(sys.argv[1])
    try:
        future.result()
    except Exception as error:
        raise error.__cause__ or error
else:
    results.close()
    remove(sys.argv[1])
"""


@pytest.mark.parametrize("when", ["in a loop", "in a future", "before the end"])
def test_a_run_folder_that_is_removed_ends_the_session_with_its_reason(world, when):
    program = world.start(PROGRAM, str(world.runs), when)
    said, complaint = program.communicate(timeout=60)
    assert said == "[0, 1, 2]\n"
    world.empty()
    assert not world.runs.exists()
    assert "FileNotFoundError" not in complaint
    if when == "before the end":
        assert (program.returncode, complaint) == (0, "")
    else:
        assert program.returncode == 1
        last = complaint.splitlines()[-1]
        assert "SessionError: the session folder " in last
        assert " was removed while the session ran: the session is over" in last


def test_a_program_that_joined_a_session_whose_folder_is_removed_is_told(world, tmp_path, monkeypatch):
    """Its manager ends at once, and no one starts it again."""
    monkeypatch.setattr(membership, "AWAY_S", 1.0)
    folder = session_folder(tmp_path / "session")
    command = [sys.executable, "-m", "stoker.manager.main", "--session", str(folder.path), "--detached"]
    with subprocess.Popen(command) as manager:
        until(folder.file.exists)
        joined = client.Link(folder)
        try:
            joined.wait_joined(20)
            shutil.rmtree(folder.path)
            assert manager.wait(20) == 3
            question = joined.ask_status()
            with pytest.raises(SessionError, match="was removed while the session ran"):
                question.result(20)
        finally:
            manager.kill()
            joined.close()
