"""Contexts in a form that loads fast: offered to other pilots, and had from them.

A library says that its context lies in a folder as a snapshot (`SnapshotMade`). The folder comes into the object cache
by links, which costs no room, and the manager hears of it; from then on it is an object like any other. (The
order to start a library names snapshots; `core.starting` has the missing ones brought.)

The folder is on this host's disk, beside the cache (`snapshot_names`), also where all hosts share a home: else every
pilot would find the first one's there, and the file system would serve a model to each of them.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path

from stoker.contexts.folders import snapshot_folder
from stoker.contexts.objects import copy_object, manifest_of, object_of
from stoker.contexts.recipe import ObjectRef
from stoker.errors import StokerError
from stoker.pilot.agent.agent import Agent
from stoker.pilot.cache import ObjectCache, disk, snapshot_names
from stoker.pilot.core.events import SnapshotTaken
from stoker.protocol.ids import RecipeKey
from stoker.protocol.to_agent import SnapshotMade
from stoker.protocol.to_manager import SnapshotHere

log = logging.getLogger("stoker.pilot")


def offer(agent: Agent, recipe: RecipeKey, made: SnapshotMade) -> None:
    """A library has, or has made, a snapshot: make an object of it, in a thread, and tell the core if other pilots
    reach this one."""

    def run() -> None:
        try:
            ref = object_of(made.folder)
            manifest = manifest_of(ref)
            _take_in(agent.cache, ref, manifest)
            snapshot_names.note(agent.cache, Path(made.folder), name=ref.name)
        except (StokerError, OSError) as error:
            log.warning("the snapshot %s is not offered to other pilots: %s", made.folder, error)
            return
        here = SnapshotHere(recipe, made.form, ref, manifest, made.made_s)
        if agent.peers.address:
            agent.later(lambda: agent.handle(SnapshotTaken(here)))

    threading.Thread(target=run, name="snapshot-offer", daemon=True).start()


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


def is_here(form: str) -> bool:
    """Whether the library will find a snapshot of this form by itself. A form is one name: it leads nowhere else."""
    return form != os.path.basename(form) or (snapshot_folder() / form).is_dir()
