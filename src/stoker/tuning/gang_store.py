"""The key-value store that connects the ranks of a gang. Rank 0 serves the store to ranks that know the gang's key.

torch.distributed's own store answers any stranger who reaches its port. In this store, both sides of a connection first
prove that they know the key (`pilot.transfer.wire`). Every message header has a MAC and the digest of the value that
follows. Values are not encrypted.

Gloo and NCCL find their ranks through this store. The connections of Gloo and NCCL check no key (docs/security.md).
"""

from __future__ import annotations

import datetime
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import distributed

from stoker.pilot.transfer import wire
from stoker.pilot.transfer.server import ObjectServer

MOST_BYTES = 1 << 30
"""Maximum size of a value in bytes."""
_WAIT_S = 0.5
"""Maximum seconds that rank 0 waits for a missing value before it answers."""
_IDLE_S = 7 * 86_400.0
"""Maximum seconds without data on a connection. A rank is silent while it computes."""


class StoreError(RuntimeError):
    """A value was not set in time, or rank 0 is lost."""


class LocalValues:
    """The values on rank 0, by name. Thread-safe. `wait_s`: maximum seconds to wait for missing values."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, name: str, value: bytes) -> None:
        with self._changed:
            self._values[name] = value
            self._changed.notify_all()

    def get(self, name: str, *, wait_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: name in self._values, wait_s)
            return self._values.get(name)

    def add(self, name: str, amount: int) -> int:
        with self._changed:
            found = int(self._values.get(name, b"0")) + amount
            self._values[name] = str(found).encode()
            self._changed.notify_all()
            return found

    def has(self, names: Sequence[str], *, wait_s: float = 0.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: all(name in self._values for name in names), wait_s)

    def compare_set(self, name: str, expected: bytes, desired: bytes) -> bytes:
        """Set the value if it equals `expected` (empty: no value). Return the value after the operation."""
        with self._changed:
            there = self._values.get(name)
            if there == expected or (there is None and not expected):
                self._values[name] = desired
                self._changed.notify_all()
            return self._values.get(name, expected)

    def delete(self, name: str) -> bool:
        with self._changed:
            return self._values.pop(name, None) is not None

    def count(self) -> int:
        with self._changed:
            return len(self._values)


class RemoteValues:
    """Access of another rank to the `LocalValues` of rank 0. Thread-safe. Raises StoreError if rank 0 is lost."""

    def __init__(self, channel: wire.Channel) -> None:
        self._channel = channel
        self._one_at_a_time = threading.Lock()

    def set(self, name: str, value: bytes) -> None:
        self._ask({"op": "set", "name": name}, value)

    def get(self, name: str, *, wait_s: float) -> bytes | None:
        answer, value = self._ask_until_found({"op": "get", "name": name}, wait_s=wait_s)
        return value if answer.get("found") else None

    def add(self, name: str, amount: int) -> int:
        return int(self._ask({"op": "add", "name": name, "amount": amount})[0]["sum"])

    def has(self, names: Sequence[str], *, wait_s: float = 0.0) -> bool:
        return bool(self._ask_until_found({"op": "has", "names": list(names)}, wait_s=wait_s)[0].get("found"))

    def compare_set(self, name: str, expected: bytes, desired: bytes) -> bytes:
        return self._ask({"op": "compare-set", "name": name, "expected": len(expected)}, expected + desired)[1]

    def delete(self, name: str) -> bool:
        return bool(self._ask({"op": "delete", "name": name})[0].get("found"))

    def count(self) -> int:
        return int(self._ask({"op": "count"})[0]["count"])

    def close(self) -> None:
        self._channel.close()

    def _ask_until_found(self, question: dict[str, Any], *, wait_s: float) -> tuple[dict[str, Any], bytes]:
        until = time.monotonic() + wait_s
        while True:
            left = until - time.monotonic()
            answer, value = self._ask({**question, "wait_s": max(0.0, min(left, _WAIT_S))})
            if answer.get("found") or left <= 0:
                return answer, value

    def _ask(self, question: dict[str, Any], value: bytes = b"") -> tuple[dict[str, Any], bytes]:
        try:
            with self._one_at_a_time:
                _send(self._channel, question, value)
                answer = self._channel.receive()
                return answer, _body(self._channel, answer)
        except (wire.PeerError, OSError) as error:
            raise StoreError(f"rank 0, which serves the rendezvous, is lost: {error}") from error


class RankStore(distributed.Store):  # type: ignore[misc]  # torch is untyped for mypy
    """The `torch.distributed.Store` of one rank. Blocking methods raise StoreError after `limit_s` seconds."""

    def __init__(self, values: LocalValues | RemoteValues, *, limit_s: float, close: Callable[[], None]) -> None:
        super().__init__()
        self._values = values
        self._limit_s = limit_s
        self.close = close

    def set(self, name: str, value: bytes | str) -> None:
        self._values.set(name, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, name: str) -> bytes:
        found = self._values.get(name, wait_s=self._limit_s)
        if found is None:
            raise StoreError(f"the key {name} was not set within {self._limit_s:g} s")
        return found

    def add(self, name: str, amount: int) -> int:
        return self._values.add(name, amount)

    def wait(self, names: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        seconds = self._limit_s if timeout is None else timeout.total_seconds()
        if not self._values.has(names, wait_s=seconds):
            raise StoreError(f"not all of the keys {', '.join(names)} were set within {seconds:g} s")

    def check(self, names: Sequence[str]) -> bool:
        return self._values.has(names)

    def compare_set(self, name: str, expected: bytes | str, desired: bytes | str) -> bytes:
        one, other = (each.encode() if isinstance(each, str) else bytes(each) for each in (expected, desired))
        return self._values.compare_set(name, one, other)

    def delete_key(self, name: str) -> bool:
        return self._values.delete(name)

    def num_keys(self) -> int:
        return self._values.count()


def serve(listener: socket.socket, *, key: bytes, limit_s: float) -> RankStore:
    listener.setblocking(True)
    values = LocalValues()
    limits = wire.WireLimits(silence_s=_IDLE_S)
    server = ObjectServer(_NoObjects(), key=key, listener=listener, limits=limits, more=_answers(values))
    return RankStore(values, limit_s=limit_s, close=server.close)


def reach(address: str, *, key: bytes, limit_s: float) -> RankStore:
    values = RemoteValues(wire.connect(address, key=key, limits=wire.WireLimits(silence_s=limit_s + 10.0)))
    return RankStore(values, limit_s=limit_s, close=values.close)


class _NoObjects:
    def lend(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002  # any name is accepted
        return nullcontext()

    def expects(self, name: str) -> bool:  # noqa: ARG002  # any name is accepted
        return False


def _answers(values: LocalValues) -> dict[str, Callable[[wire.Channel, dict[str, Any]], None]]:
    """Return the request handlers of rank 0. A malformed request raises PeerError, which closes its connection."""

    def answer(work: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]) -> Any:
        def handle(channel: wire.Channel, question: dict[str, Any]) -> None:
            given = _body(channel, question)
            try:
                said, value = work(question, given)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise wire.PeerError(f"a rank sent a malformed request: {error}") from error
            _send(channel, said, value)

        return handle

    def set_one(question: dict[str, Any], given: bytes) -> tuple[dict[str, Any], bytes]:
        values.set(str(question["name"]), given)
        return {}, b""

    def get_one(question: dict[str, Any], _: bytes) -> tuple[dict[str, Any], bytes]:
        found = values.get(str(question["name"]), wait_s=_patience(question))
        return {"found": found is not None}, found or b""

    def has(question: dict[str, Any], _: bytes) -> tuple[dict[str, Any], bytes]:
        return {"found": values.has([str(name) for name in question["names"]], wait_s=_patience(question))}, b""

    def compare_set(question: dict[str, Any], given: bytes) -> tuple[dict[str, Any], bytes]:
        cut = int(question["expected"])
        return {}, values.compare_set(str(question["name"]), given[:cut], given[cut:])

    return {
        "set": answer(set_one),
        "get": answer(get_one),
        "add": answer(lambda question, _: ({"sum": values.add(str(question["name"]), int(question["amount"]))}, b"")),
        "has": answer(has),
        "compare-set": answer(compare_set),
        "delete": answer(lambda question, _: ({"found": values.delete(str(question["name"]))}, b"")),
        "count": answer(lambda _question, _: ({"count": values.count()}, b"")),
    }


def _patience(question: dict[str, Any]) -> float:
    return max(0.0, min(_WAIT_S, float(question["wait_s"])))


def _send(channel: wire.Channel, header: dict[str, Any], value: bytes) -> None:
    digest = {"sha256": hashlib.sha256(value).hexdigest()} if value else {}
    channel.send({**header, **digest}, value)


def _body(channel: wire.Channel, header: dict[str, Any]) -> bytes:
    """Read the value after a header. Raises PeerError if the value does not match the header."""
    size = header["body"]
    if size > MOST_BYTES:
        raise wire.PeerError(f"a value of {size} bytes is longer than {MOST_BYTES} bytes")
    data = bytearray(size)
    channel.receive_body(memoryview(data))
    if size and hashlib.sha256(data).hexdigest() != header.get("sha256"):
        raise wire.PeerError("a value was changed in transit")
    return bytes(data)
