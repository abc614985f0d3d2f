"""Objects that a pilot wants, and what the manager is told of those that it has. This file alone writes both.

An object in the cache needs no source. One that is not there is wanted (`WantObjects`); the manager says where it may
be had (`FetchObject`: other pilots, or the place that it comes from), again whenever that changes, and hears when it is
here, which sources failed, and what has left the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stoker.contexts.recipe import ObjectRef
from stoker.manager.protocol.ids import PilotId
from stoker.manager.protocol.to_manager import FetchFailed, ObjectArrival, ObjectsGone, ObjectsHere, WantObjects
from stoker.manager.protocol.to_pilot import FetchObject
from stoker.pilot.core.commands import Expect, Fetch, StopFetch, TidySnapshots
from stoker.pilot.core.events import ObjectArrived
from stoker.pilot.core.state import PilotLibrary, PilotState, Want


def want(state: PilotState, library: PilotLibrary, refs: Iterable[ObjectRef]) -> None:
    """A library waits for objects that are not in the cache."""
    unasked = []
    for ref in refs:
        found = state.wants.get(ref.name)
        if found is None:
            found = _expect(state, ref)
            unasked.append(ref)
        elif not found.is_begun:
            _begin(state, found)
            if found.order is not None and not (found.order.origin or found.order.peers):
                unasked.append(ref)  # it could be had nowhere when the manager planned
        found.libraries[library.number] = None
    if unasked:
        state.tell(WantObjects(tuple(unasked)))


def plan(state: PilotState, library: PilotLibrary) -> None:
    """The manager names sources of some of a library's objects unasked. Nothing is fetched before the cache was looked
    at: the manager may not know that they are there."""
    planned = set(library.ordered.planned)
    for ref in library.recipe.objects:
        if ref.name not in planned:
            continue
        found = state.wants.get(ref.name)
        if found is None:
            found = state.wants[ref.name] = Want(ref)
            found.is_begun = False
        found.libraries[library.number] = None


def found_here(state: PilotState, names: Iterable[str]) -> None:
    """Objects are in the cache although the manager has planned to have them brought."""
    for name in names:
        found = state.wants.get(name)
        if found is not None and not found.is_begun:
            del state.wants[name]
            state.told.add(name)
            state.tell(ObjectsHere((ObjectArrival(name, found.ref.size_bytes),)))


def say_again(state: PilotState) -> None:
    """The manager welcomes this pilot (again): its answer to what is wanted may have been lost."""
    if state.wants:
        state.tell(WantObjects(tuple(each.ref for each in state.wants.values())))


def told_sources(state: PilotState, order: FetchObject) -> Want | None:
    """The manager says where an object may be had. Returns a want that can be met nowhere, if it is one."""
    name = order.object.name
    found = state.wants.get(name)
    if found is None and order.keep and name not in state.told:
        found = _expect(state, order.object)
    if found is None:  # it came meanwhile, or nothing here wants it any more
        if name in state.told:
            state.tell(ObjectsHere((ObjectArrival(name, order.object.size_bytes),)))
        else:
            state.tell(ObjectsGone((name,)))
        return None
    found.order = order
    if not found.is_begun:
        return None
    if not order.origin and not order.peers:
        return found
    state.out.append(Fetch(order))
    return None


def arrived(state: PilotState, event: ObjectArrived) -> Want | None:
    """An object is here; returns who waited for it."""
    found = state.wants.pop(event.name, None)
    state.told.add(event.name)
    state.tell(
        ObjectsHere(
            (
                ObjectArrival(
                    event.name, event.size_bytes, event.origin_bytes, event.peer_bytes, round(event.seconds, 3)
                ),
            )
        )
    )
    return found


def source_failed(state: PilotState, name: str, reason: str, peer: PilotId) -> None:
    """A source is of no use: the manager names others, or says that there are none."""
    found = state.wants.get(name)
    if found is None:
        return
    if peer:
        state.tell(FetchFailed(name=name, peers=(peer,), reason=reason))
    else:
        found.trouble = reason
        state.tell(FetchFailed(name=name, origin=True, reason=reason))


def give_up(state: PilotState, name: str) -> Want | None:
    """An object will not come; returns who waited for it."""
    found = state.wants.pop(name, None)
    if found is not None:
        state.out.append(StopFetch(name))
        state.tell(ObjectsGone((name,)))
    return found


def forget(state: PilotState, library: PilotLibrary) -> None:
    """A library waits for nothing any more. What is on its way comes all the same: others may want it soon."""
    for name, found in list(state.wants.items()):
        found.libraries.pop(library.number, None)
        if not found.is_begun and not found.libraries:
            del state.wants[name]
            state.tell(ObjectsGone((name,)))
    library.missing.clear()


def listed(state: PilotState, sizes: Mapping[str, int]) -> None:
    """Tell what has come and gone without this pilot: others of its host use the same cache."""
    gone = state.told - sizes.keys()
    fresh = sizes.keys() - state.told - state.wants.keys()
    if gone:
        state.out.append(TidySnapshots())
        state.tell(ObjectsGone(tuple(sorted(gone))))
    if fresh:
        state.tell(ObjectsHere(tuple(ObjectArrival(name, sizes[name]) for name in sorted(fresh))))
    state.told = (state.told - gone) | fresh


def _begin(state: PilotState, found: Want) -> None:
    """The cache lacks an object whose sources were named unasked: fetch it from there."""
    found.is_begun = True
    state.out.append(Expect(found.ref.name))
    if found.order is not None and (found.order.origin or found.order.peers):
        state.out.append(Fetch(found.order))


def _expect(state: PilotState, ref: ObjectRef) -> Want:
    found = state.wants[ref.name] = Want(ref)
    state.out.append(Expect(ref.name))
    return found
