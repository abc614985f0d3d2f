"""`stoker caches`: what pilots keep on this machine for the next session, and removing it.

A session that has ended leaves on the nodes' disks what took long to bring there: objects (models, snapshots) and
environments. All sessions of a user share it, it is bounded, and what nobody has used for long goes by itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

import click
import msgspec

from stoker.errors import ConfigError
from stoker.manager.cli import console
from stoker.manager.cli.prune import size_bytes
from stoker.pilot.agent.scratch import base_folder, sweep
from stoker.pilot.cache import ObjectCache, store
from stoker.pilot.starter.place import Environments
from stoker.site import Site
from stoker.units import show_bytes, show_seconds

_DAY_S = 86400.0
_HOW = "for the next session; old files leave by themselves; to remove all now: stoker caches --clear"


class CacheContents(msgspec.Struct, frozen=True):
    """What pilots keep at one place of this host, and what of it was removed."""

    host: str
    folder: str
    bytes: int
    removed_bytes: int = 0


@click.command(short_help="Show what pilots keep on this machine, or remove it.")
@click.option("--clear", is_flag=True, help="Remove it, except what a pilot uses at the moment.")
@click.option("--scratch", metavar="DIR", default="", help="Look in this folder: [pilot] scratch of the site file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def caches(*, clear: bool, scratch: str, as_json: bool) -> None:
    """Show what pilots keep on this machine for the next session: files that they fetched, environments.

    It is bounded ([pilot] cache_size), and leaves by itself when no program has used it for long (cache_age). For a
    compute node run it there: srun -w n014 stoker caches --clear
    """
    kept = inspect_caches(scratch, clear=clear)
    if as_json:
        console.json(kept)
    else:
        console.lines(render(kept, clear=clear))


def inspect_caches(scratch: str = "", *, clear: bool = False) -> CacheContents:
    """What is there, after what nobody uses was removed if it is to be. Raises StokerError."""
    place = Path(os.path.expandvars(scratch)).expanduser()
    if scratch and not place.is_dir() and not str(place).startswith("$"):
        raise ConfigError(
            f"--scratch: there is no folder {place} on {socket.gethostname()}; name the folder that [pilot] scratch of"
            " the site file names, or leave --scratch out",
            key="scratch",
        )
    base = base_folder(scratch)
    before = size_bytes(base)
    kept_s = 0.0 if clear else float("inf")
    if (base / "cache").is_dir():
        cache = ObjectCache(base / "cache", bound_bytes=0, kept_s=kept_s)
        store.tidy_snapshots(cache)  # what a pilot does first
        if clear:
            sweep(base)
            if not any(base.glob("pilot-*")):  # a library of a pilot that lives may be loading one
                store.sweep_snapshots(cache, kept_s=0.0)
    if (base / "environments").is_dir():
        Environments(base, kept_s=kept_s).expire()
    after = size_bytes(base)
    return CacheContents(socket.gethostname(), str(base), after, before - after)


def render(kept: CacheContents, *, clear: bool) -> list[str]:
    """The lines of `stoker caches`."""
    where = f"{kept.folder} on {kept.host}"
    if clear:
        rest = f"; {show_bytes(kept.bytes)} are in use" if kept.bytes else ""
        return [f"{where}: {show_bytes(kept.removed_bytes)} removed{rest}"]
    return [f"{where}: {show_bytes(kept.bytes)}", *([_HOW] if kept.bytes else [])]


def stays(sites: Iterable[Site]) -> list[str]:
    """What a session of these sites leaves on purpose, for who ends it."""
    ages: dict[str, list[str]] = {}
    for site in sites:
        place = site.pilot.scratch or "their temporary folder"
        ages.setdefault(_age(site.pilot.cache_age_s), []).append(place)
    return [
        f"files that its pilots fetched stay on their nodes ({', '.join(dict.fromkeys(places))}) for the next session, "
        f"and leave when they were not used for {age}; to remove them, run there: stoker caches --clear"
        for age, places in ages.items()
    ]


def _age(seconds: float) -> str:
    return f"{seconds / _DAY_S:.3g} days" if seconds >= 2 * _DAY_S else show_seconds(seconds)
