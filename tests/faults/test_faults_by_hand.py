"""A pilot that is started by hand joins a session, with a key of its own."""

from __future__ import annotations

import os
import sys
import time

from faults.world import until

import stoker
from stoker.protocol.session import SessionFolder


def test_a_pilot_that_is_started_by_hand_serves_and_leaves_no_key(session, world, tmp_path):
    @stoker.app
    def where(number):
        time.sleep(0.05)
        return os.environ.get("BY_HAND", "")

    folder = SessionFolder(session.folder)
    keys = set(folder.block_keys.iterdir())
    command = [sys.executable, "-m", "stoker.pilot.main", "--session", str(folder.path), "--devices", "cpu:1"]
    pilot = world.spawn(command, folder=tmp_path / "elsewhere", BY_HAND="by hand")
    until(lambda: len(session.status().pilots) == 2, why="both pilots")
    [mine] = set(folder.block_keys.iterdir()) - keys
    assert mine.stat().st_mode & 0o777 == 0o600
    assert {each.block for each in session.status().pilots} >= {mine.stem}
    until(lambda: "by hand" in set(stoker.map(where, range(20))), limit_s=30, why="a call on it")
    pilot.terminate()
    assert pilot.wait(20) == 0
    assert set(folder.block_keys.iterdir()) == keys
