"""Objects in transit to a simulated pilot's disk, along the paths that the manager plans.

The manager may name pilots that still fetch the object; they pass on parts as they come. An object is a fluid
here, and a giver may have sent more than it has. So a fetch with all bytes completes only when one of its givers
has the whole object. If a giver is lost before, the bytes that it lacked must come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stoker.contexts.recipe import ObjectRef
from stoker.manager.sim.flows import Machine, SharedLink, Transfer
from stoker.manager.sim.log import Happened
from stoker.manager.sim.runs import Surroundings
from stoker.pilot.core.events import Event, ObjectArrived, SourceFailed
from stoker.protocol.ids import PilotId
from stoker.protocol.to_pilot import FetchObject


class ObjectHolder(Protocol):
    """A pilot that gets objects and gives them to others."""

    number: int
    here: bool
    machine: Machine
    fetching: Fetching

    @property
    def sim(self) -> Neighbourhood:
        """The simulation that it is part of."""

    def handle(self, event: Event) -> None:
        """Tell the pilot's core of an event."""


class Neighbourhood(Surroundings, Protocol):
    """A simulation in which pilots find each other."""

    @property
    def pilots(self) -> Mapping[PilotId, ObjectHolder]:
        """Pilots that are there."""


class _Fetch:
    """One object in transit, or waiting for a source."""

    def __init__(self, ref: ObjectRef, now: float) -> None:
        self.ref = ref
        self.left = float(ref.size_bytes)
        """Missing bytes when its transfer begins."""
        self.began_at = now
        self.transfer: Transfer | None = None
        self.sources: tuple[ObjectHolder | None, ...] = ()
        """Givers in the order of the transfer's paths; None is the origin."""
        self.moved: dict[ObjectHolder | None, float] = {}
        """Bytes from each before the paths last changed."""
        self.operations_left = False
        self.bytes_here = False


class Fetching:
    """A pilot's objects that are not here yet."""

    def __init__(self, pilot: ObjectHolder) -> None:
        self._pilot = pilot
        self._fetches: dict[str, _Fetch] = {}
        self._waiting_for_whole: dict[str, list[tuple[ObjectHolder, _Fetch]]] = {}
        """Fetches of others that have all bytes from here and wait for the whole object."""

    def expect(self, ref: ObjectRef) -> None:
        """Wait for an object; the manager will name sources."""
        self._fetches[ref.name] = _Fetch(ref, self._pilot.sim.agenda.now)

    def stop(self, name: str) -> None:
        """Stop fetching an object."""
        fetch = self._fetches.pop(name, None)
        if fetch is not None and fetch.transfer is not None:
            self._pilot.sim.network.stop(fetch.transfer)

    def told(self, order: FetchObject) -> None:
        """Fetch an object from these sources from now on."""
        fetch = self._fetches.get(order.object.name)
        if fetch is None or fetch.bytes_here:
            return
        sim, machine = self._pilot.sim, self._pilot.machine
        paths: list[tuple[SharedLink, ...]] = []
        sources: list[ObjectHolder | None] = []
        failed = []
        for peer in order.peers:
            other = sim.pilots.get(peer.pilot)
            if other is None or not other.here:
                failed.append(peer.pilot)
                continue
            paths.append((other.machine.outward, machine.inward))
            sources.append(other)
        if order.origin:
            paths.append((sim.shared.bytes, machine.shared, machine.inward))
            sources.append(None)
            self._read_operations(fetch)
        self._account(fetch)
        fetch.sources = tuple(sources)
        if fetch.transfer is None:
            fetch.transfer = sim.network.start(fetch.left, paths, lambda: self._bytes_came(fetch))
        else:
            sim.network.lead(fetch.transfer, paths)
        if failed:
            for peer_id in failed:
                self._pilot.handle(SourceFailed(fetch.ref.name, "it is gone", peer_id))

    def _read_operations(self, fetch: _Fetch) -> None:
        sim = self._pilot.sim
        count = sim.operations_of.get(fetch.ref.name, 0)
        if count and not fetch.operations_left:
            fetch.operations_left = True

            def done() -> None:
                fetch.operations_left = False
                self._maybe_here(fetch)

            sim.network.start(count, [(sim.shared.operations,)], done)

    def _account(self, fetch: _Fetch) -> None:
        if fetch.transfer is not None:
            for place, size in fetch.transfer.moved.items():
                source = fetch.sources[place]
                fetch.moved[source] = fetch.moved.get(source, 0.0) + size

    def _bytes_came(self, fetch: _Fetch) -> None:
        fetch.bytes_here = True
        self._account(fetch)
        fetch.transfer, fetch.left = None, 0.0
        self._maybe_here(fetch)

    def _maybe_here(self, fetch: _Fetch) -> None:
        name = fetch.ref.name
        if not self._pilot.here or not fetch.bytes_here or fetch.operations_left or name not in self._fetches:
            return
        givers = [source for source in fetch.moved if source is not None]
        if givers and None not in fetch.sources and not any(name in giver.machine.on_disk for giver in givers):
            for giver in givers:
                giver.fetching.tell_when_whole(self._pilot, fetch)
            return
        del self._fetches[name]
        pilot, sim = self._pilot, self._pilot.sim
        machine, now = pilot.machine, sim.agenda.now
        machine.on_disk[name] = fetch.ref.size_bytes
        machine.in_memory[name] = None
        size = fetch.ref.size_bytes
        origin = min(size, round(fetch.moved.get(None, 0.0)))
        self._came(origin, size - origin)
        pilot.handle(ObjectArrived(name, size, origin, size - origin, now - fetch.began_at))
        for other, waiting in self._waiting_for_whole.pop(name, ()):
            other.fetching._maybe_here(waiting)

    def _came(self, origin: float, peers: float) -> None:
        sim = self._pilot.sim
        for what, size in ((Happened.BYTES_SHARED, origin), (Happened.BYTES_PEER, peers)):
            if size:
                sim.log.note(sim.agenda.now, what, pilot=self._pilot.number, value=float(size))

    def tell_when_whole(self, other: ObjectHolder, fetch: _Fetch) -> None:
        """Complete another pilot's fetch once the object is whole here."""
        self._waiting_for_whole.setdefault(fetch.ref.name, []).append((other, fetch))

    def vanish(self) -> None:
        """Stop everything; bytes that were given without being here must come from elsewhere."""
        for fetch in self._fetches.values():
            if fetch.transfer is not None:
                self._pilot.sim.network.stop(fetch.transfer)
                self._account(fetch)
                fetch.left = fetch.transfer.left
            origin = round(fetch.moved.get(None, 0.0))
            self._came(origin, round(sum(fetch.moved.values())) - origin)
        left = {name: fetch.left for name, fetch in self._fetches.items()}
        self._fetches.clear()
        waiting, self._waiting_for_whole = self._waiting_for_whole, {}
        for name, others in waiting.items():
            for other, fetch in others:
                other.fetching._lost(fetch, self._pilot, left=left.get(name, 0.0))

    def _lost(self, fetch: _Fetch, giver: ObjectHolder, *, left: float) -> None:
        """A giver is gone: fetch the bytes that it lacked again.

        A giver that had all its bytes from incomplete givers counts as having had none.
        """
        given = fetch.moved.get(giver, 0.0)
        missing = min(left, given) or given
        if not fetch.bytes_here:
            return
        fetch.moved[giver] = given - missing
        fetch.left = missing
        fetch.bytes_here = False
        fetch.sources = ()
