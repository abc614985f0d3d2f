"""Pilots as each other's peers, objects, and fetches between them: the nouns of the plan of transfers (`objects`)."""

from __future__ import annotations

import enum
from collections import OrderedDict

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.protocol.ids import PilotId

_READER_RANK = -1


class Limits(msgspec.Struct, frozen=True):
    """Bounds of the plan. Sizes in bytes."""

    sources: int = 3
    """Peers from which a pilot gets one object at a time."""
    close: int = 8
    """Pilots that get an object from so many. Further ones get it from one less: so there are always places free near
    the origin, and the way from there grows with the logarithm of the pilots, not with their number."""
    serves: int = 4
    """Transfers that a pilot serves at a time, of all its objects. The last place is kept for objects that it has
    whole, or reads from their origin."""
    readers: int = 4
    """Pilots that read the origin of an object at a time because no peer could serve them. Otherwise one does."""
    tries: int = 6
    """Peers that may fail a pilot before it goes to the origin itself."""
    origin_tries: int = 8
    """Pilots that may fail to read an origin before nobody else tries."""
    small_bytes: int = 16 << 20
    """An object up to this size comes from one peer: several would not be quicker."""


class Snapshot(msgspec.Struct, frozen=True):
    """A loaded context in the form of this name, as an object, and the seconds that it took to make."""

    form: str
    object: ObjectRef
    made_s: float


class Way(enum.Enum):
    """How an object comes to a pilot."""

    WAITING = "waiting"
    """Nobody who is sure to have it has a place free; it may get parts from others meanwhile."""
    PEERS = "peers"
    """From peers, one of which has all of it, or is sure to have it earlier."""
    READER = "reader"
    """From its origin: the one pilot that reads it for all the others."""
    STRANDED = "stranded"
    """No peer could serve it: it waits until it may read the origin for itself alone."""
    ALONE = "alone"
    """From its origin, for itself alone."""
    FOLLOWING = "following"
    """Another pilot that uses the same cache gets it, or has got it just now."""


class Fetch:
    """An object on its way to a pilot. `number` counts all fetches, in the order in which they were asked for."""

    __slots__ = ("failed", "kept", "leader", "number", "object", "peer", "said", "sources", "unreadable", "way")

    def __init__(self, object: Object, peer: Peer, number: int) -> None:
        self.object = object
        self.peer = peer
        self.number = number
        self.way = Way.WAITING
        self.leader: Fetch | None = None
        """Of one that follows: the fetch into the same cache that is under way."""
        self.sources: dict[PilotId, Peer] = {}
        self.failed: dict[PilotId, None] = {}
        """Peers that did not serve it."""
        self.unreadable = False
        """The origin could not be read by this pilot."""
        self.said: tuple[tuple[PilotId, ...], bool] | None = None
        """What the pilot was told last: from whom, and whether it reads the origin."""
        self.kept = False
        """Nobody there has asked for it: it is handed on by one that leaves (`handing_on`)."""

    @property
    def able(self) -> bool:
        """Whether its pilot could read the origin for others."""
        return self.peer.serving and not self.peer.draining and not self.unreadable

    @property
    def rank(self) -> int:
        """Whoever has a smaller one has the object earlier, if nobody is lost."""
        return _READER_RANK if self.way is Way.READER else self.number

    def is_rooted_in(self, source: Peer) -> bool:
        """Whether this source is sure to have all of the object, sooner or later, whatever this fetch does."""
        if source.id in self.object.whole:
            return True
        other = self.object.fetches.get(source.id)
        return other is not None and other.rank < self.rank

    def may_come_from(self, peer: Peer) -> bool:
        """Whether nothing between the two forbids it."""
        return peer is not self.peer and peer.id not in self.sources and peer.id not in self.failed


class Peer:
    """A pilot, as far as objects go. It serves others if it has an address."""

    __slots__ = (
        "address", "blamed", "cache", "draining", "fetches", "hands_on", "has", "here", "id", "parked", "served",
        "serves", "wants",
    )  # fmt: skip

    def __init__(self, id: PilotId) -> None:
        self.id = id
        self.address = ""
        self.cache = ""
        self.here = False
        self.draining = False
        self.has: dict[str, Object] = {}
        self.fetches: dict[str, Fetch] = {}
        self.serves: dict[tuple[str, PilotId], Fetch] = {}
        self.parked: dict[str, Object] = {}
        """Objects that it could serve, had it a place free."""
        self.wants: dict[str, ObjectRef] = {}
        """What it was getting when its connection broke."""
        self.hands_on: dict[str, dict[PilotId, None]] = {}
        """Objects for which it stays, though it is to leave, and who was told to get each."""
        self.blamed = 0
        """Pilots that it failed although others served them."""
        self.served = 0
        """Pilots that got an object with its help."""

    @property
    def serving(self) -> bool:
        """Whether others may be sent to it."""
        return self.here and bool(self.address)


class Object:
    """An object, and where it is, goes, and comes from."""

    __slots__ = (
        "able", "alone", "fetches", "holders", "hungry", "lonely", "manifest", "open", "origin_bytes", "peer_bytes",
        "queued", "reader", "reason", "ref", "relays", "stranded", "unreadable", "waiting", "whole",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.ref = ObjectRef(name, 0)
        self.manifest = b""
        self.holders: dict[PilotId, Peer] = {}
        self.whole: dict[PilotId, Peer] = {}
        """Holders that serve others."""
        self.open: OrderedDict[PilotId, Peer] = OrderedDict()
        """Of those, the ones that may have a place free; who was given something last is last."""
        self.relays: list[tuple[int, PilotId]] = []
        """A heap by rank of those that are getting it and may have a place free; `queued` tells who is in it."""
        self.queued: dict[PilotId, int] = {}
        self.fetches: OrderedDict[PilotId, Fetch] = OrderedDict()
        """In the order of their numbers."""
        self.able: dict[PilotId, Fetch] = {}
        """Those that do not read its origin, but could for the others."""
        self.reader: Fetch | None = None
        self.waiting: OrderedDict[PilotId, Fetch] = OrderedDict()
        self.hungry: OrderedDict[PilotId, Fetch] = OrderedDict()
        """Those that are served by fewer peers than they may be."""
        self.stranded: OrderedDict[PilotId, Fetch] = OrderedDict()
        self.alone: dict[PilotId, Fetch] = {}
        self.lonely: dict[PilotId, None] = {}
        """Pilots that no peer could serve."""
        self.unreadable: dict[PilotId, None] = {}
        """Pilots that could not read its origin."""
        self.reason = ""
        """What went wrong last."""
        self.origin_bytes = 0
        self.peer_bytes = 0

    @property
    def scarcity(self) -> int:
        """The smaller, the rarer."""
        return len(self.whole)
