"""Settings of a site file take effect in a pilot."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fake_manager import FakeManager, recipe

from stoker.config import parse_site
from stoker.contexts.loading import ObjectPath
from stoker.contexts.objects import make_object_ref
from stoker.contexts.recipe import ObjectRef
from stoker.manager.factory.pilot_command import build_pilot_options
from stoker.pilot.cache import CacheFetch, ObjectCache
from stoker.pilot.transfer.board import ObjectSource
from stoker.protocol.to_manager import DeviceFault
from stoker.protocol.to_pilot import StopLibrary

SIZE = 60_000


def start(manager: FakeManager, *settings: str) -> None:
    text = "\n".join(["[pilot]", 'devices = "cpu:1"', f'scratch = "{manager.base}/scratch"', *settings])
    soon = "from stoker.pilot.core import probes; probes.SECOND_PROBE_S = 0.1"
    manager.start_pilot(*build_pilot_options(parse_site(text, file="site.toml").pilot), settings=soon)
    manager.hello()


def test_free_device_is_probed_at_the_interval_of_the_site(manager: FakeManager, tmp_path: Path) -> None:
    asked, refuses, probe = tmp_path / "asked", tmp_path / "refuses", tmp_path / "probe"
    probe.write_text(f"#!/bin/sh\necho $1 >> {asked}\n[ ! -e {refuses} ] || {{ echo $1 is upside down; exit 5; }}\n")
    probe.chmod(0o755)
    start(manager, f'probe = "{probe}"', 'probe_every = "1 s"')
    manager.until(lambda: len(asked.read_text().split()) >= 2, what="the device is probed again")
    refuses.touch()
    assert "cpu:0 is upside down" in manager.wait_for(DeviceFault).reason


def content(path: str) -> bytes:
    return Path(path).read_bytes()[:3]


def made(folder: Path, name: str) -> ObjectRef:
    (folder / name).write_bytes(name.encode() * (SIZE // len(name)))
    return make_object_ref(folder / name, digest_cache_file=folder / "memo")


def test_object_cache_obeys_cache_size_and_cache_age(manager: FakeManager, tmp_path: Path) -> None:
    week, hour, new = (made(tmp_path, name) for name in ("week", "hour", "new"))
    cache = ObjectCache(manager.base / "scratch" / f"stoker-{os.getuid()}" / "cache", capacity_bytes=10**9)
    for ref, age_s in ((week, 7 * 86400), (hour, 3600)):
        bringing = CacheFetch(cache, ref)
        bringing.set_sources([ObjectSource(path=ref.source, origin=True)])
        bringing.run()[0].release()
        used_at = time.time() - age_s
        os.utime(cache.folder / "entries" / ref.name, (used_at, used_at))
    start(manager, 'cache_age = "1 d"', f'cache_size = "{SIZE * 3 // 2} B"')
    assert set(cache.object_sizes()) == {hour.name}, "two weeks is the default: the site's day has decided"
    manager.ready(recipe(content, ObjectPath(new.name), objects=(new,)))
    assert set(cache.object_sizes()) == {new.name}, "the object that was used earlier was evicted"
    manager.send(StopLibrary(1, "the test is over"))  # type: ignore[arg-type]
    manager.gone()
