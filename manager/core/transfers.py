"""Records for the transfers of objects (see `object_plan`): pilots as peers, objects, and fetches of objects."""

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

_RANK_OF_READER = -1


class TransferLimits(msgspec.Struct, frozen=True):
    sources: int = 3  # Maximum number of peers from which a pilot fetches one object at a time
    close: int = 8  # If more pilots than this fetch an object, each may use one peer less than `sources`
    serves: int = 4  # Number of transfers that a pilot serves at a time. The last slot is only for complete objects
    readers: int = 4  # Maximum number of pilots that read an origin at the same time because no peer could serve them
    tries: int = 6  # After this number of failed peers, a pilot reads the object from its origin
    origin_tries: int = 8  # If this many pilots fail to read an origin, it counts as unreadable
    small_bytes: int = 16 << 20  # Objects up to this size come from one peer, because several peers are not faster


class Snapshot(msgspec.Struct, frozen=True):
    """A loaded context that is stored as an object. `form`: format of the object. `made_s`: seconds to create it."""

    form: str
    object: ObjectRef
    made_s: float


class FetchMode(enum.Enum):
    WAITING = "waiting"  # No sure peer (see `object_plan`) has a free slot. Other peers may send parts of the object
    PEERS = "peers"  # Peers send the object, and at least one of them is sure to get all of it (see `object_plan`)
    READER = "reader"  # The pilot reads the object from its origin, and then serves all other pilots
    STRANDED = "stranded"  # No peer could serve the pilot. It waits until it may read the object from its origin
    ALONE = "alone"  # The pilot reads the object from its origin only for itself
    FOLLOWING = "following"  # Another pilot has fetched, or fetches, the object into the cache that both use


@dataclass(slots=True, eq=False, repr=False)
class Fetch:
    """The transfer of an object to a pilot. `number`: 1 for the first fetch of the session. `said`: last plan sent."""

    object: TransferredObject
    peer: Peer
    number: int
    mode: FetchMode = FetchMode.WAITING
    leader: Fetch | None = None  # The other pilot's fetch into the same cache, for which this fetch waits
    sources: dict[PilotId, Peer] = field(default_factory=dict)
    failed: dict[PilotId, None] = field(default_factory=dict)
    unreadable: bool = False  # True if this pilot failed to read the origin
    said: tuple[tuple[PilotId, ...], bool] | None = None
    kept: bool = False  # True if the pilot copies the object because the only other holder exits

    @property
    def can_read_for_others(self) -> bool:
        """True if the pilot of this fetch could read the object from its origin and then serve other pilots."""
        return self.peer.can_serve and not self.peer.draining and not self.unreadable

    @property
    def rank(self) -> int:
        """Sort key: a pilot may rely on every pilot whose fetch has a smaller rank."""
        return _RANK_OF_READER if self.mode is FetchMode.READER else self.number

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
    has: dict[str, TransferredObject] = field(default_factory=dict)
    fetches: dict[str, Fetch] = field(default_factory=dict)
    serves: dict[tuple[str, PilotId], Fetch] = field(default_factory=dict)
    # Objects that the peer can serve as soon as it has a free slot
    parked: dict[str, TransferredObject] = field(default_factory=dict)
    wants: dict[str, ObjectRef] = field(default_factory=dict)  # Objects that the peer was fetching when it disconnected
    # By object that only this leaving peer has: pilots that were chosen to copy it
    hands_on: dict[str, dict[PilotId, None]] = field(default_factory=dict)
    blamed: int = 0  # Number of pilots that this peer failed to serve although other peers could serve them
    served: int = 0  # Number of pilots that received an object with the help of this peer

    @property
    def can_serve(self) -> bool:
        return self.here and bool(self.address)


class TransferredObject:
    def __init__(self, name: str) -> None:
        self.ref = ObjectRef(name, 0)
        self.manifest = b""
        self.holders: dict[PilotId, Peer] = {}
        self.whole: dict[PilotId, Peer] = {}  # Holders of the complete object that can serve other pilots
        self.open: OrderedDict[PilotId, Peer] = OrderedDict()  # Holders with a free slot, which serve in turn
        # Heap, by rank, of pilots that fetch the object and can already serve parts of it
        self.relays: list[tuple[int, PilotId]] = []
        self.queued: dict[PilotId, int] = {}
        self.fetches: OrderedDict[PilotId, Fetch] = OrderedDict()  # Fetches in the order of their numbers
        self.able: dict[PilotId, Fetch] = {}
        self.reader: Fetch | None = None
        self.waiting: OrderedDict[PilotId, Fetch] = OrderedDict()
        self.underserved: OrderedDict[PilotId, Fetch] = OrderedDict()  # Fetches that may use more peers than they have
        self.stranded: OrderedDict[PilotId, Fetch] = OrderedDict()
        self.alone: dict[PilotId, Fetch] = {}
        self.lonely: dict[PilotId, None] = {}  # Pilots that no peer could serve
        self.unreadable: dict[PilotId, None] = {}
        self.reason = ""  # Why the last fetch of this object failed
        self.origin_bytes = 0
        self.peer_bytes = 0

    def remove_from_queues(self, fetch: Fetch) -> None:
        for queue in (self.waiting, self.underserved, self.stranded, self.alone, self.able):
            queue.pop(fetch.peer.id, None)
        if self.reader is fetch:
            self.reader = None


class Transfers:
    """All peers, objects and fetches. Each fetch is in the queue of its `FetchMode`, and in `serves` of its sources."""

    def __init__(self) -> None:
        self.limits = TransferLimits()
        self.objects: dict[str, TransferredObject] = {}
        self.peers: dict[PilotId, Peer] = {}
        self.caches: dict[str, dict[PilotId, Peer]] = {}  # Connected pilots, by name of the cache that they use
        # Objects with fetches that wait or may use more peers
        self.needy: dict[str, TransferredObject] = {}
        self.leaving: dict[PilotId, Peer] = {}  # Leaving pilots that stay until other pilots have copied their objects
        self.unsettled: dict[Fetch, None] = {}  # Fetches for which peers must be chosen
        self.freed: dict[Peer, None] = {}
        self.changed: dict[Fetch, None] = {}  # Fetches whose new plan must be sent to the pilot
        self.snapshots: dict[str, dict[str, dict[str, Snapshot]]] = {}  # Snapshots, by recipe key, device kind and form
        self.fetches = 0
        self.peer_bytes = 0
        self.lonely: dict[PilotId, None] = {}  # Pilots that found no peer for one of their objects

    def get_or_create_object(self, name: str) -> TransferredObject:
        found = self.objects.get(name)
        if found is None:
            found = self.objects[name] = TransferredObject(name)
        return found

    def objects_of_recipe(self, recipe: Recipe, *, kind: str | None = None) -> Iterator[ObjectRef]:
        """Yield the files that a recipe needs, and its snapshots for a device kind (None: for every kind)."""
        yield from recipe.objects
        for of, forms in self.snapshots.get(recipe.key, {}).items():
            if kind in (None, of):
                yield from (snapshot.object for snapshot in forms.values())

    def max_sources_of(self, object: TransferredObject) -> int:
        if object.ref.size_bytes <= self.limits.small_bytes:
            return 1
        return max(1, self.limits.sources - (len(object.fetches) > self.limits.close))

    @property
    def max_failed_peers(self) -> int:
        """Number of failed peers after which a pilot reads the origin."""
        return 1 if not self.peer_bytes and len(self.lonely) >= 3 else self.limits.tries

    def add_holder(self, peer: Peer, object: TransferredObject) -> None:
        object.holders[peer.id] = peer
        peer.has[object.ref.name] = object
        if peer.can_serve:
            object.whole[peer.id] = peer
            self._list_reliable_source(peer, object)

    def _list_reliable_source(self, peer: Peer, object: TransferredObject) -> None:
        """List a pilot as a sure source of an object (see `object_plan`), and plan its waiting receivers again."""
        for (name, _), child in peer.serves.items():
            if name == object.ref.name and child.mode is FetchMode.WAITING:
                self.unsettled[child] = None
        self.list_peer_as_source(peer, object)
        self.freed[peer] = None

    def remove_holder(self, peer: Peer, object: TransferredObject) -> None:
        """Record that a pilot no longer has an object. Fetches from this pilot get another source."""
        del peer.has[object.ref.name], object.holders[peer.id]
        peer.parked.pop(object.ref.name, None)
        self.stop_serving(peer, object)
        self._replace_lost_cache_source(peer, object)
        self.forget_if_unused(object)

    def stop_serving(self, peer: Peer, object: TransferredObject) -> None:
        """Stop using a pilot as a source of an object. Fetches from this pilot get another source."""
        object.whole.pop(peer.id, None)
        object.open.pop(peer.id, None)
        for (name, _), child in list(peer.serves.items()):
            if name == object.ref.name:
                self.remove_source(child, peer)
                self.unsettled[child] = None
        self.unsettled.update(dict.fromkeys(object.waiting.values()))

    def forget_if_unused(self, object: TransferredObject) -> None:
        if not object.fetches:
            object.unreadable.clear()
        if not object.fetches and not object.holders and not object.manifest:
            self.objects.pop(object.ref.name, None)

    def start_fetch(self, peer: Peer, object: TransferredObject) -> Fetch:
        """Start a fetch. If another pilot fetches the object into the same cache, wait for this other fetch instead."""
        self.fetches += 1
        fetch = Fetch(object, peer, self.fetches)
        fetch.leader = self._find_leading_fetch(fetch)  # the search must not find the new fetch itself
        object.fetches[peer.id] = peer.fetches[object.ref.name] = fetch
        if fetch.leader is None and self.find_peer_sharing_cache(fetch) is None:
            self.start_waiting(fetch)
        else:
            self.changed[fetch] = None
            self.set_mode(fetch, FetchMode.FOLLOWING)
        return fetch

    def start_waiting(self, fetch: Fetch) -> None:
        fetch.leader = None
        self.unsettled[fetch] = None
        self.set_mode(fetch, FetchMode.WAITING)

    def become_leader(self, fetch: Fetch) -> None:
        """Let a waiting fetch transfer the object itself, because its pilot reported a failed source."""
        near = self._fetches_into_cache(fetch.peer.cache, fetch.object)
        self.start_waiting(fetch)
        for other in near:
            if other is not fetch and (other.mode is not FetchMode.FOLLOWING or other.leader is not None):
                self._follow_fetch(other, fetch)

    def _follow_fetch(self, fetch: Fetch, leader: Fetch) -> None:
        """Let a fetch wait for another fetch into the same cache. A later number prevents circular waits."""
        object = fetch.object
        if fetch.mode is not FetchMode.FOLLOWING:
            for source in list(fetch.sources.values()):
                self.remove_source(fetch, source)
            self.set_mode(fetch, FetchMode.FOLLOWING)
            self.stop_serving(fetch.peer, object)
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
        return next((x for x in under_way if x.mode is not FetchMode.FOLLOWING), None)

    def _fetches_into_cache(self, cache: str, object: TransferredObject) -> list[Fetch]:
        found = (fetch for id in self.caches.get(cache, ()) if (fetch := object.fetches.get(id)) is not None)
        return sorted(found, key=lambda fetch: fetch.number)

    def find_peer_sharing_cache(self, fetch: Fetch) -> Peer | None:
        near = self.caches.get(fetch.peer.cache, {})
        return next((peer for id, peer in near.items() if id in fetch.object.holders), None)

    def end_fetch(self, fetch: Fetch, *, complete: bool = False) -> None:
        """End a fetch. If it is not `complete`, another fetch into the same cache starts instead."""
        object, peer = fetch.object, fetch.peer
        for source in list(fetch.sources.values()):
            self.remove_source(fetch, source)
        object.remove_from_queues(fetch)
        self._update_needy_objects(object)
        del object.fetches[peer.id], peer.fetches[object.ref.name]
        peer.parked.pop(object.ref.name, None)
        self.unsettled.pop(fetch, None)
        self.changed.pop(fetch, None)
        self._reassign_followers(fetch, complete=complete)
        if not complete:
            self.stop_serving(peer, object)
            self.forget_if_unused(object)
        self.start_origin_reads(object)

    def _reassign_followers(self, leader: Fetch, *, complete: bool) -> None:
        fetches = [x for x in self._fetches_into_cache(leader.peer.cache, leader.object) if x.leader is leader]
        for fetch in fetches:
            if complete:
                fetch.leader = None
                self.changed[fetch] = None
            elif fetch is fetches[0]:
                self.start_waiting(fetch)
            else:
                fetch.leader = fetches[0]

    def _replace_lost_cache_source(self, peer: Peer, object: TransferredObject) -> None:
        for fetch in self._fetches_into_cache(peer.cache, object):
            if (
                fetch.mode is FetchMode.FOLLOWING
                and fetch.leader is None
                and self.find_peer_sharing_cache(fetch) is None
            ):
                if (leader := self._find_leading_fetch(fetch)) is not None:
                    self._follow_fetch(fetch, leader)
                else:
                    self.start_waiting(fetch)

    def set_mode(self, fetch: Fetch, mode: FetchMode) -> None:
        object, id = fetch.object, fetch.peer.id
        object.remove_from_queues(fetch)
        before, fetch.mode = fetch.mode, mode
        match mode:
            case FetchMode.WAITING:
                object.waiting[id] = fetch
            case FetchMode.PEERS if (
                len(fetch.sources) < self.max_sources_of(object) and len(fetch.failed) < self.max_failed_peers
            ):
                object.underserved[id] = fetch
            case FetchMode.STRANDED:
                object.stranded[id] = fetch
                for source in list(fetch.sources.values()):
                    self.remove_source(fetch, source)
            case FetchMode.ALONE:
                object.alone[id] = fetch
            case FetchMode.READER:
                object.reader = fetch
        if mode in (FetchMode.WAITING, FetchMode.PEERS) and fetch.can_read_for_others:
            object.able[id] = fetch
        if mode is FetchMode.READER:
            self._list_reliable_source(fetch.peer, object)
        elif mode is FetchMode.PEERS and mode is not before:
            self.list_peer_as_source(fetch.peer, object)
            self.freed[fetch.peer] = None
        self._update_needy_objects(object)

    def start_origin_reads(self, object: TransferredObject) -> None:
        while object.stranded and len(object.alone) < self.limits.readers:
            fetch = next(iter(object.stranded.values()))
            self.set_mode(fetch, FetchMode.ALONE)
            self.changed[fetch] = None

    def _update_needy_objects(self, object: TransferredObject) -> None:
        if object.waiting or object.underserved or object.stranded:
            self.needy[object.ref.name] = object
        else:
            self.needy.pop(object.ref.name, None)

    def add_source(self, fetch: Fetch, source: Peer, *, replaces_last: bool = False) -> None:
        """Add a source to a fetch. `replaces_last`: True to replace its last source."""
        if replaces_last:
            self.remove_source(fetch, next(reversed(fetch.sources.values())))
        fetch.sources[source.id] = source
        source.serves[fetch.object.ref.name, fetch.peer.id] = fetch
        self.changed[fetch] = None

    def remove_source(self, fetch: Fetch, source: Peer) -> None:
        del fetch.sources[source.id], source.serves[fetch.object.ref.name, fetch.peer.id]
        self.changed[fetch] = None
        self.freed[source] = None
        parked, source.parked = source.parked, {}
        for object in parked.values():
            self.list_peer_as_source(source, object)

    def has_free_slot(self, peer: Peer, object: TransferredObject) -> bool:
        fetch = object.fetches.get(peer.id)
        sure = fetch is None or fetch.mode is FetchMode.READER
        return len(peer.serves) + (0 if sure else 1) < self.limits.serves

    def list_peer_as_source(self, peer: Peer, object: TransferredObject) -> None:
        """List a peer as a source of an object now, or as soon as the peer has a free slot."""
        if not peer.can_serve or peer.draining:
            return
        fetch = object.fetches.get(peer.id)
        if not self.has_free_slot(peer, object):
            peer.parked[object.ref.name] = object
        elif peer.id in object.whole:
            object.open[peer.id] = peer
        elif fetch is not None and object.queued.get(peer.id) != fetch.rank:
            object.queued[peer.id] = fetch.rank
            heapq.heappush(object.relays, (fetch.rank, peer.id))

    def find_source(self, fetch: Fetch, *, must_be_sure: bool) -> Peer | None:
        """Return a peer that can serve this fetch now, or None. `must_be_sure`: only a sure peer (`object_plan`)."""
        below = fetch.rank if must_be_sure else self.fetches + 1
        found = self._find_peer_with_whole_object(fetch) or self._find_relay_peer(fetch, below_rank=below)
        return found or self._find_leaving_peer(fetch)

    def _find_peer_with_whole_object(self, fetch: Fetch) -> Peer | None:
        candidates = fetch.object.open
        for _ in range(len(candidates)):  # skips current sources, busy peers, and peers that failed this fetch
            id, peer = next(iter(candidates.items()))
            if not self.has_free_slot(peer, fetch.object):
                del candidates[id]
                peer.parked[fetch.object.ref.name] = fetch.object
                continue
            candidates.move_to_end(id)
            if fetch.can_fetch_from(peer):
                return peer
        return None

    def _find_relay_peer(self, fetch: Fetch, *, below_rank: int) -> Peer | None:
        object, found = fetch.object, None
        heap, skipped = object.relays, list[tuple[int, PilotId]]()
        while heap and found is None and heap[0][0] < below_rank:
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
        if peer.draining or not peer.can_serve or source.mode not in (FetchMode.PEERS, FetchMode.READER):
            return False
        if self.has_free_slot(peer, object):
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
            if peer.draining and fetch.can_fetch_from(peer) and self.has_free_slot(peer, object):
                return peer
        return None
