"""Contexts in a form that loads fast: offered to other pilots, and had from them.

A library says that its context lies in a folder as a snapshot (`SnapshotMade`). The folder comes into the object cache
by links, which costs no room, and the manager hears of it; from then on it is an object like any other. A pilot that
is told of snapshots with a library's order brings those that it has not, but starts the library without them when they
take longer than making one would.

The folder is on this host's disk, beside the cache (`snapshot_names`), also where all hosts share a home: else every
pilot would find the first one's there, and the file system would serve a model to each of them.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from stoker.contexts.objects import copy_object, manifest_of, object_of
from stoker.contexts.recipe import ObjectRef
from stoker.contexts.state import snapshot_folder
from stoker.errors import StokerError
from stoker.manager.protocol.ids import RecipeKey
from stoker.manager.protocol.to_agent import SnapshotMade
from stoker.manager.protocol.to_manager import SnapshotHere
from stoker.manager.protocol.to_pilot import StartLibrary
from stoker.pilot.agent import objects
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.library import Library
from stoker.pilot.cache import ObjectCache, Pin, disk, snapshot_names

log = logging.getLogger("stoker.pilot")


def offered(agent: Agent, library: Library, message: SnapshotMade) -> None:
    """A library has, or has made, a snapshot: make an object of it, in a thread, and tell the manager if other pilots
    reach this one. Once a form."""
    if message.form in agent.snapshots:
        return
    agent.snapshots.add(message.form)
    recipe = RecipeKey(library.state.recipe.key)

    def run() -> None:
        try:
            ref = object_of(message.folder)
            manifest = manifest_of(ref)
            _take_in(agent.cache, ref, manifest)
            snapshot_names.note(agent.cache, Path(message.folder), name=ref.name)
        except (StokerError, OSError) as error:
            log.warning("the snapshot %s is not offered to other pilots: %s", message.folder, error)
            return
        here = SnapshotHere(recipe, message.form, ref, manifest, message.made_s)
        if agent.objects.peer:
            agent.later(lambda: _tell(agent, here))

    threading.Thread(target=run, name="snapshot-offer", daemon=True).start()


def _tell(agent: Agent, here: SnapshotHere) -> None:
    agent.objects.told.add(here.object.name)
    agent.told_snapshots.append(here)
    agent.link.post(here)


def _take_in(cache: ObjectCache, ref: ObjectRef, manifest: bytes) -> None:
    """Have a folder in the cache: its files by second names, or copied where the cache is on another disk."""
    here = cache.find(ref.name)
    if here is None:
        with cache.claim(ref) as draft:
            cache.make_room(ref)
            disk.delete(draft)
            try:
                shutil.copytree(ref.source, draft, copy_function=os.link)
            except OSError:
                disk.delete(draft)
                copy_object(ref.source, draft)
            here = cache.enter(ref, draft, manifest=manifest)
    here.release()


def bring(agent: Agent, order: StartLibrary, done: Callable[[dict[str, Pin]], None]) -> None:
    """Have the snapshots here that this pilot was told of and lacks; `done` gets them by form, in the loop, once: when
    they are here, can't be had, or are not worth to wait for any longer."""
    refs = {form: ref for form, ref in order.snapshots.items() if not _is_here(form)}
    if not refs or order.snapshot_wait_s <= 0:
        done({})
        return
    waiting = [done]

    def finish(pins: dict[str, Pin], lack: objects.Lack | None) -> None:
        if waiting:
            if lack is not None:
                log.info("lib-%d loads without a snapshot: %s", order.library, lack.reason)
            waiting.pop()({form: pins[ref.name] for form, ref in refs.items() if ref.name in pins})
        else:
            for pin in pins.values():
                pin.release()

    def late() -> None:
        if waiting:
            finish({}, objects.Lack(f"none came within {order.snapshot_wait_s:.1f} s"))

    objects.bring(agent, tuple(refs.values()), finish)
    timer = threading.Timer(order.snapshot_wait_s, agent.later, (late,))
    timer.daemon = True
    timer.start()


def _is_here(form: str) -> bool:
    """Whether the library will find a snapshot of this form by itself. A form is one name: it leads nowhere else."""
    return form != os.path.basename(form) or (snapshot_folder() / form).is_dir()
