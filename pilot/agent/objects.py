"""Objects that this pilot has, wants and serves: what the manager is told of them, and what it plans.

What is in the cache needs nobody. What is not is wanted (`WantObjects`); the manager says where it may be had
(`FetchObject`: other pilots, or the place that it comes from), again whenever that changes, and hears when it is here,
which sources failed, and what has left the cache. Bytes are moved by threads; everything here happens in the agent's
loop.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.errors import SessionError, StokerError
from stoker.manager.protocol.ids import PilotId
from stoker.manager.protocol.session import SessionFolder
from stoker.manager.protocol.to_manager import FetchFailed, ObjectArrival, ObjectsGone, ObjectsHere, WantObjects
from stoker.manager.protocol.to_pilot import FetchObject
from stoker.pilot.agent.failures import is_ours
from stoker.pilot.cache import Bringing, CacheShelf, InUseError, ObjectCache, Pin, snapshot_names
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import Outcome, Source
from stoker.pilot.transfer.client import SEED_FILE, read_key
from stoker.pilot.transfer.server import Server

if TYPE_CHECKING:
    from stoker.pilot.agent.agent import Agent

log = logging.getLogger("stoker.pilot")

HAND_ON_S = 5.0
"""How long a pilot that could leave goes on serving those who are getting something from it."""


class Lack(msgspec.Struct, frozen=True):
    """Why objects are not here; `ours`: for what this pilot's disk lacks; `in_use`: because libraries use its cache."""

    reason: str
    ours: bool = False
    in_use: bool = False


Done = Callable[[dict[str, Pin], Lack | None], None]
"""Gets pins by name, and why there is none for some (None: all are here)."""


class Request:
    """Somebody here waits for objects."""

    def __init__(self, names: Sequence[str], done: Done) -> None:
        self._missing = set(names)
        self._pins: dict[str, Pin] = {}
        self._done = done
        self._failed = False

    def fail(self, lack: Lack) -> None:
        """One of them will not come."""
        if not self._failed:
            self._failed = True
            for pin in self._pins.values():
                pin.release()
            self._done({}, lack)

    def has(self, name: str, pin: Pin) -> None:
        """One of them is here."""
        if self._failed:
            pin.release()
            return
        self._missing.discard(name)
        self._pins[name] = pin
        if not self._missing:
            self._done(self._pins, None)


class Want:
    """An object that is on its way, or waits until the manager names a source."""

    def __init__(self, ref: ObjectRef) -> None:
        self.ref = ref
        self.requests: list[Request] = []
        self.order: FetchObject | None = None
        """What the manager has said last of where it may be had."""
        self.bringing: Bringing | None = None
        self.trouble = ""
        """Why the place that it comes from could not be read here."""


class Objects:
    """A pilot's objects: see the module's text."""

    def __init__(self, session: SessionFolder, cache: ObjectCache) -> None:
        self.cache = cache
        self.shelf = CacheShelf(cache)
        self.wants: dict[str, Want] = {}
        self.told: set[str] = set()
        """What the manager believes to be here."""
        self.key = b""
        with suppress(OSError, ValueError, KeyError):
            self.key = read_key(session.key_file("transfer"))
        self.gang_key = hmac.digest(self.key, b"gangs", "sha256") if self.key else b""
        """What libraries make the keys of gangs from; transfers cannot be had with it."""
        self.carried = session.is_carried
        """Whether this pilot sees no file of the session, but for those that came with it."""
        self._session = session
        self.host = _own_address(session)
        """What other pilots reach this machine at."""
        self.server = _serve(self.shelf, self.host, self.key)
        self._stays_until = 0.0
        self._held_until = 0.0

    @property
    def peer(self) -> str:
        """Where other pilots reach this one; empty where they do not."""
        return self.server.address if self.server is not None else ""

    def seed(self) -> str:
        """Where the session's seed listens; empty if it has none that this pilot could use."""
        try:
            return (self._session.path / SEED_FILE).read_text().strip() if self.key else ""
        except OSError:
            return ""

    def listed(self) -> tuple[str, ...]:
        """For the hello: everything that is here."""
        self.told = set(self.cache.sizes())
        return tuple(sorted(self.told))

    def stay(self, *, until: float) -> None:
        """The manager has others get what only this pilot has, and says so again when they have it."""
        self._held_until = until

    def hands_on(self, now: float) -> bool:
        """Whether a pilot that has nothing else to do had better stay a little: others are getting objects from it."""
        if now < self._held_until:
            return True
        if self.server is None or not self.server.serving:
            return False
        self._stays_until = self._stays_until or now + HAND_ON_S
        return now < self._stays_until

    def close(self) -> None:
        """Serve and fetch nothing any more."""
        if self.server is not None:
            self.server.close()
        for want in self.wants.values():
            if want.bringing is not None:
                want.bringing.stop()


def bring(agent: Agent, refs: Sequence[ObjectRef], done: Done) -> None:
    """Have these objects pinned here; `done` is called in the loop, once, now or later."""
    request = Request([ref.name for ref in refs], done)

    def look() -> None:
        found: dict[str, Pin] = {}
        try:
            for ref in refs:
                pin = agent.cache.find(ref.name)
                if pin is not None:
                    found[ref.name] = pin
        except OSError as error:
            lack = Lack(f"the object cache {agent.cache.folder} can't be used: {error}", ours=is_ours(error))
            agent.later(lambda: request.fail(lack))
            return
        agent.later(lambda: _looked(agent, refs, request, found))

    threading.Thread(target=look, name="objects-look", daemon=True).start()


def told_sources(agent: Agent, order: FetchObject) -> None:
    """The manager says where an object may be had."""
    objects, name = agent.objects, order.object.name
    want = objects.wants.get(name)
    if want is None and order.keep and name not in objects.told:
        want = objects.wants[name] = Want(order.object)
        objects.shelf.expect(name)
    if want is None:  # it came meanwhile, or nobody here wants it any more
        if name in objects.told:
            agent.link.post(ObjectsHere((ObjectArrival(name, order.object.size_bytes),)))
        else:
            agent.link.post(ObjectsGone((name,)))
        return
    want.order = order
    if order.origin:  # a file system that hangs must not hold up the loop
        find = threading.Thread(target=_find_origin, args=(agent, want, order), name="objects-origin", daemon=True)
        find.start()
    elif order.peers:
        _offer(agent, want, order, [])
    else:
        nowhere = f"the object {name} can be had nowhere: no pilot that has it is reached"
        _give_up(agent, want, Lack(want.trouble or nowhere))


def again(agent: Agent) -> None:
    """The manager welcomes this pilot (again): say once more what is wanted, since its answer may have been lost."""
    wanted = tuple(want.ref for want in agent.objects.wants.values())
    if wanted:
        agent.link.post(WantObjects(wanted))


def look(agent: Agent) -> None:
    """Tell what has come and gone without this pilot: others of this host use the same cache."""
    objects = agent.objects
    here = objects.cache.sizes()
    gone = objects.told - here.keys()
    fresh = here.keys() - objects.told - objects.wants.keys()
    if gone:
        snapshot_names.tidy(objects.cache)
        agent.link.post(ObjectsGone(tuple(sorted(gone))))
    if fresh:
        agent.link.post(ObjectsHere(tuple(ObjectArrival(name, here[name]) for name in sorted(fresh))))
    objects.told = (objects.told - gone) | fresh


# ---- inside


def _own_address(session: SessionFolder) -> str:
    """This machine's address on the network that leads to the manager."""
    try:
        host, _ = wire.split_address(session.read().address.removeprefix("tcp://"))
        return wire.route_to(host)
    except (OSError, ValueError, SessionError):
        return "127.0.0.1"


def _serve(shelf: CacheShelf, host: str, key: bytes) -> Server | None:
    """Serve other pilots."""
    if not key:
        log.info("the session has no transfer key: this pilot serves no objects to others")
        return None
    try:
        return Server(shelf, key=key, host=host)
    except (OSError, ValueError) as error:
        log.warning("this pilot serves no objects to others: %s", error)
        return None


def _looked(agent: Agent, refs: Sequence[ObjectRef], request: Request, found: dict[str, Pin]) -> None:
    objects = agent.objects
    fresh = []
    for ref in refs:
        if ref.name in found:
            continue
        want = objects.wants.get(ref.name)
        if want is None:
            want = objects.wants[ref.name] = Want(ref)
            objects.shelf.expect(ref.name)
            fresh.append(ref)
        want.requests.append(request)
    if fresh:
        agent.link.post(WantObjects(tuple(fresh)))
    for name, pin in found.items():
        request.has(name, pin)


def _find_origin(agent: Agent, want: Want, order: FetchObject) -> None:
    """Where an object comes from, as far as this pilot reaches it: its path, or the session's seed."""
    path, seed = want.ref.source, agent.objects.seed()
    seen = bool(path) and not (seed and agent.objects.carried) and Path(path).exists()
    if seen:
        origin = [Source(path=path, origin=True)]
    else:
        origin = [Source(address=seed, label="the session's seed", origin=True)] if seed else []
    agent.later(lambda: _offer(agent, want, order, origin))


def _offer(agent: Agent, want: Want, order: FetchObject, origin: list[Source]) -> None:
    """Have it brought from there, unless the manager has said something else meanwhile."""
    name = want.ref.name
    if agent.objects.wants.get(name) is not want or want.order is not order:
        return
    if want.bringing is None:
        want.bringing = _start(agent, want)
    peers = [Source(address=peer.address, label=peer.pilot) for peer in order.peers]
    want.bringing.offer([*peers, *origin], manifest=order.manifest)
    if order.origin and not origin:
        where = f"at {want.ref.source}" if want.ref.source else "anywhere that this pilot knows"
        _origin_failed(agent, want, f"the object {name} is not {where}; put it on a file system that compute nodes see")


def _start(agent: Agent, want: Want) -> Bringing:
    def lost(source: Source, why: str) -> None:
        agent.later(lambda: _lost(agent, want, source, why))

    bringing = Bringing(agent.cache, want.ref, key=agent.objects.key, lost=lost, begun=agent.objects.shelf.grows)

    def run() -> None:
        try:
            pin, outcome = bringing.run()
        except StokerError as error:
            lack = Lack(str(error), ours=is_ours(error), in_use=isinstance(error, InUseError))
        except Exception as error:  # a fault of ours: what waits must hear of it
            log.exception("bringing %s failed", want.ref.name)
            lack = Lack(f"the object {want.ref.name} could not be brought: {type(error).__name__}: {error}")
        else:
            agent.later(lambda: _arrived(agent, want, pin, outcome))
            return
        agent.later(lambda: _give_up(agent, want, lack))

    threading.Thread(target=run, name="objects-bring", daemon=True).start()
    return bringing


def _arrived(agent: Agent, want: Want, pin: Pin, outcome: Outcome) -> None:
    objects, name = agent.objects, want.ref.name
    if objects.wants.get(name) is want:  # else it was given up, just before it came
        del objects.wants[name]
        objects.shelf.settled(name)
    objects.told.add(name)
    log.info(
        "%s is here: %d bytes from where it comes from, %d from peers, %.2f s",
        name,
        outcome.origin_bytes,
        outcome.peer_bytes,
        outcome.seconds,
    )
    arrival = ObjectArrival(
        name, want.ref.size_bytes, outcome.origin_bytes, outcome.peer_bytes, round(outcome.seconds, 3)
    )
    agent.link.post(ObjectsHere((arrival,)))
    for request in want.requests:
        request.has(name, pin.again())
    pin.release()


def _lost(agent: Agent, want: Want, source: Source, why: str) -> None:
    """A source is of no use: the manager names others, or says that there are none."""
    if agent.objects.wants.get(want.ref.name) is not want:
        return
    if source.origin:
        _origin_failed(agent, want, f"the object {want.ref.name} could not be brought from {source}: {why}")
    else:
        agent.link.post(FetchFailed(name=want.ref.name, peers=(PilotId(source.label),), reason=why))


def _origin_failed(agent: Agent, want: Want, why: str) -> None:
    want.trouble = why
    agent.link.post(FetchFailed(name=want.ref.name, origin=True, reason=why))


def _give_up(agent: Agent, want: Want, lack: Lack) -> None:
    objects, name = agent.objects, want.ref.name
    if objects.wants.get(name) is not want:
        return
    del objects.wants[name]
    objects.shelf.settled(name)
    if want.bringing is not None:
        want.bringing.stop()
    agent.link.post(ObjectsGone((name,)))
    for request in want.requests:
        request.fail(lack)
