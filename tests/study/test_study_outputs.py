from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from sim.worlds import NOW, model, simulate, source, world
from study.small_runs import small_run

from stoker.errors import ConfigError
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import EventLog
from stoker.manager.study.log_files import make_timeline_events, read_event_log, write_event_log, write_timeline
from stoker.manager.study.measures import measure_run
from stoker.manager.study.plots import Curves, make_run_curves, write_plots
from stoker.site import Duration

FACTS = {"scenario": "small", "policy": "default", "seed": 7, "complete": True}


def digest_of_file(folder: Path) -> str:
    path = folder / "log.parquet"
    write_event_log(path, small_run(item_cv=0.5), FACTS)
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- log files


def test_log_reads_back_as_it_was_written(tmp_path: Path) -> None:
    log, path = small_run(), tmp_path / "log.parquet"
    write_event_log(path, log, FACTS)
    back, facts = read_event_log(path)
    assert (back.digest(), len(back), facts) == (log.digest(), len(log), FACTS)
    write_event_log(path, EventLog(), {})
    assert (len(read_event_log(path)[0]), read_event_log(path)[1]) == (0, {})
    assert [file.name for file in tmp_path.iterdir()] == ["log.parquet"]


def test_repeated_run_gives_equal_bytes_in_another_process(tmp_path: Path) -> None:
    program = "import pathlib, study.test_study_outputs as t; print(t.digest_of_file(pathlib.Path()))"
    (tmp_path / "theirs").mkdir()
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "theirs",
        capture_output=True, text=True, check=True, timeout=120,
        env=os.environ | {"PYTHONHASHSEED": "11", "PYTHONPATH": str(Path(__file__).parents[1])},
    ).stdout  # fmt: skip
    assert said.strip() == digest_of_file(tmp_path)


def test_file_that_is_not_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"away\.parquet: no such file"):
        read_event_log(tmp_path / "away.parquet")
    (tmp_path / "text.parquet").write_text("no log")
    with pytest.raises(ConfigError, match=r"text\.parquet: not an event log"):
        read_event_log(tmp_path / "text.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match=r"other\.parquet: not an event log of a simulation"):
        read_event_log(tmp_path / "other.parquet")


# ---- plots


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Curves]]:
    slow = [make_run_curves(measure_run(small_run(seed=seed, item_cv=0.8, load_s=30.0))) for seed in range(3)]
    return {
        "default": [make_run_curves(measure_run(small_run(seed=seed, item_cv=0.8))) for seed in range(3)],
        "slow": slow,
    }


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory, runs: dict[str, list[Curves]]) -> list[Path]:
    pytest.importorskip("matplotlib", reason="plots need the extra `study`")
    return write_plots(tmp_path_factory.mktemp("plots"), runs, title="A pool that shrinks")


def test_plots_are_drawn_as_png_and_svg(drawn: list[Path]) -> None:
    from matplotlib.image import imread

    names = {f"{name}.{kind}" for name in ("completed", "devices", "queue", "times") for kind in ("png", "svg")}
    assert {path.name for path in drawn} == names == {path.name for path in drawn[0].parent.iterdir()}
    for path in drawn:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
            continue
        pixels = imread(path)[:, :, :3]
        for line in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):  # blue is the first policy, red the second
            near = abs(pixels - [part / 255 for part in line]).max(axis=2) < 0.02
            assert near.sum() > 100, path.name


def test_equal_runs_give_equal_plots_under_any_user_settings(
    tmp_path: Path, drawn: list[Path], runs: dict[str, list[Curves]]
) -> None:
    import matplotlib

    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30.0}):
        again = write_plots(tmp_path, runs, title="A pool that shrinks")
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in drawn]


def slices_by_row(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return {row: sorted(slices) for row, slices in rows.items()}


def timeline(log: EventLog, **more: Any) -> list[dict[str, Any]]:
    return list(make_timeline_events(log, make_run_curves(measure_run(log)), **more))


def test_timeline_has_every_call_on_a_row_of_its_library() -> None:
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
def test_rows_do_not_overlap_and_every_row_has_a_name(slots: int) -> None:
    events = timeline(small_run(slots=slots, item_cv=0.7))
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    rows = slices_by_row(events)
    assert set(rows) <= named
    assert {pid for pid, _ in rows} <= {event["pid"] for event in events if event["name"] == "process_name"}
    for slices in rows.values():
        assert all(ended <= began for (_, ended, _), (began, _, _) in pairwise(slices))
    of_calls = [row for row, slices in rows.items() if any(name.startswith("call ") for _, _, name in slices)]
    assert len(of_calls) == 2 * slots


def test_timeline_joins_calls_if_there_are_too_many() -> None:
    log = small_run()
    alone, together = timeline(log), timeline(log, most_calls=20)
    drawn = [event for event in together if "args" in event and "calls" in event["args"]]
    assert len(drawn) < 30
    assert sum(event["args"]["calls"] for event in drawn) == 100
    assert any(event["name"] == "6 calls" for event in drawn)
    assert len(together) < len(alone)
    for slices in slices_by_row(together).values():
        assert all(ended <= began for (_, ended, _), (began, _, _) in pairwise(slices))


def test_every_member_of_a_gang_is_drawn_on_its_own_row() -> None:
    small = world(source([(0.0, 4), (30.0, 2)], init_blocks=4), model(), delays=replace(NOW, progress_s=Duration(2.5)))
    first, second = Arrival(0.0, "llm", items=60, gang=(4, 4)), Arrival(12.0, "llm", items=80, gang=(2, 2))
    run, _ = simulate(small, [first, second], until_s=200.0)
    rows = slices_by_row(timeline(run.log))
    assert all(ended <= began for slices in rows.values() for (_, ended, _), (began, _, _) in pairwise(slices))
    drawn = sorted((began, ended, name) for slices in rows.values() for began, ended, name in slices if "call" in name)
    first = [name for began, _, name in drawn if began == 10_000_000]
    assert first == ["call 0", "call 0, rank 1", "call 0, rank 2", "call 0, rank 3"]
    # Gang 1 runs fifteen seconds. Gang 2 lost a member at 30 s and continued from its checkpoint at 27.5 s.
    second = [(began / 1e6, ended / 1e6, name) for began, ended, name in drawn if began > 10_000_000]
    assert second[:2] == [(25.0, 30.0, "call 1, checkpointed"), (25.0, 30.0, "call 1, rank 1, checkpointed")]
    assert second[2:] == [(30.0, 67.5, "call 1"), (30.0, 67.5, "call 1, rank 1")]


def test_timeline_is_json_that_perfetto_opens_compressed_or_not(tmp_path: Path) -> None:
    log = small_run()
    curves = make_run_curves(measure_run(log))
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
