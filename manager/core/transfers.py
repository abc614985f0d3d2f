"""Records of the transfer plan (`object_plan`): peers, objects, and fetches of objects by pilots."""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

import msgspec

from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.protocol.ids import PilotId

_READER_RANK = -1


class Limits(msgspec.Struct, frozen=True):
    sources: int = 3  # Maximum peers from which a pilot fetches one object at a time
    close: int = 8  # The first 8 pilots use `sources` peers; later pilots use one peer less, to keep the tree shallow
    serves: int = 4  # Number of transfers that a pilot serves at a time; the last slot is reserved for whole objects
    readers: int = 4  # Maximum pilots that read an origin at a time because no peer could serve them
    tries: int = 6  # Number of failed peers after which a pilot reads the origin itself
    origin_tries: int = 8  # Number of pilots that may fail to read an origin before the origin counts as unreadable
    small_bytes: int = 16 << 20  # An object up to this size is fetched from one peer, because more peers are not faster


class Snapshot(msgspec.Struct, frozen=True):
    """A loaded context that is stored as an object. `form` names the format of the object."""

    form: str
    object: ObjectRef
    made_s: float


class Way(enum.Enum):
    WAITING = "waiting"  # No sure peer (`object_plan`) has a free slot; other peers may send parts of the object
    PEERS = "peers"  # The object is fetched from peers; one of them is sure (`object_plan`)
    READER = "reader"  # The pilot reads the origin for all pilots
    STRANDED = "stranded"  # No peer could serve the pilot, so it waits to read the origin for itself
    ALONE = "alone"  # The pilot reads the origin for itself
    FOLLOWING = "following"  # Another pilot fetches or has fetched the object into the same cache


@dataclass(slots=True, eq=False, repr=False)
class Fetch:
    """The transfer of an object to a pilot. `number`: position in the order in which fetches began."""

    object: Object
    peer: Peer
    number: int
    way: Way = Way.WAITING
    leader: Fetch | None = None  # Active fetch into the same cache, if this fetch follows another fetch
    sources: dict[PilotId, Peer] = field(default_factory=dict)
    failed: dict[PilotId, None] = field(default_factory=dict)
    unreadable: bool = False  # True if this pilot could not read the origin
    said: tuple[tuple[PilotId, ...], bool] | None = None
    kept: bool = False  # True if the fetch saves the only copy of a leaving pilot (`object_plan`)

    @property
    def able(self) -> bool:
        """True if the pilot of this fetch could read the origin for other pilots."""
        return self.peer.serving and not self.peer.draining and not self.unreadable

    @property
    def rank(self) -> int:
        """Position in the order in which pilots get the object, smallest first."""
        return _READER_RANK if self.way is Way.READER else self.number

    def can_rely_on_source(self, source: Peer) -> bool:
        if source.id in self.object.whole:
            return True
        other = self.object.fetches.get(source.id)
        return other is not None and other.rank < self.rank

    def can_fetch_from(self, peer: Peer) -> bool:
        return peer is not self.peer and peer.id not in self.sources and peer.id not in self.failed


@dataclass(slots=True, eq=False, repr=False)
class Peer:
    id: PilotId
    address: str = ""
    cache: str = ""
    here: bool = False
    draining: bool = False
    has: dict[str, Object] = field(default_factory=dict)
    fetches: dict[str, Fetch] = field(default_factory=dict)
    serves: dict[tuple[str, PilotId], Fetch] = field(default_factory=dict)
    parked: dict[str, Object] = field(default_factory=dict)  # Objects that the peer will serve when it has a free slot
    wants: dict[str, ObjectRef] = field(default_factory=dict)  # Objects that the peer was fetching when it disconnected
    hands_on: dict[str, dict[PilotId, None]] = field(default_factory=dict)  # Receivers of objects only this peer has
    blamed: int = 0  # Number of pilots that this peer could not serve although other peers served them
    served: int = 0  # Number of pilots that received an object with the help of this peer

    @property
    def serving(self) -> bool:
        return self.here and bool(self.address)


class Object:
    def __init__(self, name: str) -> None:
        self.ref = ObjectRef(name, 0)
        self.manifest = b""
        self.holders: dict[PilotId, Peer] = {}
        self.whole: dict[PilotId, Peer] = {}  # Holders of the whole object that serve other pilots
        self.open: OrderedDict[PilotId, Peer] = OrderedDict()  # Holders with a free slot, used round robin
        self.relays: list[tuple[int, PilotId]] = []  # Heap (by rank) of pilots that fetch the object and may serve it
        self.queued: dict[PilotId, int] = {}
        self.fetches: OrderedDict[PilotId, Fetch] = OrderedDict()  # Fetches in the order of their numbers
        self.able: dict[PilotId, Fetch] = {}
        self.reader: Fetch | None = None
        self.waiting: OrderedDict[PilotId, Fetch] = OrderedDict()
        self.underserved: OrderedDict[PilotId, Fetch] = OrderedDict()  # Fetches with fewer peers than their maximum
        self.stranded: OrderedDict[PilotId, Fetch] = OrderedDict()
        self.alone: dict[PilotId, Fetch] = {}
        self.lonely: dict[PilotId, None] = {}  # Pilots that no peer could serve
        self.unreadable: dict[PilotId, None] = {}
        self.reason = ""  # Reason of the last failed fetch
        self.origin_bytes = 0
        self.peer_bytes = 0

    def unlist(self, fetch: Fetch) -> None:
        for queue in (self.waiting, self.underserved, self.stranded, self.alone, self.able):
            queue.pop(fetch.peer.id, None)
        if self.reader is fetch:
            self.reader = None


class Transfers:
    """All peers, objects and fetches. Each fetch links to its sources and back, and is in the queue of its `Way`."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.objects: dict[str, Object] = {}
        self.peers: dict[PilotId, Peer] = {}
        self.caches: dict[str, dict[PilotId, Peer]] = {}  # Connected pilots, by the cache that they use
        self.needy: dict[str, Object] = {}  # Objects with waiting fetches, or with fetches that may use more peers
        self.leaving: dict[PilotId, Peer] = {}  # Leaving pilots that stay until other pilots have their objects
        self.unsettled: dict[Fetch, None] = {}  # Fetches that must be planned
        self.freed: dict[Peer, None] = {}
        self.changed: dict[Fetch, None] = {}  # Fetches whose pilots get a new plan
        self.snapshots: dict[str, dict[str, dict[str, Snapshot]]] = {}  # Snapshots, by recipe key, device kind and form
        self.fetches = 0
        self.peer_bytes = 0
        self.lonely: dict[PilotId, None] = {}  # Pilots that found no peer for one of their objects

    def object(self, name: str) -> Object:
        found = self.objects.get(name)
        if found is None:
            found = self.objects[name] = Object(name)
        return found

    def refs(self, recipe: Recipe, *, kind: str | None = None) -> Iterator[ObjectRef]:
        """Yield the files of a recipe, and its snapshots for a device kind (None: for every kind)."""
        yield from recipe.objects
        for of, forms in self.snapshots.get(recipe.key, {}).items():
            if kind in (None, of):
                yield from (snapshot.object for snapshot in forms.values())

    def wants(self, object: Object) -> int:
        if object.ref.size_bytes <= self.limits.small_bytes:
            return 1
        return max(1, self.limits.sources - (len(object.fetches) > self.limits.close))

    @property
    def patience(self) -> int:
        """Number of failed peers after which a pilot reads the origin."""
        return 1 if not self.peer_bytes and len(self.lonely) >= 3 else self.limits.tries

    def hold(self, peer: Peer, object: Object) -> None:
        object.holders[peer.id] = peer
        peer.has[object.ref.name] = object
        if peer.serving:
            object.whole[peer.id] = peer
            self._list_reliable_source(peer, object)

    def _list_reliable_source(self, peer: Peer, object: Object) -> None:
        """List a new sure source (`object_plan`) of an object. Plan the waiting fetches from this source again."""
        for (name, _), child in peer.serves.items():
            if name == object.ref.name and child.way is Way.WAITING:
                self.unsettled[child] = None
        self.list_peer_as_source(peer, object)
        self.freed[peer] = None

    def release(self, peer: Peer, object: Object) -> None:
        """Remove an object from a pilot. Fetches from this pilot get another source."""
        del peer.has[object.ref.name], object.holders[peer.id]
        peer.parked.pop(object.ref.name, None)
        self.withdraw(peer, object)
        self._replace_lost_cache_source(peer, object)
        self.forget(object)

    def withdraw(self, peer: Peer, object: Object) -> None:
        """Stop serving an object from a pilot. Fetches from this pilot get another source."""
        object.whole.pop(peer.id, None)
        object.open.pop(peer.id, None)
        for (name, _), child in list(peer.serves.items()):
            if name == object.ref.name:
                self.unlink(child, peer)
                self.unsettled[child] = None
        self.unsettled.update(dict.fromkeys(object.waiting.values()))

    def forget(self, object: Object) -> None:
        if not object.fetches:
            object.unreadable.clear()
        if not object.fetches and not object.holders and not object.manifest:
            self.objects.pop(object.ref.name, None)

    def fetch(self, peer: Peer, object: Object) -> Fetch:
        """Start a fetch, or let it wait for an earlier fetch into the same cache."""
        self.fetches += 1
        fetch = Fetch(object, peer, self.fetches)
        fetch.leader = self._find_leading_fetch(fetch)  # the search must not find the new fetch itself
        object.fetches[peer.id] = peer.fetches[object.ref.name] = fetch
        if fetch.leader is None and self.near(fetch) is None:
            self.go(fetch)
        else:
            self.changed[fetch] = None
            self.send(fetch, Way.FOLLOWING)
        return fetch

    def go(self, fetch: Fetch) -> None:
        fetch.leader = None
        self.unsettled[fetch] = None
        self.send(fetch, Way.WAITING)

    def become_leader(self, fetch: Fetch) -> None:
        """Let a waiting fetch transfer the object itself, because its pilot reported a failed source."""
        near = self._fetches_into_cache(fetch.peer.cache, fetch.object)
        self.go(fetch)
        for other in near:
            if other is not fetch and (other.way is not Way.FOLLOWING or other.leader is not None):
                self._follow(other, fetch)

    def _follow(self, fetch: Fetch, leader: Fetch) -> None:
        """Let a fetch wait for another fetch into the same cache. A later number prevents circular waits."""
        object = fetch.object
        if fetch.way is not Way.FOLLOWING:
            for source in list(fetch.sources.values()):
                self.unlink(fetch, source)
            self.send(fetch, Way.FOLLOWING)
            self.withdraw(fetch.peer, object)
            self.start_origin_reads(object)
        if fetch.number < leader.number:
            self.fetches += 1
            fetch.number = self.fetches
            object.fetches.move_to_end(fetch.peer.id)
            self.unsettled.update(dict.fromkeys(object.waiting.values()))
        fetch.leader, fetch.said = leader, None  # forget the last sent plan, so that a new plan is sent
        self.changed.pop(fetch, None)

    def _find_leading_fetch(self, fetch: Fetch) -> Fetch | None:
        under_way = self._fetches_into_cache(fetch.peer.cache, fetch.object)
        return next((x for x in under_way if x.way is not Way.FOLLOWING), None)

    def _fetches_into_cache(self, cache: str, object: Object) -> list[Fetch]:
        found = (fetch for id in self.caches.get(cache, ()) if (fetch := object.fetches.get(id)) is not None)
        return sorted(found, key=lambda fetch: fetch.number)

    def near(self, fetch: Fetch) -> Peer | None:
        near = self.caches.get(fetch.peer.cache, {})
        return next((peer for id, peer in near.items() if id in fetch.object.holders), None)

    def end(self, fetch: Fetch, *, complete: bool = False) -> None:
        """End a fetch. Without `complete`, its followers get another source."""
        object, peer = fetch.object, fetch.peer
        for source in list(fetch.sources.values()):
            self.unlink(fetch, source)
        object.unlist(fetch)
        self._update_needy(object)
        del object.fetches[peer.id], peer.fetches[object.ref.name]
        peer.parked.pop(object.ref.name, None)
        self.unsettled.pop(fetch, None)
        self.changed.pop(fetch, None)
        self._reassign_followers(fetch, complete=complete)
        if not complete:
            self.withdraw(peer, object)
            self.forget(object)
        self.start_origin_reads(object)

    def _reassign_followers(self, leader: Fetch, *, complete: bool) -> None:
        fetches = [x for x in self._fetches_into_cache(leader.peer.cache, leader.object) if x.leader is leader]
        for fetch in fetches:
            if complete:
                fetch.leader = None
                self.changed[fetch] = None
            elif fetch is fetches[0]:
                self.go(fetch)
            else:
                fetch.leader = fetches[0]

    def _replace_lost_cache_source(self, peer: Peer, object: Object) -> None:
        for fetch in self._fetches_into_cache(peer.cache, object):
            if fetch.way is Way.FOLLOWING and fetch.leader is None and self.near(fetch) is None:
                if (leader := self._find_leading_fetch(fetch)) is not None:
                    self._follow(fetch, leader)
                else:
                    self.go(fetch)

    def send(self, fetch: Fetch, way: Way) -> None:
        object, id = fetch.object, fetch.peer.id
        object.unlist(fetch)
        before, fetch.way = fetch.way, way
        match way:
            case Way.WAITING:
                object.waiting[id] = fetch
            case Way.PEERS if len(fetch.sources) < self.wants(object) and len(fetch.failed) < self.patience:
                object.underserved[id] = fetch
            case Way.STRANDED:
                object.stranded[id] = fetch
                for source in list(fetch.sources.values()):
                    self.unlink(fetch, source)
            case Way.ALONE:
                object.alone[id] = fetch
            case Way.READER:
                object.reader = fetch
        if way in (Way.WAITING, Way.PEERS) and fetch.able:
            object.able[id] = fetch
        if way is Way.READER:
            self._list_reliable_source(fetch.peer, object)
        elif way is Way.PEERS and way is not before:
            self.list_peer_as_source(fetch.peer, object)
            self.freed[fetch.peer] = None
        self._update_needy(object)

    def start_origin_reads(self, object: Object) -> None:
        while object.stranded and len(object.alone) < self.limits.readers:
            fetch = next(iter(object.stranded.values()))
            self.send(fetch, Way.ALONE)
            self.changed[fetch] = None

    def _update_needy(self, object: Object) -> None:
        if object.waiting or object.underserved or object.stranded:
            self.needy[object.ref.name] = object
        else:
            self.needy.pop(object.ref.name, None)

    def link(self, fetch: Fetch, source: Peer, *, instead: bool = False) -> None:
        """Add a source to a fetch. `instead`: replace the last source."""
        if instead:
            self.unlink(fetch, next(reversed(fetch.sources.values())))
        fetch.sources[source.id] = source
        source.serves[fetch.object.ref.name, fetch.peer.id] = fetch
        self.changed[fetch] = None

    def unlink(self, fetch: Fetch, source: Peer) -> None:
        del fetch.sources[source.id], source.serves[fetch.object.ref.name, fetch.peer.id]
        self.changed[fetch] = None
        self.freed[source] = None
        parked, source.parked = source.parked, {}
        for object in parked.values():
            self.list_peer_as_source(source, object)

    def has_room(self, peer: Peer, object: Object) -> bool:
        fetch = object.fetches.get(peer.id)
        sure = fetch is None or fetch.way is Way.READER
        return len(peer.serves) + (0 if sure else 1) < self.limits.serves

    def list_peer_as_source(self, peer: Peer, object: Object) -> None:
        """List a peer as a source of an object, or park the object until the peer has a free slot."""
        if not peer.serving or peer.draining:
            return
        fetch = object.fetches.get(peer.id)
        if not self.has_room(peer, object):
            peer.parked[object.ref.name] = object
        elif peer.id in object.whole:
            object.open[peer.id] = peer
        elif fetch is not None and object.queued.get(peer.id) != fetch.rank:
            object.queued[peer.id] = fetch.rank
            heapq.heappush(object.relays, (fetch.rank, peer.id))

    def find(self, fetch: Fetch, *, root: bool) -> Peer | None:
        """Return a peer that can serve this fetch now, or None. `root`: accept only a sure peer (`object_plan`)."""
        below = fetch.rank if root else self.fetches + 1
        found = self._find_peer_with_whole_object(fetch) or self._find_relay_peer(fetch, below=below)
        return found or self._find_leaving_peer(fetch)

    def _find_peer_with_whole_object(self, fetch: Fetch) -> Peer | None:
        candidates = fetch.object.open
        for _ in range(len(candidates)):  # skip only current sources, full peers, and peers that failed this fetch
            id, peer = next(iter(candidates.items()))
            if not self.has_room(peer, fetch.object):
                del candidates[id]
                peer.parked[fetch.object.ref.name] = fetch.object
                continue
            candidates.move_to_end(id)
            if fetch.can_fetch_from(peer):
                return peer
        return None

    def _find_relay_peer(self, fetch: Fetch, *, below: int) -> Peer | None:
        object, found = fetch.object, None
        heap, skipped = object.relays, list[tuple[int, PilotId]]()
        while heap and found is None and heap[0][0] < below:
            rank, id = heap[0]
            source = object.fetches.get(id)
            if source is None or source.rank != rank or not self._can_relay(source):
                heapq.heappop(heap)
                if object.queued.get(id) == rank:
                    del object.queued[id]
            elif fetch.can_fetch_from(source.peer):
                found = source.peer
            else:
                skipped.append(heapq.heappop(heap))
        for entry in skipped:
            heapq.heappush(heap, entry)
        return found

    def _can_relay(self, source: Fetch) -> bool:
        peer, object = source.peer, source.object
        if peer.draining or not peer.serving or source.way not in (Way.PEERS, Way.READER):
            return False
        if self.has_room(peer, object):
            return True
        peer.parked[object.ref.name] = object
        return False

    def _find_leaving_peer(self, fetch: Fetch) -> Peer | None:
        object, reader = fetch.object, fetch.object.reader
        reads = [reader.peer] if reader is not None else []
        staying = (peer for peer in chain(reads, object.open.values()) if not peer.draining)
        if any(peer is not fetch.peer and peer.id not in fetch.failed for peer in staying):
            return None
        for peer in chain(reads, islice(object.whole.values(), 2 * self.limits.tries)):
            if peer.draining and fetch.can_fetch_from(peer) and self.has_room(peer, object):
                return peer
        return None
