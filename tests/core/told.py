"""A cluster of pilots for tests of the transfer plan."""

from __future__ import annotations

from collections import deque

from core.builders import Cluster

from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot

BIG = ObjectRef("file-big.gguf", 1 << 30, "/models/big.gguf")
SMALL = ObjectRef("file-small", 1000, "/models/config.json")
LLM = Recipe("llm", "llm", b"loader", (BIG, SMALL))
Told = tuple[tuple[str, ...], bool]  # (source pilots, True to read the origin)


class Peers(Cluster):
    """A cluster in which pilots serve each other."""

    def here(self, *names: str, has: tuple[ObjectRef, ...] = (), serves: bool = True, cache: str = "") -> Peers:
        for name in names:
            address = f"{name}:7000" if serves else ""
            objects = tuple(ref.name for ref in has)
            self.hello(name, objects=objects, peer=address, cache=cache, acknowledged=self.taken(name))
            self.hears(name, to_pilot.PilotWelcome)
        return self

    def give_up(self, *names: str) -> Peers:
        """Report that these pilots no longer have the objects."""
        for name in names:
            self.report(name, say.ObjectsGone((BIG.name, SMALL.name)))
        return self.forget()

    def want(self, *names: str, refs: tuple[ObjectRef, ...] = (BIG,)) -> Peers:
        for name in names:
            self.report(name, say.WantObjects(refs))
        return self

    def arrive(self, name: str, ref: ObjectRef = BIG, *, origin: int = 0, peer: int = 0) -> Peers:
        self.report(name, say.ObjectsCached((say.ObjectArrival(ref.name, ref.size_bytes, origin, peer),)))
        return self

    def fail(self, name: str, *peers: str, ref: ObjectRef = BIG, origin: bool = False) -> Peers:
        self.report(name, say.FetchFailed(ref.name, peers, origin, "connection timed out"))
        return self

    def orders(self, name: str) -> list[to_pilot.FetchObject]:
        mail, self.mail[name] = self.mail.get(name, deque()), deque()
        return [message for message in mail if isinstance(message, to_pilot.FetchObject)]

    def told(self, name: str) -> Told | None:
        """Return the sources in the last unread order to a pilot; None without an order."""
        orders = self.orders(name)
        return (tuple(peer.pilot for peer in orders[-1].peers), orders[-1].origin) if orders else None


def leave(peers: Peers, name: str) -> to_pilot.Exit:
    """Release a pilot's block; return the order to the pilot."""
    peers.core.state.pilots[name].block = "b1"
    peers.by_hand = True
    peers.tell("ana", say.ReleaseBlock("b1"))
    return exits(peers, name)[-1]


def exits(peers: Peers, name: str) -> list[to_pilot.Exit]:
    return [message for message in peers.mail.get(name, ()) if isinstance(message, to_pilot.Exit)]


def needing(peers: Peers) -> Peers:
    """Submit a call for a context with the big object; no device is free."""
    return peers.define(LLM).call("1", context="llm")
