"""What only a leaving pilot has goes to another before it leaves, if calls wait that need it.

A pilot is drained before its walltime ends, or when it is no longer needed. Its objects mostly lie elsewhere too; one
that does not would be read again from where it comes from, and a snapshot be made again. So another pilot is told to
get it although it has not asked (the one that has least to do, and time left), and the leaving one to stay until that
is done: at most until shortly before its own end. What others are getting from it just then counts the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.manager.core import walltime
from stoker.manager.core.manager import Manager
from stoker.manager.core.peers import Object, Peer
from stoker.protocol import to_pilot

MOST_S = 120.0
"""A leaving pilot stays no longer than this for its objects."""
_TRIES = 3
"""Pilots that are told to get an object, one after the other, should they fail."""


def begin(manager: Manager, peer: Peer) -> float:
    """A pilot drains: see to it that nothing that is needed leaves with it. For how many seconds it should stay."""
    pilot = manager.state.pilots[peer.id]
    left_s = walltime.time_to_hand_on_s(pilot, manager.state.now)
    if not peer.serving or left_s <= 0:
        return 0.0
    needed = frozenset(_needed(manager))
    for name, object in peer.has.items():
        if (name in needed or _comes(object)) and not _stays(object):
            peer.hands_on[name] = {}
    _go_on(manager, peer)
    if not peer.hands_on:
        return 0.0
    manager.state.transfers.leaving[peer.id] = peer
    pilot.note(manager.state.now, f"hands on {len(peer.hands_on)} of its objects, which nobody else has")
    return min(MOST_S, left_s)


def release_leaving_pilots(manager: Manager) -> None:
    """Hand on further objects of the pilots that leave; let those go that have none left to hand on."""
    leaving = manager.state.transfers.leaving
    for peer in list(leaving.values()):
        _go_on(manager, peer)
        if not peer.hands_on:
            del leaving[peer.id]
            pilot = manager.state.pilots.get(peer.id)
            if pilot is not None and peer.here:
                manager.say(pilot, to_pilot.Exit("others have its objects", drain=True))


def _go_on(manager: Manager, peer: Peer) -> None:
    for name, tried in list(peer.hands_on.items()):
        object = peer.has.get(name)
        if object is None or _stays(object):
            del peer.hands_on[name]
        elif not _comes(object):
            other = _heir(manager, object) if len(tried) < _TRIES else None
            if other is None:
                del peer.hands_on[name]
            else:
                tried[other.id] = None
                fetch = manager.state.transfers.fetch(other, object)
                fetch.kept = True


def _stays(object: Object) -> bool:
    """Whether a pilot has it that stays."""
    return any(not peer.draining for peer in object.holders.values())


def _comes(object: Object) -> bool:
    """Whether it is on its way to a pilot that stays."""
    return any(not fetch.peer.draining for fetch in object.fetches.values())


def _heir(manager: Manager, object: Object) -> Peer | None:
    """Who is to have an object next."""
    tried = {id for peer in object.holders.values() for id in peer.hands_on.get(object.ref.name, ())}
    able = [
        peer
        for peer in manager.state.transfers.peers.values()
        if peer.serving and not peer.draining and peer.id not in tried
    ]
    return min(able, key=lambda peer: (_ends_soon(manager, peer), len(peer.fetches), len(peer.has)), default=None)


def _ends_soon(manager: Manager, peer: Peer) -> float:
    """Whoever has no end is best; then who has most time left."""
    return -walltime.left_s(manager.state.pilots[peer.id], manager.state.now)


def _needed(manager: Manager) -> Iterator[str]:
    """What contexts need for which calls wait: files, and snapshots of what is loaded."""
    waiting = {key for key, context in manager.state.contexts.items() if context.queue.head() is not None}
    for key in waiting:
        yield from (ref.name for ref in manager.state.contexts[key].recipe.objects)
    for (key, _), forms in manager.state.transfers.snapshots.items():
        if key in waiting:
            yield from (snapshot.object.name for snapshot in forms.values())
