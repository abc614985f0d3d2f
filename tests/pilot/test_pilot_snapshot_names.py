from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from stoker.manager.cli.sessions import clean_node_caches
from stoker.pilot.agent.scratch import Scratch, base_folder
from stoker.pilot.cache import ObjectCache, store

FORM = "file-0123456789abcdef-float32-1"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectCache:
    monkeypatch.setenv("STOKER_SCRATCH", str(tmp_path))
    return ObjectCache(base_folder() / "cache", bound_bytes=1_000_000)


def snapshot(cache: ObjectCache, name: str, *, age_s: float = 0.0) -> Path:
    place = store.snapshot_folder_beside(cache) / name
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(bytes(1000))
    os.utime(place, (time.time() - age_s,) * 2)
    return place


def test_old_snapshots_without_an_object_are_removed(cache: ObjectCache) -> None:
    old = [snapshot(cache, name, age_s=100) for name in (FORM, f".{FORM}.4711", f"{FORM}.damaged-12")]
    young = snapshot(cache, f"{FORM}0")
    store.remove_stale_snapshots(cache, kept_s=50)
    assert [place.exists() for place in old] == [False] * 3
    assert young.exists()


def test_cached_objects_and_files_being_written_are_kept(cache: ObjectCache) -> None:
    kept, draft = snapshot(cache, f"{FORM}1", age_s=100), snapshot(cache, f".{FORM}.4711", age_s=100)
    store.write_snapshot_marker(cache, kept, name="folder-abc")
    with (draft.parent / f"{FORM}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store.remove_stale_snapshots(cache, kept_s=0)
        assert kept.exists()
        assert draft.exists()
    store.remove_stale_snapshots(cache, kept_s=0)
    assert kept.exists()
    assert not draft.exists()


def test_caches_clear_removes_names_unless_a_pilot_lives(cache: ObjectCache) -> None:
    place = snapshot(cache, FORM)
    pilot = Scratch(base_folder(), pilot="n1-ab12")
    clean_node_caches(clear=True)
    assert place.exists()
    pilot.remove()
    clean_node_caches()
    assert place.exists(), "only --clear removes what is not old"
    clean_node_caches(clear=True)
    assert not place.exists()
