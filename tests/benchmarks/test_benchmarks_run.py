from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page, results
from benchmarks.__main__ import BENCHMARKS, main, print_outcome
from benchmarks.engine import awareness, core_events, noop, taskvine
from benchmarks.harness import ROOT, Facts, ratios, run_side, take_turns
from benchmarks.results import missing_parts
from benchmarks.serving import dashboard, gateway_cost, gateway_rate, lm_eval_scores
from benchmarks.tables import Bar, Line, Table, Verdict, passes, show

FAST, SLOW = Bar(at_least=4), Bar(at_most=0.6)


@pytest.mark.parametrize(
    ("bar", "numbers", "verdict"),
    [
        (FAST, [4.0, 4.0, 4.0], Verdict.MET),
        (FAST, [3.9, 3.9, 90.0], Verdict.MISSED),  # the bar judges the median of three, not the best
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


@pytest.mark.parametrize("wrong", [{}, {"at_least": 1.0, "at_most": 2.0}, {"at_least": 1.0, "repeats": 0}])
def test_bar_has_one_limit(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Bar(**wrong)


def test_last_cell_of_a_row_is_judged() -> None:
    line = Line(what="a", cells={"us": [1.0] * 3, "them": [9.0] * 3, "ratio": [3.0] * 3}, bar=FAST)
    assert line.verdict() is Verdict.MISSED
    assert line.verdict(quick=True) is Verdict.NOT_JUDGED


@pytest.mark.parametrize(
    "make",
    [
        lambda: Line(what="a", cells={}),
        lambda: Line(what="a", cells={"ratio": []}),
        lambda: Table(name="a", title="b"),
        lambda: Table(name="a", title="b", skipped="why", lines=[Line(what="a", cells={"n": [1.0]})]),
        lambda: ratios([1.0, 2.0], [1.0]),
    ],
)
def test_lines_and_tables_without_results_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        make()


def test_sides_alternate_in_order() -> None:
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


FACTS = Facts("python -m benchmarks", "abc", "2 cores", "2026-11-26", (0.5, 1.0))


def test_page_draws_every_bar_with_missed_bars_first() -> None:
    good, bad = table(8.0, 8.0, 8.0), table(1.0, 1.0, 2.0)
    plain = table(1.0, bar=None)
    skipped = Table(name="two", title="b", skipped="no <such> module")
    found = page.write([good, bad, plain, skipped], ["three"], FACTS)
    assert "<h1>1 of 2 bars met</h1>" in found
    assert found.count("<svg") == found.count("<circle") == 2
    assert found.index("MISSED") < found.index(">met")
    assert "two (no &lt;such&gt; module)" in found
    assert "<b>Failed:</b> three" in found
    assert "commit abc" in found


def test_better_results_are_drawn_to_the_right() -> None:
    def place(bar: Bar, number: float) -> float:
        found = page.write([table(number, number, number, bar=bar)], [], FACTS)
        return float(found.partition('cx="')[2].partition('"')[0])

    assert place(FAST, 8.0) > place(FAST, 4.0) > place(FAST, 2.0)
    assert place(SLOW, 0.3) > place(SLOW, 0.6) > place(SLOW, 1.2)
    assert place(FAST, 4.0) == place(SLOW, 0.6)
    assert place(Bar(at_most=0), 0.0) > place(Bar(at_most=0), 3.0)


def test_tables_with_a_record_match_that_record() -> None:
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
def test_numbers_missing_from_the_record_are_listed(record: object, missing: list[str]) -> None:
    assert missing_parts(record) == missing


def noop_side(ratio: float) -> Callable[..., dict[str, float]]:
    """Return a fake side: HTEX runs 1,000 calls/s with a median of 2 ms, and Stoker `ratio` times as many calls."""

    def side(module: str, *arguments: str, **more: Any) -> dict[str, float]:
        ours = "stoker" in arguments
        if "sequential" in arguments:
            return {"p50_ms": 2.0 * 2.4 / ratio if ours else 2.0}
        return {"calls_per_s": (ratio * 1000 if ours else 1000) * (6.25 if "map" in arguments else 1)}

    return side


@pytest.mark.parametrize(("ratio", "verdict"), [(4.01, Verdict.MET), (3.99, Verdict.MISSED)])
def test_noop_bars_are_judged_by_the_ratio(ratio: float, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noop, "run_side", noop_side(ratio))
    found = noop.measure(lambda _: None)
    assert [line.verdict() for line in found.lines] == [verdict, verdict, verdict, *[Verdict.NO_BAR] * 4]
    assert any("collector" in line.what for line in found.lines)
    assert any("ahead" in line.what for line in found.lines)


def taskvine_side(ratio: float) -> Callable[..., dict[str, Any]]:
    return lambda module, *_, **__: {"calls_per_s": 300.0 * (ratio if module == taskvine.OURS else 1.0), "p50_ms": 1.0}


def batches_side(slowest_s: float) -> Callable[..., dict[str, Any]]:
    seconds = {"1": [100.0, 100.0, 100.0], "16": [105.0] * 3, "256": [50.0, slowest_s, 900.0]}
    return lambda *_, **__: {"seconds": seconds}


def memory_side(resident: float) -> Callable[..., dict[str, Any]]:
    return lambda *_, **__: {"resident_bytes_per_call": resident, "traced_bytes_per_call": 1.0}


def cost_side(gateway_us: float) -> Callable[..., dict[str, Any]]:
    cpu_us = {"client": 900.0, "gateway": gateway_us, "manager": 20.0, "pilot": 10.0, "library": 30.0}
    return lambda *_, **__: {"cpu_us": cpu_us, "ttft_ms": [9.0] * 300, "late": [0.0] * 300}


def added_side(ttft_ms: float) -> Callable[..., dict[str, Any]]:
    cost = cost_side(1.0)()
    return lambda _, side, *__: {**cost, "ttft_ms": [2.0] * 297 + [2.0 if side == "direct" else ttft_ms] * 3}


def rate_side(tokens_per_s: float) -> Callable[..., dict[str, Any]]:
    return lambda *_, **__: {"200": {"tokens_per_s": tokens_per_s, "cpu_us": {"gateway": 1.0}}}


def page_side(milliseconds: float) -> Callable[..., dict[str, Any]]:
    return lambda *_, **__: {
        "page_ms": 50.0, "manager_ms": milliseconds - 50.0, "updates": 60.0, "update_kb": 9.0, "share": 1.0,
    }  # fmt: skip


def scores_side(score: float) -> Callable[..., dict[str, Any]]:
    return lambda *_, **__: {task: {"hf": 0.5, "gateway": score} for task in lm_eval_scores.SCORES}


@pytest.mark.parametrize(
    ("module", "measure", "side", "line", "met", "missed"),
    [
        (taskvine, taskvine.measure, taskvine_side, 0, 10.1, 9.9),
        (awareness, awareness.batches, batches_side, -1, 109.0, 111.0),
        (core_events, core_events.memory, memory_side, 0, 999.0, 1001.0),
        (gateway_cost, gateway_cost.measure, cost_side, 3, 22.9, 23.1),
        (gateway_cost, gateway_cost.measure, added_side, -1, 21.9, 22.1),
        (gateway_rate, gateway_rate.measure, rate_side, 0, 20_001.0, 19_999.0),
        (gateway_rate, gateway_rate.measure, rate_side, 1, 50_001.0, 49_999.0),
        (dashboard, dashboard.measure, page_side, 0, 199.0, 201.0),
        (lm_eval_scores, lm_eval_scores.measure, scores_side, 0, 0.509, 0.489),
    ],
)
def test_bars_of_other_benchmarks_are_judged_by_their_numbers(
    module: Any, measure: Any, side: Any, line: int, met: float, missed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("missing", "why_not"):
        monkeypatch.setattr(module, name, lambda *_: "", raising=False)
    monkeypatch.setattr(lm_eval_scores, "PYTHON", "true")
    for number, verdict in ((met, Verdict.MET), (missed, Verdict.MISSED)):
        monkeypatch.setattr(module, "run_side", side(number))
        assert measure(lambda _: None).lines[line].verdict() is verdict


def test_core_bars_are_judged_by_the_event_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def events(few: float, many: float, most: float) -> list[Verdict]:
        rates = {"1000": few, "100000": many, "1000000": most}

        def side(module: str, *arguments: str, **more: Any) -> dict[str, Any]:
            queued = arguments[arguments.index("--queued") + 1]
            return {"events_per_second": {queued: [rates[queued]]}}

        monkeypatch.setattr(core_events, "run_side", side)
        return [line.verdict() for line in core_events.events(lambda _: None).lines]

    good, bad = Verdict.MET, Verdict.MISSED
    assert events(250_000, 240_000, 201_000) == [good, good, good, good]
    assert events(250_000, 240_000, 199_000) == [good, good, bad, bad]
    assert events(190_000, 199_000, 199_000) == [bad, bad, bad, good]


def test_failed_side_gives_no_number() -> None:
    with pytest.raises(RuntimeError, match=r"nothing\.json"):
        run_side("json.tool", "nothing.json")


def test_unknown_benchmark_name_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["noop", "zygot"])
    said = capsys.readouterr().err
    assert "zygot" in said
    assert all(name in said for name in BENCHMARKS)


@pytest.mark.long
def test_noop_side_makes_calls() -> None:
    found = run_side("benchmarks.engine.noop", "stoker", "app", "--calls", "100", timeout_s=60)
    assert found["calls_per_s"] > 1


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
    assert "bars met" in (tmp_path / "out" / "page.html").read_text()
    for one in found["tables"]:
        assert one["lines"] or one["skipped"]
        assert f"## {one['name']}: " in done.stdout
    if importlib.util.find_spec("ndcctools") is None:
        assert "ndcctools does not import" in found["tables"][2]["skipped"]
    assert "no bar was judged" in done.stdout
