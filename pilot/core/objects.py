"""Requests objects that the pilot lacks, and chooses cached objects to evict.

The pilot requests a missing object (`WantObjects`), and the manager names the sources (`FetchObject`). The pilot
reports each object that enters or leaves the cache, and each source that fails.
"""

from __future__ import annotations

import enum
import string
from collections.abc import Iterable, Mapping

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.pilot.core.commands import AnnounceFetch, RemoveEvictedSnapshots, StartFetch, StopFetch
from stoker.pilot.core.events import ObjectArrived
from stoker.pilot.core.state import CoreState, PilotLibrary, WantedObject
from stoker.protocol.ids import PilotId
from stoker.protocol.to_manager import FetchFailed, ObjectArrival, ObjectsCached, ObjectsGone, WantObjects
from stoker.protocol.to_pilot import FetchObject


# ---- objects that are missing
def request_objects(state: CoreState, library: PilotLibrary, refs: Iterable[ObjectRef]) -> None:
    unasked = []
    for ref in refs:
        found = state.wants.get(ref.name)
        if found is None:
            found = _add_wanted_object(state, ref)
            unasked.append(ref)
        elif not found.is_begun:
            sourceless = found.order is not None and not (found.order.origin or found.order.peers)
            if sourceless or ref.name in state.reported_objects:  # no source, or the manager lists the object as cached
                unasked.append(ref)
            _begin_fetch(state, found)
        found.libraries[library.number] = None
    if unasked:
        state.tell_manager(WantObjects(tuple(unasked)))


def record_planned_fetches(state: CoreState, library: PilotLibrary) -> None:
    """Record the library's objects whose sources the manager will name. No fetch starts until the pilot has searched
    its cache.
    """
    for ref in library.recipe.objects:
        if ref.name in library.ordered.planned:
            state.wants.setdefault(ref.name, WantedObject(ref, is_begun=False)).libraries[library.number] = None


def report_cached_objects(state: CoreState, names: Iterable[str]) -> None:
    """Tell the manager which objects with a planned fetch are already in the cache."""
    for name in names:
        found = state.wants.get(name)
        if found is not None and not found.is_begun:
            del state.wants[name]
            state.reported_objects.add(name)
            state.tell_manager(ObjectsCached((ObjectArrival(name, found.ref.size_bytes),)))


def request_objects_again(state: CoreState) -> None:
    if state.wants:
        state.tell_manager(WantObjects(tuple(each.ref for each in state.wants.values())))


def apply_sources(state: CoreState, order: FetchObject) -> WantedObject | None:
    """Fetch an object from the sources in `order`. If the order names no source, return the wanted object."""
    name = order.object.name
    found = state.wants.get(name)
    if found is None and order.keep and name not in state.reported_objects:
        found = _add_wanted_object(state, order.object)
    if found is None:  # the object has arrived, or no library waits for the object
        if name in state.reported_objects:
            state.tell_manager(ObjectsCached((ObjectArrival(name, order.object.size_bytes),)))
        else:
            state.tell_manager(ObjectsGone((name,)))
        return None
    found.order = order
    if found.is_begun and not (order.origin or order.peers):
        return found
    if found.is_begun:
        state.commands.append(StartFetch(order))
    return None


def report_arrival(state: CoreState, event: ObjectArrived) -> WantedObject | None:
    """Tell the manager that an object has arrived. Return its record if libraries waited for the object."""
    found = state.wants.pop(event.name, None)
    state.reported_objects.add(event.name)
    took_s = round(event.seconds, 3)
    arrival = ObjectArrival(event.name, event.size_bytes, event.origin_bytes, event.peer_bytes, took_s)
    state.tell_manager(ObjectsCached((arrival,)))
    return found


def report_failed_source(state: CoreState, name: str, reason: str, peer: PilotId) -> None:
    found = state.wants.get(name)
    if found is None:
        return
    if not peer:
        found.trouble = reason
    state.tell_manager(FetchFailed(name=name, peers=(peer,) if peer else (), origin=not peer, reason=reason))


def abandon_object_fetch(state: CoreState, name: str) -> WantedObject | None:
    """Stop the fetch of an object. Return its record if libraries waited for the object."""
    found = state.wants.pop(name, None)
    if found is not None:
        state.commands.append(StopFetch(name))
        state.tell_manager(ObjectsGone((name,)))
    return found


def remove_library_from_wants(state: CoreState, library: PilotLibrary) -> None:
    """Remove a library from all wanted objects. Fetches that have started continue."""
    for name, found in list(state.wants.items()):
        found.libraries.pop(library.number, None)
        if not found.is_begun and not found.libraries:
            del state.wants[name]
            state.tell_manager(ObjectsGone((name,)))
    library.missing_objects.clear()


def report_cache_changes(state: CoreState, sizes: Mapping[str, int]) -> None:
    """Report objects that other pilots added to the cache or evicted."""
    gone = state.reported_objects - sizes.keys() - state.wants.keys()  # the manager knows wanted objects are missing
    fresh = sizes.keys() - state.reported_objects - state.wants.keys()
    if gone:
        state.commands.append(RemoveEvictedSnapshots())
        state.tell_manager(ObjectsGone(tuple(sorted(gone))))
    if fresh:
        state.tell_manager(ObjectsCached(tuple(ObjectArrival(name, sizes[name]) for name in sorted(fresh))))
    state.reported_objects = (state.reported_objects - gone) | fresh


def _begin_fetch(state: CoreState, found: WantedObject) -> None:
    found.is_begun = True
    state.reported_objects.discard(found.ref.name)  # the cached copy is damaged or missing
    state.commands.append(AnnounceFetch(found.ref.name))
    if found.order is not None and (found.order.origin or found.order.peers):
        state.commands.append(StartFetch(found.order))


def _add_wanted_object(state: CoreState, ref: ObjectRef) -> WantedObject:
    found = state.wants[ref.name] = WantedObject(ref)
    _begin_fetch(state, found)
    return found


# ---- room in the cache
_FILE_NAME_CHARACTERS = frozenset(string.ascii_lowercase + string.digits + "-_.")


class CachedObject(msgspec.Struct, frozen=True):
    """A cached object. `used_at`: time of the last use (one clock for all objects)."""

    name: str
    size_bytes: int
    used_at: float
    is_pinned: bool = False


class Shortage(enum.Enum):
    """The reason why eviction cannot free enough bytes."""

    TOO_LARGE = "too large"  # the object is larger than the whole cache
    PINNED = "pinned"


def choose_evictions(entries: Iterable[CachedObject], *, size_bytes: int, capacity_bytes: int) -> list[str] | Shortage:
    """Return the names of objects to evict, in order, to free `size_bytes`; a `Shortage` if impossible."""
    if size_bytes > capacity_bytes:
        return Shortage.TOO_LARGE
    here = sorted(entries, key=lambda entry: (entry.used_at, entry.name))
    excess = sum(entry.size_bytes for entry in here) + size_bytes - capacity_bytes
    plan: list[str] = []
    for entry in here:
        if excess <= 0:
            break
        if not entry.is_pinned:
            plan.append(entry.name)
            excess -= entry.size_bytes
    return plan if excess <= 0 else Shortage.PINNED


def encode_as_file_name(name: str) -> str:
    """Return a cache name as a unique path component for any file system.

    Lower-case letters, digits, `-`, `_` and inner dots remain. Other bytes become `~` and two hex digits, because some
    file systems fold case.
    """
    out = "".join(chr(byte) if chr(byte) in _FILE_NAME_CHARACTERS else f"~{byte:02x}" for byte in name.encode())
    return "~2e" + out[1:] if out.startswith(".") else out or "~"
