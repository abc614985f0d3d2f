from __future__ import annotations

import os
import time
from pathlib import Path

from fake_manager import FakeManager, recipe

from stoker.config import parse_site
from stoker.contexts.loading import ObjectPath
from stoker.contexts.objects import object_of
from stoker.contexts.recipe import ObjectRef
from stoker.manager.factory.pilot_command import pilot_options
from stoker.pilot.cache import Bringing, ObjectCache
from stoker.pilot.transfer.board import ObjectSource
from stoker.protocol.to_manager import DeviceFault
from stoker.protocol.to_pilot import StopLibrary

SIZE = 60_000


def start(manager: FakeManager, *settings: str) -> None:
    text = "\n".join(["[pilot]", 'devices = "cpu:1"', f'scratch = "{manager.base}/scratch"', *settings])
    manager.start_pilot(*pilot_options(parse_site(text, file="site.toml").pilot))


def probe(folder: Path, text: str) -> Path:
    file = folder / "probe"
    file.write_text(f"#!/bin/sh\necho $1 >> {folder / 'asked'}\n{text}\n")
    file.chmod(0o755)
    return file


def test_free_device_is_probed_at_the_interval_of_the_site(manager: FakeManager, tmp_path: Path) -> None:
    asked, refuses = tmp_path / "asked", tmp_path / "refuses"
    text = f"[ ! -e {refuses} ] || {{ echo $1 is upside down; exit 5; }}"
    start(manager, f'probe = "{probe(tmp_path, text)}"', 'probe_every = "1 s"')
    manager.until(lambda: asked.exists() and len(asked.read_text().split()) >= 3, what="the device is probed again")
    refuses.touch()
    assert "cpu:0 is upside down" in manager.wait_for(DeviceFault).reason


def content(path: str) -> bytes:
    return Path(path).read_bytes()[:3]


def objects(folder: Path, *names: str) -> list[ObjectRef]:
    found = []
    for name in names:
        (folder / name).write_bytes(name.encode() * (SIZE // len(name)))
        found.append(object_of(folder / name, memo=folder / "memo"))
    return found


def kept(manager: FakeManager) -> set[str]:
    return set(ObjectCache(cache_folder(manager), bound_bytes=10**9).sizes())


def cache_folder(manager: FakeManager) -> Path:
    return manager.base / "scratch" / f"stoker-{os.getuid()}" / "cache"


def test_object_cache_never_exceeds_cache_size(manager: FakeManager, tmp_path: Path) -> None:
    first, second = objects(tmp_path, "one", "two")
    start(manager, f'cache_size = "{SIZE * 3 // 2} B"')
    manager.hello()
    for number, ref in enumerate((first, second), start=1):
        manager.ready(recipe(content, ObjectPath(ref.name), objects=(ref,)), library=number)
        assert kept(manager) == {ref.name}, "the object that was used earlier was evicted"
        manager.send(StopLibrary(number, "its turn is over"))
        manager.gone(number)


def test_cached_object_unused_for_cache_age_is_deleted(manager: FakeManager, tmp_path: Path) -> None:
    week, hour = objects(tmp_path, "week", "hour")
    cache = ObjectCache(cache_folder(manager), bound_bytes=10**9)
    for ref, age_s in ((week, 7 * 86400), (hour, 3600)):
        bringing = Bringing(cache, ref)
        bringing.offer([ObjectSource(path=ref.source, origin=True)])
        bringing.run()[0].release()
        used_at = time.time() - age_s
        os.utime(cache.folder / "entries" / ref.name, (used_at, used_at))
    start(manager, 'cache_age = "1 d"')
    manager.hello()
    assert kept(manager) == {hour.name}, "two weeks is the default: the site's day has decided"
