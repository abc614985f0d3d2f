"""Where the ranks of gangs meet: rank 0 listens, and the other ranks are told its address.

The address may arrive before the call. The reading thread notes it here, and the thread that runs the call waits here.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable

from stoker.contexts.ambient import Gang
from stoker.errors import GangBroken
from stoker.protocol.calls import GangPlace
from stoker.protocol.ids import CallId
from stoker.protocol.to_agent import Listens
from stoker.units import show_seconds

_KEPT = 64  # calls whose address is remembered although they have not asked: more are in no library's hands at a time


class GangMeetings:
    """The gangs of one library. `say` sends a message to the agent; `key` is the secret of the calls' keys."""

    def __init__(self, *, host: str, say: Callable[[Listens], None], key: bytes = b"") -> None:
        self._host = host
        self._say = say
        self._key = key
        self._addresses: dict[int, str] = {}
        self._changed = threading.Condition()

    def told(self, call: int, address: str) -> None:
        """Rank 0 of a call's gang awaits the others here; empty: this rank is called off."""
        with self._changed:
            self._addresses[call] = address
            while len(self._addresses) > _KEPT:
                del self._addresses[next(iter(self._addresses))]
            self._changed.notify_all()

    def over(self, call: int) -> None:
        """Forget a rank whose part has ended."""
        if self._addresses:  # after every call, and hardly ever is there one
            with self._changed:
                self._addresses.pop(call, None)

    def seat(self, call: CallId, place: GangPlace, *, limit_s: float) -> Gang:
        """Return a rank's place, once the meeting point is known. Raises GangBroken if it stays unknown."""
        if place.size == 1:
            return Gang(rank=0, size=1)
        if place.rank == 0:
            return self._listen(call, place)
        ends_at = time.monotonic() + limit_s
        with self._changed:
            while call not in self._addresses and not place.rendezvous:
                if not self._changed.wait(ends_at - time.monotonic()):
                    raise GangBroken(
                        f"rank {place.rank} of {place.size} was not told within {show_seconds(limit_s)} where rank 0"
                        " is: did it not begin, or does it not call stoker.gang()?",
                        rank=place.rank, size=place.size,
                    )  # fmt: skip
            address = self._addresses.pop(call, "") or place.rendezvous
        if not address:
            raise GangBroken(f"rank {place.rank} of {place.size} was called off", rank=place.rank, size=place.size)
        return Gang(rank=place.rank, size=place.size, rendezvous=address, key=self._key_of(call))

    def _listen(self, call: CallId, place: GangPlace) -> Gang:
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server((self._host, 0), family=family, backlog=place.size + 64)
        except OSError as error:
            raise GangBroken(
                f"rank 0 of {place.size} cannot listen on {self._host}: {error}", rank=0, size=place.size
            ) from error
        port = listener.getsockname()[1]
        self._say(Listens(call=call, port=port))
        shown = f"[{self._host}]" if ":" in self._host else self._host
        return Gang(rank=0, size=place.size, rendezvous=f"{shown}:{port}", listener=listener, key=self._key_of(call))

    def _key_of(self, call: CallId) -> bytes:
        return hmac.digest(self._key, f"call {call}".encode(), "sha256")
