"""What sources of pilots have given is kept across processes, bounded."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from stoker.contexts import performance
from stoker.contexts.performance import AvailabilityStore, DeviceSet, PilotCount, Stay, Wait

A10 = DeviceSet("NVIDIA A10", 2, 24_000_000_000)


def test_a_source_is_remembered_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "availability.sqlite"
    store = AvailabilityStore(path)
    assert store.of("backfill") == performance.Availability("backfill")
    store.record_wait("backfill", wait_s=60.0, boot_s=-0.001, devices=A10)
    store.record_count("backfill", session="k3v9", pilots=1)
    store.record_count("backfill", session="k3v9", pilots=3)
    store.record_stay("backfill", stay_s=900.0, ended="lost")
    store.record_wait("other", wait_s=1.0, boot_s=2.0, devices=A10)
    store.close()
    again = AvailabilityStore(path)
    found = again.of("backfill")
    again.close()
    assert found.waits == (Wait(60.0, 0.0, A10),)
    assert found.stays == (Stay(900.0, "lost"),)
    assert [(each.session, each.pilots) for each in found.counts] == [("k3v9", 1), ("k3v9", 3)]
    assert all(isinstance(each, PilotCount) and each.at > 1e9 for each in found.counts)
    assert found.most == 3


def test_the_oldest_rows_of_a_source_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performance, "STAYS", 50)
    path = tmp_path / "a.sqlite"
    store = AvailabilityStore(path)
    store.record_stay("small", stay_s=1.0, ended="lost")
    for number in range(500):
        store.record_stay("backfill", stay_s=float(number), ended="let go")
        store.record_count("backfill", session="s", pilots=number)
    kept = store.of("backfill").stays
    assert 50 <= len(kept) <= 150
    assert kept[-1].stay_s == 499.0
    assert len(store.of("small").stays) == 1
    store.close()


def test_a_file_of_another_shape_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE stays (source TEXT, id INTEGER)")
    db.close()
    store = AvailabilityStore(path)
    store.record_stay("backfill", stay_s=1.0, ended="lost")
    assert len(store.of("backfill").stays) == 1
    store.close()
    assert list(tmp_path.glob("a.sqlite.damaged-*"))
