"""Timelines that Perfetto opens."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sim.worlds import NOW, calls, model, simulate, source, world
from study.small_runs import small_run

from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import EventLog, Happened
from stoker.manager.study.log_files import events_of, write_timeline
from stoker.manager.study.measures import measure
from stoker.manager.study.plots import curves_of
from stoker.site import Duration


def slices_by_row(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return {row: sorted(slices) for row, slices in rows.items()}


def timeline(log: EventLog, **more: Any) -> list[dict[str, Any]]:
    return list(events_of(log, curves_of(measure(log)), **more))


def test_a_timeline_has_every_call_on_a_row_of_its_library() -> None:
    events = timeline(small_run())
    drawn = [event for event in events if event["ph"] == "X" and event["name"].startswith("call ")]
    assert sum(event["args"]["items"] for event in drawn if "args" in event) == 100
    lost = [event for event in drawn if event["name"].endswith(", lost")]
    assert [(event["ts"], event["dur"], event["cname"]) for event in lost] == [(30_000_000, 500_000, "terrible")]
    loads = [event for event in events if event["name"] == "load"]
    assert [(event["ts"], event["dur"]) for event in loads] == [(0, 10_000_000)] * 2
    connected = sorted(event["dur"] for event in events if event["name"] == "connected")
    assert connected[0] == 30_500_000
    assert Counter(event["name"] for event in events if event["pid"] == 2)["running"] == 2


@pytest.mark.parametrize("slots", [1, 3])
def test_nothing_overlaps_on_a_row_and_every_row_has_a_name(slots: int) -> None:
    events = timeline(small_run(slots=slots, item_cv=0.7))
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    rows = slices_by_row(events)
    assert set(rows) <= named
    assert {pid for pid, _ in rows} <= {event["pid"] for event in events if event["name"] == "process_name"}
    for slices in rows.values():
        assert all(ended <= began for (_, ended, _), (began, _, _) in pairwise(slices))
    of_calls = [row for row, slices in rows.items() if any(name.startswith("call ") for _, _, name in slices)]
    assert len(of_calls) == 2 * slots


def test_many_calls_are_drawn_together() -> None:
    log = small_run()
    alone, together = timeline(log), timeline(log, most_calls=20)
    drawn = [event for event in together if "args" in event and "calls" in event["args"]]
    assert len(drawn) < 30
    assert sum(event["args"]["calls"] for event in drawn) == 100
    assert any(event["name"] == "6 calls" for event in drawn)
    assert len(together) < len(alone)
    for slices in slices_by_row(together).values():
        assert all(ended <= began for (_, ended, _), (began, _, _) in pairwise(slices))


def test_what_goes_on_at_the_end_of_a_run_is_drawn_until_then() -> None:
    run, _ = simulate(world(source(1), model(item_s=30.0)), calls(9), until_s=60.0)
    events = timeline(run.log)
    assert {"call 1", "connected", "running"} <= {event["name"] for event in events}
    assert not any(event["name"].endswith("lost") for event in events)


def test_a_call_that_was_evicted_frees_its_row() -> None:
    log = EventLog()
    log.note(0.0, Happened.LIBRARY_STARTED, library=1, pilot=0)
    log.note(0.0, Happened.LIBRARY_STARTED, library=2, pilot=1)
    log.note(1.0, Happened.CALL_BEGAN, call=0, library=1, pilot=0, value=1.0)
    log.note(6.0, Happened.CALL_BEGAN, call=0, library=2, pilot=1, value=1.0)
    log.note(7.0, Happened.CALL_BEGAN, call=5, library=1, pilot=0, value=1.0)
    log.note(8.0, Happened.CALL_ENDED, call=0, library=2, pilot=1, value=1.0)
    log.note(9.0, Happened.CALL_ENDED, call=5, library=1, pilot=0, value=1.0)
    rows = slices_by_row(timeline(log))
    assert [name for slices in rows.values() for _, _, name in slices if "call" in name] == [
        "call 0, evicted", "call 5", "call 0"
    ]  # fmt: skip


def test_every_member_of_a_gang_is_drawn_on_its_own_row() -> None:
    small = world(source([(0.0, 4), (30.0, 2)], init_blocks=4), model(), delays=replace(NOW, progress_s=Duration(2.5)))
    first, second = Arrival(0.0, "llm", items=60, gang=(4, 4)), Arrival(12.0, "llm", items=80, gang=(2, 2))
    run, _ = simulate(small, [first, second], until_s=200.0)
    rows = slices_by_row(timeline(run.log))
    assert all(ended <= began for slices in rows.values() for (_, ended, _), (began, _, _) in pairwise(slices))
    drawn = sorted((began, ended, name) for slices in rows.values() for began, ended, name in slices if "call" in name)
    first = [name for began, _, name in drawn if began == 10_000_000]
    assert first == ["call 0", "call 0, rank 1", "call 0, rank 2", "call 0, rank 3"]
    # Fifteen seconds for the first. The second lost a member at 30 s, and went on from a checkpoint of 27.5 s.
    second = [(began / 1e6, ended / 1e6, name) for began, ended, name in drawn if began > 10_000_000]
    assert second[:2] == [(25.0, 30.0, "call 1, checkpointed"), (25.0, 30.0, "call 1, rank 1, checkpointed")]
    assert second[2:] == [(30.0, 67.5, "call 1"), (30.0, 67.5, "call 1, rank 1")]


def test_a_timeline_is_json_that_perfetto_opens_packed_or_not(tmp_path: Path) -> None:
    log = small_run()
    curves = curves_of(measure(log))
    write_timeline(tmp_path / "run.json", log, curves)
    write_timeline(tmp_path / "run.json.gz", log, curves)
    plain = (tmp_path / "run.json").read_bytes()
    assert gzip.decompress((tmp_path / "run.json.gz").read_bytes()) == plain
    whole = json.loads(plain)
    assert whole["traceEvents"] == timeline(log)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in whole["traceEvents"] if event["ph"] == "X")
    counted = [event["args"]["devices"] for event in whole["traceEvents"] if event["name"] == "devices"]
    assert counted[0] == 2.0
    packed = (tmp_path / "run.json.gz").read_bytes()
    write_timeline(tmp_path / "run.json.gz", log, curves)
    assert (tmp_path / "run.json.gz").read_bytes() == packed
