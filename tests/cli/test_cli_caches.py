from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
from cli.command_line import Stoker

from stoker.contexts.objects import make_object_ref
from stoker.errors import ConfigError
from stoker.manager.cli.sessions import describe_remaining_files
from stoker.pilot.cache import CacheFetch, ObjectCache, Pin, store
from stoker.pilot.transfer.board import ObjectSource
from stoker.site import Duration, Pilot, Site

SIZE = 300_000


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_SCRATCH", str(tmp_path / "scratch"))
    return tmp_path / "scratch" / f"stoker-{os.getuid()}"


def keep(scratch: Path, name: str) -> Pin:
    original = scratch.parent.parent / name
    original.write_bytes(os.urandom(SIZE))
    ref = make_object_ref(original, digest_cache_file=original.with_suffix(".memo"))
    bringing = CacheFetch(ObjectCache(scratch / "cache", capacity_bytes=10**9), ref)
    bringing.set_sources([ObjectSource(path=str(original), origin=True)])
    pin, _ = bringing.run()
    original.unlink()
    return pin


def test_missing_scratch_folder_is_refused_and_not_created(stoker: Stoker, tmp_path: Path):
    ran = stoker("caches", "--scratch", str(tmp_path / "nope"))
    assert isinstance(ran.exception, ConfigError)
    assert "--scratch: there is no folder" in str(ran.exception)
    assert not (tmp_path / "nope").exists()


def test_caches_clear_keeps_only_what_pilots_use(stoker: Stoker, scratch: Path):
    used, unused = keep(scratch, "used"), keep(scratch, "unused")
    unused.release()
    environments = scratch / "environments"
    for name in ("mine", "old"):
        (environments / name).mkdir(parents=True)
        (environments / name / "python").write_bytes(b"x" * SIZE)
        (environments / f"{name}.used").touch()
    with (environments / "mine.used").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert 4 * SIZE <= json.loads(stoker.ok("caches", "--json").output)["bytes"] < 5 * SIZE
        assert Path(unused.path).exists()
        cleared = json.loads(stoker.ok("caches", "--clear", "--json").output)
    assert 2 * SIZE <= cleared["removed_bytes"] < 3 * SIZE
    assert not Path(unused.path).exists()
    assert not (environments / "old").exists()
    assert Path(used.path).stat().st_size == SIZE
    assert (environments / "mine" / "python").stat().st_size == SIZE


def test_model_snapshot_is_counted_once_and_removed_with_its_file(stoker: Stoker, scratch: Path):
    pin = keep(scratch, "snapshot")
    cache = ObjectCache(scratch / "cache", capacity_bytes=10**9)
    snapshot = store.snapshot_folder_beside(cache) / "file-abc-float32-1"
    snapshot.mkdir(parents=True)
    os.link(pin.path, snapshot / "model.safetensors")
    (name,) = cache.object_sizes()
    store.write_snapshot_marker(cache, snapshot, name=name)
    assert SIZE <= json.loads(stoker.ok("caches", "--json").output)["bytes"] < 2 * SIZE
    stoker.ok("caches", "--clear")
    assert snapshot.exists()  # a pilot uses the snapshot
    pin.release()
    assert json.loads(stoker.ok("caches", "--clear", "--json").output)["removed_bytes"] >= SIZE
    assert not snapshot.exists()


def test_down_lists_remaining_caches_with_path_and_lifetime():
    day = Pilot(scratch="/local", cache_age_s=Duration(86400))
    sites = [Site(name="a"), Site(name="b", pilot=day), Site(name="c", pilot=day)]
    first, second = describe_remaining_files(sites)
    assert "stay on their nodes (their temporary folder) for the next session" in first
    assert "after 14 days without use" in first
    assert "(/local)" in second
    assert "after 24 h without use" in second
    assert second.endswith("run on the node: stoker caches --clear")
