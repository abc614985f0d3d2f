from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_manager import FakeManager, recipe
from live.peers import until

from stoker.contexts.loading import ObjectPath
from stoker.contexts.objects import make_object_ref
from stoker.contexts.recipe import Awareness, ObjectRef
from stoker.manager.cli.sessions import clean_node_caches
from stoker.pilot.agent.scratch import Scratch, base_folder
from stoker.pilot.cache import CacheError, CacheFetch, ObjectCache, Pin, disk, store
from stoker.pilot.transfer.board import ObjectSource
from stoker.protocol.calls import FailureKind
from stoker.protocol.to_pilot import StopLibrary


def _file(folder: Path, name: str, size: int) -> ObjectRef:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(os.urandom(size))
    return make_object_ref(path, digest_cache_file=folder / "memo")


def have(cache: ObjectCache, ref: ObjectRef) -> Pin:
    here = cache.find_and_pin(ref.name)
    if here is not None:
        return here
    bringing = CacheFetch(cache, ref)
    bringing.set_sources([ObjectSource(path=ref.source, origin=True)])
    return bringing.run(no_source_limit_s=0.0)[0]


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    return ObjectCache(tmp_path / "cache", capacity_bytes=1000)


def test_cached_files_and_folders_outlive_their_source(cache: ObjectCache, tmp_path: Path) -> None:
    one = _file(tmp_path, "model.gguf", 100)
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "weights").write_bytes(b"w" * 50)
    two = make_object_ref(tmp_path / "folder", digest_cache_file=tmp_path / "memo")
    first, second = have(cache, one), have(cache, two)
    assert Path(first.path).read_bytes() == (tmp_path / "model.gguf").read_bytes()
    assert (Path(second.path) / "deep" / "weights").read_bytes() == b"w" * 50
    assert cache.object_sizes() == {one.name: 100, two.name: 50}
    assert sum(cache.object_sizes().values()) == 150
    (tmp_path / "model.gguf").unlink()
    assert have(cache, one).path == first.path  # the cached object does not need its source


def _settled(folder: Path, name: str, content: bytes) -> ObjectRef:
    path = folder / name
    path.write_bytes(content)
    hour_ago = path.stat().st_mtime - 3600
    os.utime(path, (hour_ago, hour_ago))
    return make_object_ref(path, digest_cache_file=folder / "memo")


def _untouched(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "settled", "is_linked"),
    [(_untouched, True, True), (Path.touch, True, False), (_untouched, False, False)],
)
def test_cache_links_a_file_only_if_it_is_old_and_unchanged(
    cache: ObjectCache, tmp_path: Path, change: Callable[[Path], None], settled: bool, is_linked: bool
) -> None:
    """A write soon after the hash may leave the modification time unchanged, so a link to a young file is unsafe."""
    ref = _settled(tmp_path, "weights", b"w" * 100) if settled else _file(tmp_path, "weights", 100)
    content = (tmp_path / "weights").read_bytes()
    change(tmp_path / "weights")
    pin = have(cache, ref)
    assert os.path.samefile(pin.path, tmp_path / "weights") is is_linked
    assert Path(pin.path).read_bytes() == content


def _rewrite(path: Path) -> None:
    path.write_bytes(b"x" * 100)


def _replace(path: Path) -> None:
    """Unpacked archives and package stores set one modification time for all files."""
    seen = path.stat()
    other = path.with_name("other")
    other.write_bytes(b"x" * 100)
    os.utime(other, ns=(0, seen.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [_rewrite, _replace])
def test_file_changed_after_hashing_is_refused(
    cache: ObjectCache, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    ref = _settled(tmp_path, "weights", b"w" * 100)
    change(tmp_path / "weights")
    with pytest.raises(CacheError, match="has changed since the recipe was made"):
        have(cache, ref)
    again = _settled(tmp_path, "copy", b"w" * 100)
    assert again.name == ref.name
    assert Path(have(cache, again).path).read_bytes() == b"w" * 100


def test_file_written_through_an_earlier_map_is_detected(cache: ObjectCache, tmp_path: Path) -> None:
    if subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout == "tmpfs\n":
        pytest.skip("tmpfs keeps no time of writes through a map")
    path = tmp_path / "weights"
    path.write_bytes(b"w" * 100)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 100) as mapped:
        mapped[0:1] = b"v"
        hour_ago = time.time() - 3600
        os.utime(path, (hour_ago, hour_ago))
        ref = make_object_ref(path, digest_cache_file=tmp_path / "memo")
        assert ref.changed_ns
        mapped[0:1] = b"u"
        with pytest.raises(CacheError, match="has changed since the recipe was made"):
            have(cache, ref)


def test_file_rewritten_while_it_is_cached_is_rejected(cache: ObjectCache, tmp_path: Path) -> None:
    ref = _settled(tmp_path, "weights", b"w" * 100)
    with cache.claim_draft(ref) as draft:
        look = disk.link_if_unchanged(tmp_path / "weights", draft, ref)
        assert look
        (tmp_path / "weights").write_bytes(b"x" * 100)
        with pytest.raises(store.ChangedError):
            cache.publish_draft(ref, draft, signature=look)
    assert cache.find_and_pin(ref.name) is None


def test_linked_file_rewritten_later_is_not_used_again(cache: ObjectCache, tmp_path: Path) -> None:
    ref = _settled(tmp_path, "weights", b"w" * 100)
    have(cache, ref).release()
    (tmp_path / "weights").write_bytes(b"x" * 100)
    assert cache.find_and_pin(ref.name) is None


@pytest.mark.parametrize("part", ["", "objects", "entries"])
def test_cache_that_is_removed_while_a_pilot_runs_is_made_again(part: str, cache: ObjectCache, tmp_path: Path) -> None:
    first, second = (_file(tmp_path, name, 100) for name in ("first", "second"))
    have(cache, first).release()
    until(lambda: list((cache.folder / "safe").iterdir()))  # the background writer has finished
    shutil.rmtree(cache.folder / part)
    assert [Path(have(cache, ref).path).stat().st_size for ref in (first, second)] == [100, 100]


def test_least_recently_used_unpinned_object_is_evicted(cache: ObjectCache, tmp_path: Path) -> None:
    refs = [_file(tmp_path, f"f{n}", 300) for n in range(4)]
    pins = [have(cache, ref) for ref in refs[:3]]
    for pin in pins[1:]:
        pin.release()
    os.utime(cache.folder / "entries" / refs[1].name, (2, 2))
    os.utime(cache.folder / "entries" / refs[2].name, (1, 1))
    have(cache, refs[3])
    assert sorted(cache.object_sizes()) == sorted([refs[0].name, refs[1].name, refs[3].name])
    assert Path(pins[0].path).exists()


def test_copy_not_synced_before_a_crash_is_fetched_again(
    cache: ObjectCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, linked = _file(tmp_path, "fresh", 100), _settled(tmp_path, "old", b"w" * 200)
    have(cache, copied).release()
    have(cache, linked).release()
    (mark,) = until(lambda: list((cache.folder / "safe").iterdir()))
    monkeypatch.setattr(disk, "boot_id", lambda: "the next one")
    assert cache.find_and_pin(copied.name) is not None, "the object was on the disk"
    mark.unlink()
    assert cache.find_and_pin(copied.name) is None
    assert set(cache.object_sizes()) == {linked.name}
    assert cache.find_and_pin(linked.name) is not None, "the content was cached before"
    have(cache, copied).release()
    assert set(cache.object_sizes()) == {copied.name, linked.name}


def test_object_that_cannot_fit_evicts_nothing(cache: ObjectCache, tmp_path: Path) -> None:
    small = have(cache, _file(tmp_path, "small", 600))
    with pytest.raises(CacheError, match="larger than the whole cache"):
        have(cache, _file(tmp_path, "huge", 2000))
    with pytest.raises(CacheError, match="running libraries use"):
        have(cache, _file(tmp_path, "medium", 600))
    assert Path(small.path).exists()
    small.release()
    small.release()
    have(cache, _file(tmp_path, "other", 600))
    assert not Path(small.path).exists()


HOLDS_A_PIN = """
import sys, time
from pathlib import Path
from stoker.pilot.cache import ObjectCache
pin = ObjectCache(Path(sys.argv[1]), capacity_bytes=1000).find_and_pin(sys.argv[2])
print("here", flush=True)
time.sleep(60)
"""


def test_pin_ends_with_its_process(cache: ObjectCache, tmp_path: Path) -> None:
    ref = _file(tmp_path, "one", 800)
    have(cache, ref).release()
    command = [sys.executable, "-c", HOLDS_A_PIN, str(cache.folder), ref.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(CacheError, match="running libraries use"):
            have(cache, _file(tmp_path, "two", 800))
        other.kill()
    have(cache, _file(tmp_path, "two", 800))


def test_damaged_object_is_noticed_and_fetched_again(cache: ObjectCache, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "weights").write_bytes(b"w" * 50)
    ref = make_object_ref(tmp_path / "folder", digest_cache_file=tmp_path / "memo")
    pin = have(cache, ref)
    pin.release()
    damaged = Path(pin.path) / "weights"
    os.utime(damaged, (5, 5))
    damaged.write_bytes(b"broken")
    pin = have(cache, ref)
    assert (Path(pin.path) / "weights").read_bytes() == b"w" * 50
    pin.release()
    (cache.folder / "entries" / ref.name).write_bytes(b"{")
    have(cache, ref).release()
    assert (Path(pin.path) / "weights").read_bytes() == b"w" * 50
    damaged.unlink()
    (tmp_path / "folder" / "weights").write_bytes(b"n" * 50)
    with pytest.raises(CacheError, match="has changed since the recipe was made"):
        have(cache, ref)
    assert cache.object_sizes() == {}
    assert not list((cache.folder / "drafts").iterdir())


def test_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    ObjectCache(tmp_path / "cache", capacity_bytes=1000)
    (tmp_path / "cache" / "drafts" / "half").write_bytes(b"x")
    (tmp_path / "cache" / "drafts" / "half.lock").write_bytes(b"")
    (tmp_path / "cache" / "objects" / "no-entry").write_bytes(b"x")
    (tmp_path / "cache" / "manifests" / "no-entry").write_bytes(b"x")
    ObjectCache(tmp_path / "cache", capacity_bytes=1000)
    assert (tmp_path / "cache" / "drafts" / "half").exists()  # a later fetch may continue with this draft
    assert not list((tmp_path / "cache" / "objects").iterdir())
    assert not list((tmp_path / "cache" / "manifests").iterdir())
    os.utime(tmp_path / "cache" / "drafts" / "half.lock", (0, 0))
    ObjectCache(tmp_path / "cache", capacity_bytes=1000)
    assert not list((tmp_path / "cache" / "drafts").iterdir())


def test_object_fetched_by_another_pilot_is_awaited(cache: ObjectCache, tmp_path: Path) -> None:
    one, two = _file(tmp_path, "one", 600), _file(tmp_path, "two", 600)
    with ThreadPoolExecutor() as pool:
        with cache.claim_draft(one) as draft:
            draft.write_bytes(Path(one.source).read_bytes())
            with pytest.raises(CacheError, match="does not fit"):
                have(cache, two)
            other = pool.submit(have, ObjectCache(tmp_path / "cache", capacity_bytes=1000), one)
            cache.publish_draft(one, draft).release()
        other.result().release()
    assert not list((tmp_path / "cache" / "drafts").iterdir())
    have(cache, two)


def test_stalled_fetch_of_another_pilot_is_not_awaited(
    cache: ObjectCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = _file(tmp_path, "one", 300)
    monkeypatch.setattr(disk, "NO_PROGRESS_LIMIT_S", 0.3)
    with cache.claim_draft(one) as draft:
        draft.write_bytes(b"half")
        have(ObjectCache(tmp_path / "cache", capacity_bytes=1000), one).release()
        assert cache.object_sizes() == {one.name: 300}
        draft.write_bytes(Path(one.source).read_bytes())
        cache.publish_draft(one, draft).release()  # the abandoned fetch may complete later
    assert not list((tmp_path / "cache" / "drafts").iterdir())


def test_incomplete_object_is_removed_if_its_space_is_needed(cache: ObjectCache, tmp_path: Path) -> None:
    one, two = _file(tmp_path, "one", 600), _file(tmp_path, "two", 900)
    with cache.claim_draft(one) as draft:
        draft.write_bytes(b"half")
    assert draft.exists()
    have(cache, _file(tmp_path, "three", 300)).release()
    assert draft.exists()
    have(cache, two)
    assert not draft.exists()


def _read(path: str) -> tuple[str, str]:
    return path, Path(path).read_text()


def test_context_receives_the_paths_of_its_objects(served: FakeManager, tmp_path: Path) -> None:
    cached = served.until(lambda: served.heartbeats)[-1].cache_bytes
    for library, awareness in enumerate(Awareness, start=1):
        text = f"weights of {awareness}"
        (tmp_path / awareness.value).write_text(text)
        ref = make_object_ref(tmp_path / awareness.value, digest_cache_file=tmp_path / "memo")
        made = recipe(_read, ObjectPath(ref.name), objects=(ref,), awareness=awareness)
        ready = served.ready(made, library=library)
        ((path, read),) = served.results(served.run(lambda context: context, [()], library=library, takes_context=True))
        served.send(StopLibrary(library=library, reason="the next needs its device"))  # type: ignore[arg-type]
        served.gone(library)
        assert read == text
        if awareness is Awareness.NONE:
            assert path == ref.source
        else:
            cached += len(text)
            assert path.startswith(str(served.base / "scratch"))
            assert ready.fetch_s > 0
        served.until(lambda: served.heartbeats and served.heartbeats[-1].cache_bytes == cached)  # noqa: B023


@pytest.mark.parametrize("awareness", [Awareness.NONE, Awareness.FULL])
def test_file_rewritten_after_its_recipe_was_made_fails_the_load(
    served: FakeManager, tmp_path: Path, awareness: Awareness
) -> None:
    ref = _settled(tmp_path, "weights", b"first")
    (tmp_path / "weights").write_bytes(b"other")
    served.start(recipe(_read, ObjectPath(ref.name), objects=(ref,), awareness=awareness))
    left = served.gone()
    assert left.loading
    assert left.failure.kind is FailureKind.CONTEXT
    assert str(tmp_path / "weights") in left.failure.message
    assert "make the recipe again" in left.failure.message


def test_pilots_detect_that_they_share_one_cache(cache: ObjectCache, tmp_path: Path) -> None:
    assert ObjectCache(cache.folder, capacity_bytes=1000).identity == cache.identity
    assert ObjectCache(tmp_path / "elsewhere", capacity_bytes=1000).identity != cache.identity


# ---- snapshots of models

FORM = "file-0123456789abcdef-float32-1"


@pytest.fixture
def node_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectCache:
    monkeypatch.setenv("STOKER_SCRATCH", str(tmp_path))
    return ObjectCache(base_folder() / "cache", capacity_bytes=1_000_000)


def snapshot(cache: ObjectCache, name: str, *, age_s: float = 0.0) -> Path:
    place = store.snapshot_folder_beside(cache) / name
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(bytes(1000))
    os.utime(place, (time.time() - age_s,) * 2)
    return place


def test_old_snapshots_without_an_object_are_removed(node_cache: ObjectCache) -> None:
    old = [snapshot(node_cache, name, age_s=100) for name in (FORM, f".{FORM}.4711", f"{FORM}.damaged-12")]
    young = snapshot(node_cache, f"{FORM}0")
    store.remove_stale_snapshots(node_cache, max_unused_s=50)
    assert [place.exists() for place in old] == [False] * 3
    assert young.exists()


def test_snapshots_in_the_cache_or_being_written_are_not_removed(node_cache: ObjectCache) -> None:
    kept, draft = snapshot(node_cache, f"{FORM}1", age_s=100), snapshot(node_cache, f".{FORM}.4711", age_s=100)
    store.write_snapshot_marker(node_cache, kept, name="folder-abc")
    with (draft.parent / f"{FORM}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store.remove_stale_snapshots(node_cache, max_unused_s=0)
        assert kept.exists()
        assert draft.exists()
    store.remove_stale_snapshots(node_cache, max_unused_s=0)
    assert kept.exists()
    assert not draft.exists()


def test_caches_clear_removes_snapshots_unless_a_pilot_runs(node_cache: ObjectCache) -> None:
    place = snapshot(node_cache, FORM)
    pilot = Scratch(base_folder(), pilot="n1-ab12")
    clean_node_caches(clear=True)
    assert place.exists()
    pilot.remove()
    clean_node_caches()
    assert place.exists(), "only --clear removes what is not old"
    clean_node_caches(clear=True)
    assert not place.exists()
