"""Loaded contexts that were written as objects: whoever loads the same context elsewhere gets one from a peer.

A context that takes long to load may be kept in a form that loads fast, a *snapshot* (`stoker.contexts.snapshot`). The
first library that makes one, or finds one, offers it; the manager remembers it by recipe and device kind, since the
form depends on the device. A pilot that is told to load the context waits for the snapshot no longer than it took to
make.
"""

from __future__ import annotations

from stoker.manager.core import objects
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Context, Pilot
from stoker.manager.core.peers import Snapshot
from stoker.protocol.to_manager import ObjectArrival, SnapshotHere


def made(manager: Manager, pilot: Pilot, message: SnapshotHere) -> None:
    """A pilot has a snapshot. It stays the one that others get for as long as somebody has it."""
    if message.recipe not in manager.state.contexts:
        manager.state.refuse("snapshot of an unknown context")
        return
    snapshot = Snapshot(message.form, message.object, message.made_s)
    if message.manifest:
        objects.define_manifest(manager, message.object.name, message.manifest)
    objects.arrived(manager, pilot, ObjectArrival(message.object.name, message.object.size_bytes))
    for kind in dict.fromkeys(device.facts.kind for device in pilot.devices.values()):
        known = manager.state.transfers.snapshots.setdefault((message.recipe, kind), {})
        if message.form not in known or not _to_be_had(manager, known[message.form]):
            known[message.form] = snapshot


def offered(manager: Manager, context: Context, kind: str) -> dict[str, Snapshot]:
    """The snapshots of a context that a pilot could get from a peer now, for a device of this kind, by their form."""
    known = manager.state.transfers.snapshots.get((context.recipe.key, kind), {})
    return {form: snapshot for form, snapshot in known.items() if _to_be_had(manager, snapshot)}


def _to_be_had(manager: Manager, snapshot: Snapshot) -> bool:
    object = manager.state.transfers.objects.get(snapshot.object.name)
    return object is not None and bool(object.whole)
