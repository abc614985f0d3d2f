"""Where those find each other who want the same object and have no manager yet to plan for them: at the session's seed.

A pilot that starts on a bare node fetches its environment before it can speak to the manager. It says to the seed what
it wants and where it serves what it has already, is told of others, and says so again every few seconds; pilots that
run in that environment say it too, seldom. The seed remembers an address for a while after it was said last. So a
hundred pilots that start at once read the seed about once, and the rest from each other.
"""

from __future__ import annotations

import random
import threading
import time

from stoker.pilot.transfer import wire

TOLD = 16
"""The most addresses that one answer has: chosen by chance, so that nobody is everybody's first."""
FORGOTTEN_S = 180.0
_MOST = 20_000


class Meetings:
    """The seed's side: who was here for which object. Any thread may call it."""

    def __init__(self, *, chance: random.Random | None = None) -> None:
        self._lock = threading.Lock()
        self._said_at: dict[str, dict[str, float]] = {}
        self._chance = chance or random.Random()

    def meet(self, name: str, address: str) -> list[str]:
        """Somebody at this address has the object or gets it; some of the others, by their addresses."""
        now = time.monotonic()
        with self._lock:
            here = self._said_at.setdefault(name, {})
            for old in [one for one, at in here.items() if now - at > FORGOTTEN_S]:
                del here[old]
            others = [one for one in here if one != address]
            if address and len(here) < _MOST:
                here[address] = now
            return self._chance.sample(others, min(TOLD, len(others)))


def meet(name: str, address: str, *, seed: str, key: bytes, limits: wire.Limits = wire.LIMITS) -> list[str]:
    """Say to the seed that this address has an object, or gets it; addresses of others. Raises PeerError."""
    channel = wire.connect(seed, key=key, limits=limits)
    try:
        channel.send({"op": "meet", "object": name, "address": address})
        others = channel.receive().get("others")
        if not isinstance(others, list) or not all(isinstance(one, str) for one in others):
            raise wire.PeerError(f"{seed} does not say whom it has met")
        return others
    finally:
        channel.close()
