from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.__main__ import BENCHMARKS, main, print_outcome
from benchmarks.harness import ROOT, run_side, take_turns
from benchmarks.results import missing_parts
from benchmarks.tables import Bar, Line, Table, Verdict, passes, show

FAST, SLOW = Bar(at_least=4), Bar(at_most=0.6)


@pytest.mark.parametrize(
    ("bar", "numbers", "verdict"),
    [
        (FAST, [4.0, 4.0, 4.0], Verdict.MET),
        (FAST, [3.9, 3.9, 90.0], Verdict.MISSED),  # the bar judges the median of the three numbers
        (FAST, [4.1, 4.1, 0.1], Verdict.MET),
        (SLOW, [0.6, 0.6, 0.6], Verdict.MET),
        (SLOW, [0.1, 0.61, 0.61], Verdict.MISSED),
        (FAST, [9.0, 9.0], Verdict.TOO_FEW),
        (FAST, [], Verdict.TOO_FEW),
        (FAST, [9.0, math.nan, 9.0], Verdict.MISSED),
        (FAST, [9.0, math.inf, 9.0], Verdict.MISSED),
        (SLOW, [-math.inf, 0.1, 0.1], Verdict.MISSED),
        (Bar(at_most=1.1, repeats=1), [1.1], Verdict.MET),
    ],
)
def test_verdict_compares_a_result_with_its_bar(bar: Bar, numbers: list[float], verdict: Verdict) -> None:
    assert bar.judge(numbers) is verdict


def test_two_compared_programs_alternate_which_runs_first() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], str]:
        return lambda: order.append(name) or name.lower()  # type: ignore[func-returns-value]

    for pair in range(4):
        assert take_turns(pair, {"A": side("A"), "B": side("B")}) == {"A": "a", "B": "b"}
    assert "".join(order) == "ABBAABBA"


def table(*numbers: float, bar: Bar | None = FAST) -> Table:
    return Table(name="one", title="a title", lines=[Line(what="a line", cells={"ratio": list(numbers)}, bar=bar)])


def test_exit_status_depends_on_missed_bars_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, few = table(5.0, 5.0, 5.0), table(1.0, 1.0, 1.0), table(5.0)
    skipped = Table(name="two", title="b", skipped="no such module")
    assert [passes(each) for each in (good, bad, few)] == [True, False, False]
    for tables, failed, quick, status in (
        ([good, skipped], [], False, 0), ([good, bad], [], False, 1), ([good, few], [], False, 1),
        ([good], ["three"], False, 2), ([skipped], [], False, 2), ([], [], True, 2), ([bad], [], True, 0),
    ):  # fmt: skip
        assert print_outcome(tables, failed, quick=quick) == status
    said = capsys.readouterr().out
    assert "not every bar is met: one" in said
    assert "failed: three" in said
    assert "no bar was judged" in said


def test_table_marks_missed_bars() -> None:
    said = "\n".join(show(table(1.0, 2.0, 3.0)))
    assert "| a line | 3 | 2.00 (1.00-3.00) | at least 4 | MISSED |" in said
    assert "too few repeats" in "\n".join(show(table(9.0)))
    apart = Line(what="a line", cells={"us": [1.0, 2.0], "ratio": [3.0] * 3})
    assert "| a line | 2 to 3 |" in "\n".join(show(Table(name="one", title="a title", lines=[apart])))
    assert "not judged" in "\n".join(show(table(9.0), quick=True))
    assert "skipped: no such module" in show(Table(name="two", title="b", skipped="no such module"))


def test_results_page_matches_the_recorded_measurements() -> None:
    assert results.PAGE.read_text() == results.write()


@pytest.mark.parametrize(
    ("record", "missing"),
    [
        ({"facts": {"command": "python -m it", "commit": "abc", "load": [0.1, 0.2]}, "tables": []}, []),
        ({"facts": ["`python -m it`", "commits abc to def", "load average 2 to 12"]}, []),
        ({"facts": ["2 cores", "commit unknown", "load before not known"]}, ["no command", "no commit", "no load"]),
        ({"command": "make it", "machine": "2 cores, load average 3 to 10", "runs": [{"commit": "abc"}]}, []),
        (
            [{"here": "abc-dirty", "other": "def", "cases": {"one": {"load": [1.0]}}}],
            ["no command", "measured with changes that are in no commit"],
        ),
    ],
)
def test_facts_missing_from_a_record_are_listed(record: object, missing: list[str]) -> None:
    assert missing_parts(record) == missing


def test_failed_benchmark_process_raises_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"nothing\.json"):
        run_side("json.tool", "nothing.json")


def test_unknown_benchmark_name_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["noop", "zygot"])
    said = capsys.readouterr().err
    assert "zygot" in said
    assert all(name in said for name in BENCHMARKS)


@pytest.mark.long
def test_quick_run_of_the_benchmarks_passes(tmp_path: Path) -> None:
    names = ["core_events", "memory_per_call", "taskvine", "zygote"]
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks", *names, "--quick", "--json", str(tmp_path / "found.json"), "--out",
            str(tmp_path / "out"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["name"] for one in found["tables"]] == names
    assert found["quick"] is True
    assert found["facts"]["commit"]
    assert "## core_events: " in (tmp_path / "out" / "page.md").read_text()
    for one in found["tables"]:
        assert one["lines"] or one["skipped"]
        assert f"## {one['name']}: " in done.stdout
    if importlib.util.find_spec("ndcctools") is None:
        assert "ndcctools does not import" in found["tables"][2]["skipped"]
    assert "no bar was judged" in done.stdout
