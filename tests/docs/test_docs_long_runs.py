from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.pages import commands, programs, text_of
from polling import PATIENCE_S, polls

PAGE = "docs/long-runs.md"
COMMANDS = [
    "stoker run --detach ./long.py",
    "stoker attach long-1",
    "stoker status long-1",
    "stoker sessions",
    "stoker logs long-1",
    "stoker down long-1",
]


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            **os.environ,
            "STOKER_HOME": str(folder / "home"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        long, self.reader = (block.text for block in programs(PAGE))
        (folder / "long.py").write_text(long)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=120
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_page_shows_the_commands_that_the_test_runs() -> None:
    assert commands(PAGE) == COMMANDS


@pytest.mark.long
def test_detached_program_is_followed_to_its_end(place: Place) -> None:
    begun = place.run(COMMANDS[0])
    assert re.match(r"long-1 runs on \S+ \(pid \d+\) and continues after you log out; its log is /", begun.stdout)
    page = re.search(r"^long-1 runs on(?:.*\n){4}", text_of(PAGE), re.MULTILINE)
    assert page is not None
    assert begun.stdout.splitlines()[1:] == page[0].splitlines()[1:]
    attached = place.run(COMMANDS[1])
    assert (attached.returncode, "measure 1000/1000" in attached.stdout) == (0, True), attached
    assert place.run(COMMANDS[2]).stdout.startswith("long-1  exit status 0  ended ")
    assert "  long-1  exit status 0  ended " in place.run(COMMANDS[3]).stdout
    assert place.run(COMMANDS[4]).stdout == attached.stdout
    assert place.run(COMMANDS[5]).stdout == "long-1 is over: exit status 0\n"
    results = [{"item": each, "square": each * each} for each in range(1000)]
    (place.folder / "read.py").write_text(place.reader)
    assert place.run(f"{sys.executable} read.py").stdout.splitlines() == [str(each) for each in results]


@pytest.mark.long
def test_stopped_run_continues(place: Place) -> None:
    kept = place.folder / "run.jsonl"
    slow = (
        (place.folder / "long.py")
        .read_text()
        .replace("    return {", "    __import__('time').sleep(0.05)\n    return {")
    )
    (place.folder / "long.py").write_text(slow)
    place.run(COMMANDS[0])
    assert any(kept.exists() and len(kept.read_bytes().splitlines()) > 5 for _ in polls(PATIENCE_S))
    assert place.run(COMMANDS[5]).stdout.startswith("long-1 was stopped: exit status 1")
    before = len(kept.read_bytes().splitlines()) - 1
    assert before < 1000
    again = place.run(COMMANDS[0])
    assert again.stdout.startswith("long-2 runs on")
    assert place.run("stoker attach long-2").returncode == 0
    items = [json.loads(line)["item"] for line in kept.read_bytes().splitlines()[1:]]
    assert sorted(items) == list(range(1000)), "each result was computed once"
