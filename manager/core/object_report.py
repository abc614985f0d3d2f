"""How objects travel, in words and numbers: for `stoker status`, for the stories of libraries, for the user once."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core.nouns import Library, Pilot
from stoker.manager.core.peers import Fetch, Object, Way
from stoker.manager.core.phases import LibraryState
from stoker.manager.core.state import State
from stoker.protocol.status import ObjectStatus
from stoker.protocol.to_manager import LibraryPhase
from stoker.units import show_bytes

_SHOWN = 4


def statuses(state: State) -> tuple[ObjectStatus, ...]:
    """The objects of the session's contexts, their snapshots among them, and how each has travelled."""
    found = {ref.name: ref for context in state.contexts.values() for ref in context.recipe.objects}
    for forms in state.transfers.snapshots.values():
        found.update({snapshot.object.name: snapshot.object for snapshot in forms.values()})
    return tuple(_status(state, ref) for ref in found.values())


def _status(state: State, ref: ObjectRef) -> ObjectStatus:
    object = state.transfers.objects.get(ref.name)
    if object is None:
        return ObjectStatus(ref.name, ref.size_bytes, 0, 0, 0, 0)
    return ObjectStatus(
        name=ref.name,
        size_bytes=ref.size_bytes,
        holders=len(object.holders),
        fetching=len(object.fetches),
        origin_bytes=object.origin_bytes,
        peer_bytes=object.peer_bytes,
        trouble=_trouble(object),
    )


def _trouble(object: Object) -> str:
    said = []
    if object.lonely:
        said.append(f"no peer could serve {_some(object.lonely)}, which read it from where it lies")
    if object.unreadable:
        said.append(f"it can't be read on {_some(object.unreadable)}")
    return "; ".join(said) + (f" ({object.reason})" if said and object.reason else "")


def trouble(state: State) -> str:
    """One sentence when pilots cannot reach each other, for the user to be told once; else empty."""
    lonely = state.transfers.lonely
    if not lonely:
        return ""
    reasons = [object.reason for object in state.transfers.objects.values() if object.lonely and object.reason]
    why = f" ({reasons[-1]})" if reasons else ""
    whom = "Pilots cannot reach each other" if not state.transfers.peer_bytes else "Some pilots cannot reach others"
    return (
        f"{whom}{why}: {_some(lonely)} read from where the files lie, which is slower. Open the pilots' ports between"
        " the compute nodes, or name another network in the site file: [session] interface"
    )


def phase(state: State, library: Library) -> str:
    """What a library that is loading is doing: `fetching from peers n014, n021`, `loading`."""
    source = comes_from(state, library)
    return f"{LibraryPhase.FETCHING.value} {source}" if source else library.phase.value


def comes_from(state: State, library: Library) -> str:
    """Where the objects come from that a library still lacks: `from peers n014, n021`; empty when it lacks none."""
    fetches = list(_fetches(state, library))
    said = []
    if any(fetch.way in (Way.READER, Way.ALONE) for fetch in fetches):
        said.append("from where it lies")
    peers = dict.fromkeys(id for fetch in fetches for id in fetch.sources)
    if peers:
        said.append(f"from peer{'s' * (len(peers) > 1)} {_some(peers)}")
    if any(fetch.way is Way.FOLLOWING for fetch in fetches):
        said.append("with another pilot of its host")
    if not said and fetches:
        said.append("when a pilot has a place free to serve it")
    return " and ".join(said)


def _fetches(state: State, library: Library) -> Iterator[Fetch]:
    peer = state.transfers.peers.get(library.pilot.id)
    if peer is not None:
        for ref in _objects(state, library):
            fetch = peer.fetches.get(ref.name)
            if fetch is not None:
                yield fetch


def _objects(state: State, library: Library) -> Iterator[ObjectRef]:
    """What a library may wait for: the objects of its recipe, and snapshots of its context."""
    recipe = library.context.recipe
    yield from recipe.objects
    forms = state.transfers.snapshots.get((recipe.key, library.devices[0].facts.kind), {})
    yield from (snapshot.object for snapshot in forms.values())


def note(state: State, pilot: Pilot, fetch: Fetch) -> None:
    """Tell, in the stories of the libraries that wait for an object, where it comes from."""
    ref = fetch.object.ref
    name = ref.source.rpartition("/")[2] or ref.name[:16]
    for library in pilot.libraries.values():
        if library.state is LibraryState.LOADING and any(ref.name == one.name for one in _objects(state, library)):
            text = f"{name} ({show_bytes(ref.size_bytes)}) comes {comes_from(state, library)}"
            library.note(state.now, text)


def _some(names: Collection[str]) -> str:
    """The first few of many, and how many more."""
    shown = list(names)[:_SHOWN]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown) + more
