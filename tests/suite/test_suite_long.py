from __future__ import annotations

from pathlib import Path

import pytest
from pytest_inside import run_pytest, write_suite
from suite_long import SHORT_EXAMPLES

FILE = """
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, rule

def note(name):
    with open("ran", "a") as file:
        file.write(name + " ")

@given(st.integers())
def test_property(number):
    note("property")

@settings(max_examples=FEW)
@given(st.integers())
def test_small(number):
    note("small")

class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        note("machine")

    @rule()
    def step(self):
        pass

TestMachine = Machine.TestCase

@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2])
def test_long(number):
    note("long")

@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2])
def test_other_long(number):
    note("other")

def test_short():
    note("short")
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    return write_suite(tmp_path, {"test_one.py": FILE.replace("FEW", str(SHORT_EXAMPLES))})


def run(suite: Path, *options: str) -> dict[str, int]:
    (suite / "ran").unlink(missing_ok=True)
    done = run_pytest(suite, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    names = (suite / "ran").read_text().split()
    return {name: names.count(name) for name in names}


def test_each_test_runs_in_the_short_or_in_the_long_part(suite: Path) -> None:
    short, long = run(suite), run(suite, "--long")
    assert set(short) == {"property", "small", "machine", "short"}
    assert short["property"] <= SHORT_EXAMPLES
    assert short["machine"] <= SHORT_EXAMPLES + 5, "Hypothesis makes a few more machines than examples"
    assert set(long) == {"long", "other", "property", "machine"}
    assert long["long"] == 2
    assert long["property"] == 100
    assert long["machine"] >= 100
    assert set(run(suite, "--all")) == set(short) | set(long)


def test_long_test_runs_if_the_command_names_it(suite: Path) -> None:
    assert run(suite, "tests/test_one.py::test_long[2]", "tests/test_one.py::test_other_long") == {
        "long": 1,
        "other": 2,
    }
