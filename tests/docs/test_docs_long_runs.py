from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from docs.conftest import Place
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


@pytest.fixture
def long(place: Place) -> Path:
    """Write the program of the page."""
    file = place.folder / "long.py"
    file.write_text(programs(PAGE)[0].text)
    return file


def test_page_shows_the_commands_that_the_test_runs() -> None:
    assert commands(PAGE) == COMMANDS


@pytest.mark.long
@pytest.mark.usefixtures("long")
def test_detached_program_is_followed_to_its_end(place: Place) -> None:
    begun = place.run(COMMANDS[0])
    assert re.match(r"long-1 runs on \S+ \(pid \d+\) and continues after you log out; its log is /", begun)
    page = re.search(r"^long-1 runs on(?:.*\n){4}", text_of(PAGE), re.MULTILINE)
    assert page is not None
    assert begun.splitlines()[1:] == page[0].splitlines()[1:]
    attached = place.run(COMMANDS[1])
    assert "measure 1000/1000" in attached
    assert place.run(COMMANDS[2]).startswith("long-1  exit status 0  ended ")
    assert "  long-1  exit status 0  ended " in place.run(COMMANDS[3])
    assert place.run(COMMANDS[4]) == attached
    assert place.run(COMMANDS[5]) == "long-1 is over: exit status 0\n"
    results = [{"item": each, "square": each * each} for each in range(1000)]
    assert place.run_program(programs(PAGE)[1].text).splitlines() == [str(each) for each in results]


@pytest.mark.long
def test_stopped_run_continues(place: Place, long: Path) -> None:
    kept = place.folder / "run.jsonl"
    long.write_text(long.read_text().replace("    return {", "    __import__('time').sleep(0.05)\n    return {"))
    place.run(COMMANDS[0])
    assert any(kept.exists() and len(kept.read_bytes().splitlines()) > 5 for _ in polls(PATIENCE_S))
    assert place.try_to_run(COMMANDS[5]).stdout.startswith("long-1 was stopped: exit status 1")
    before = len(kept.read_bytes().splitlines()) - 1
    assert before < 1000
    assert place.run(COMMANDS[0]).startswith("long-2 runs on")
    place.run("stoker attach long-2")
    items = [json.loads(line)["item"] for line in kept.read_bytes().splitlines()[1:]]
    assert sorted(items) == list(range(1000)), "each result was computed once"
