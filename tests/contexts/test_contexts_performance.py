from __future__ import annotations

import logging
import sqlite3
import statistics
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.contexts import performance
from stoker.contexts.performance import (
    AvailabilityStore,
    BlockWait,
    DeviceSet,
    PerformanceStore,
    PilotCount,
    PilotLifetime,
)

positive = st.floats(0, 1e6, allow_nan=False)


def test_load_times_are_remembered(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "performance.sqlite"
    store = PerformanceStore(path)
    assert store.estimates("r") == {}
    store.record_load("r", kind="cpu", load_s=10, start_s=1, resident_bytes=5, peak_bytes=9)
    store.record_load("r", kind="cpu", load_s=14, start_s=3, resident_bytes=7, peak_bytes=8, slots=6)
    store.record_load("r", kind="a10", load_s=2, device_bytes=100)
    store.record_load("other", kind="cpu", load_s=99)
    store.close()
    again = PerformanceStore(path)
    found = again.estimates("r")
    again.close()
    assert set(found) == {"cpu", "a10"}
    cpu = found["cpu"]
    assert (cpu.load_s, cpu.loads, cpu.start_s, cpu.resident_bytes, cpu.peak_bytes) == (12, 2, 2, 7, 9)
    assert cpu.load_sd == pytest.approx(statistics.stdev([10, 14]))
    assert cpu.slots == 6
    assert (found["a10"].device_bytes, found["a10"].resident_bytes, found["a10"].load_sd) == (100, 0, 0)


@given(st.dictionaries(st.sampled_from(["f", "g", "h"]), st.lists(positive, min_size=1, max_size=8), min_size=1))
def test_run_times_are_accumulated(tmp_path_factory: pytest.TempPathFactory, runs: dict[str, list[float]]) -> None:
    store = PerformanceStore(tmp_path_factory.mktemp("p") / "performance.sqlite")
    for function, times in runs.items():
        store.record_runs("r", kind="cpu", function=function, run_s=times[: len(times) // 2])
        store.record_runs("r", kind="cpu", function=function, run_s=times[len(times) // 2 :])
    found = store.estimates("r")["cpu"]
    store.close()
    everything = [time for times in runs.values() for time in times]
    assert found.runs == len(everything)
    assert found.run_s == pytest.approx(statistics.fmean(everything), rel=1e-6, abs=1e-6)
    for function, times in runs.items():
        one = found.functions[function]
        assert (one.count, one.most) == (len(times), max(times))
        assert one.mean == pytest.approx(statistics.fmean(times), rel=1e-6, abs=1e-6)
        assert one.sd == pytest.approx(statistics.stdev(times) if len(times) > 1 else 0, rel=1e-4, abs=1e-4)


def test_items_packed_into_calls_are_counted(tmp_path: Path) -> None:
    store = PerformanceStore(tmp_path / "p.sqlite")
    assert store.items_per_call("f") == 1
    store.record_runs("r", kind="cpu", function="f", run_s=[1.0] * 3, calls=10, items=16)
    assert (store.items_per_call("f"), store.items_per_call("g")) == (16, 1)
    store.record_runs("s", kind="cpu", function="f", run_s=[1.0] * 2)
    assert store.items_per_call("f") == 10, "three records of 16 and two of 1"


def test_invalid_measurements_are_not_stored(tmp_path: Path) -> None:
    store = PerformanceStore(tmp_path / "p.sqlite")
    store.record_load("r", kind="cpu", load_s=float("nan"))
    store.record_runs("r", kind="cpu", function="f", run_s=[float("inf"), -1.0])
    assert store.estimates("r") == {}
    store.close()


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    program = """
import sys
from pathlib import Path
from stoker.contexts.performance import PerformanceStore
store = PerformanceStore(Path(sys.argv[1]))
for n in range(20):
    store.record_load("r", kind="cpu", load_s=n)
"""
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path)]) for _ in range(3)]
    for writer in writers:
        assert writer.wait(60) == 0
    store = PerformanceStore(path)
    found = store.estimates("r")["cpu"]
    store.close()
    assert found.loads == 60
    assert found.load_s == pytest.approx(9.5)


def test_unusable_performance_file_is_reported_without_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "p.sqlite"
    path.write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    for place, said, loads in ((path, "damaged", 1), (path / "p.sqlite", "are not stored", 0)):
        with caplog.at_level(logging.WARNING):
            store = PerformanceStore(place)
        assert said in caplog.text
        store.record_load("r", kind="cpu", load_s=1)
        assert [found.loads for found in store.estimates("r").values()] == [1] * loads
        store.close()
    assert [aside.read_bytes()[:5] for aside in tmp_path.glob("p.sqlite.damaged-*")] == [b"not a"]


def test_file_damaged_while_open_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "p.sqlite"
    store = PerformanceStore(path)
    store.record_load("r", kind="cpu", load_s=1)
    store.close()
    store = PerformanceStore(path)
    for part in tmp_path.glob("p.sqlite*"):
        part.write_bytes(b"\0garbage\0" * 4096)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            store.record_load("r", kind="cpu", load_s=1)
            store.estimates("r")
    store.close()
    again = PerformanceStore(path)
    again.record_load("s", kind="cpu", load_s=1)
    assert again.estimates("s")["cpu"].loads == 1
    again.close()


A10 = DeviceSet("NVIDIA A10", 2, 24_000_000_000)


def test_pilot_availability_is_stored_per_source(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "availability.sqlite"
    store = AvailabilityStore(path)
    assert store.availability_of_source("backfill") == performance.Availability("backfill")
    store.record_pilot_wait("backfill", wait_s=60.0, boot_s=-0.001, devices=A10)
    store.record_session_pilot_count("backfill", session="k3v9", pilots=1)
    store.record_session_pilot_count("backfill", session="k3v9", pilots=3)
    store.record_pilot_stay("backfill", stay_s=900.0, ended="lost")
    store.record_pilot_wait("other", wait_s=1.0, boot_s=2.0, devices=A10)
    store.close()
    again = AvailabilityStore(path)
    found = again.availability_of_source("backfill")
    again.close()
    assert found.waits == (BlockWait(60.0, 0.0, A10),)
    assert found.stays == (PilotLifetime(900.0, "lost"),)
    assert [(each.session, each.pilots) for each in found.counts] == [("k3v9", 1), ("k3v9", 3)]
    assert all(isinstance(each, PilotCount) and each.at > 1e9 for each in found.counts)
    assert found.max_pilots == 3


def test_oldest_rows_of_a_source_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(performance._MAX_ROWS, "stays", 50)
    path = tmp_path / "a.sqlite"
    store = AvailabilityStore(path)
    store.record_pilot_stay("small", stay_s=1.0, ended="lost")
    for number in range(500):
        store.record_pilot_stay("backfill", stay_s=float(number), ended="let go")
        store.record_session_pilot_count("backfill", session="s", pilots=number)
    kept = store.availability_of_source("backfill").stays
    assert 50 <= len(kept) <= 150
    assert kept[-1].stay_s == 499.0
    assert len(store.availability_of_source("small").stays) == 1
    store.close()


def test_file_with_another_schema_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE stays (id INTEGER)")
    store = AvailabilityStore(path)
    store.record_pilot_stay("backfill", stay_s=1.0, ended="lost")
    assert len(store.availability_of_source("backfill").stays) == 1
    store.close()
    assert list(tmp_path.glob("a.sqlite.damaged-*"))
