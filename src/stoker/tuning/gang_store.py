"""The key-value store that connects the ranks of a gang. Rank 0 serves the store to ranks that know the gang's key.

torch.distributed's own store answers any stranger who reaches its port. Here both sides of a connection first prove
that they know the key (`pilot.transfer.wire`), and messages have a MAC. Values are not encrypted. Gloo and NCCL find
their ranks through this store; their own connections check no key (docs/security.md).
"""

from __future__ import annotations

import datetime
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import distributed

from stoker.pilot.transfer import wire
from stoker.pilot.transfer.server import ObjectServer

MOST_VALUE_BYTES = 1 << 30
_LONGEST_WAIT_S = 0.5
"""Maximum seconds that rank 0 waits for missing values before it answers that they are missing."""
_IDLE_S = 7 * 86_400.0
"""Maximum seconds without data on a connection; large, because a rank sends nothing while it computes."""
_OPERATIONS = ("set", "get", "add", "has", "compare-set", "delete", "count")

Answer = tuple[dict[str, Any], bytes]


class StoreError(RuntimeError):
    """A value was not set in time, or rank 0 is lost."""


class StoredValues:
    """The values on rank 0, by name. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def apply_operation(self, question: dict[str, Any], given: bytes = b"") -> Answer:
        """Carry out an operation. Return the fields of the answer, and the value that follows them."""
        with self._changed:
            self._changed.notify_all()  # wake the threads in `wait_for`; they check their values after this operation
            values, name = self._values, question.get("name", "")
            match question["op"]:
                case "set":
                    values[name] = given
                    return {}, b""
                case "get" | "has" as operation:
                    names, wait_s = question["names"], max(0.0, min(_LONGEST_WAIT_S, float(question["wait_s"])))
                    found = self._changed.wait_for(lambda: all(each in values for each in names), wait_s)
                    return {"found": found}, values[names[0]] if found and operation == "get" else b""
                case "add":
                    total = int(values.get(name, b"0")) + int(question["amount"])
                    values[name] = str(total).encode()
                    return {"sum": total}, b""
                case "compare-set":
                    cut = int(question["expected"])
                    if values.get(name, b"") == given[:cut]:
                        values[name] = given[cut:]
                    return {}, values.get(name, given[:cut])
                case "delete":
                    return {"found": values.pop(name, None) is not None}, b""
                case _:
                    return {"count": len(values)}, b""


class RankStore(distributed.Store):  # type: ignore[misc]  # torch is untyped for mypy
    """The `torch.distributed.Store` of one rank. `ask`: function that asks rank 0 to carry out an operation. Methods
    that wait for values raise StoreError after `limit_s` seconds.
    """

    def __init__(
        self, ask: Callable[[dict[str, Any], bytes], Answer], *, limit_s: float, close: Callable[[], None]
    ) -> None:
        super().__init__()
        self._ask = ask
        self._limit_s = limit_s
        self.close = close

    def set(self, name: str, value: bytes | str) -> None:
        self._ask({"op": "set", "name": name}, _to_bytes(value))

    def get(self, name: str) -> bytes:
        found, value = self._wait("get", [name], self._limit_s)
        if not found:
            raise StoreError(f"the key {name} was not set within {self._limit_s:g} s")
        return value

    def add(self, name: str, amount: int) -> int:
        return int(self._ask({"op": "add", "name": name, "amount": amount}, b"")[0]["sum"])

    def wait(self, names: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        seconds = self._limit_s if timeout is None else timeout.total_seconds()
        if not self._wait("has", names, seconds)[0]:
            raise StoreError(f"not all of the keys {', '.join(names)} were set within {seconds:g} s")

    def check(self, names: Sequence[str]) -> bool:
        return self._wait("has", names, 0.0)[0]

    def compare_set(self, name: str, expected: bytes | str, desired: bytes | str) -> bytes:
        one = _to_bytes(expected)
        return self._ask({"op": "compare-set", "name": name, "expected": len(one)}, one + _to_bytes(desired))[1]

    def delete_key(self, name: str) -> bool:
        return bool(self._ask({"op": "delete", "name": name}, b"")[0]["found"])

    def num_keys(self) -> int:
        return int(self._ask({"op": "count"}, b"")[0]["count"])

    def _wait(self, operation: str, names: Sequence[str], wait_s: float) -> tuple[bool, bytes]:
        until = time.monotonic() + wait_s
        while True:
            left_s = until - time.monotonic()
            answer, value = self._ask({"op": operation, "names": list(names), "wait_s": left_s}, b"")
            if answer["found"] or left_s <= 0:
                return bool(answer["found"]), value


def _to_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def serve_store(listener: socket.socket, *, key: bytes, limit_s: float) -> RankStore:
    listener.setblocking(True)
    values = StoredValues()
    more = dict.fromkeys(_OPERATIONS, partial(_answer_request, values))
    limits = wire.WireLimits(silence_s=_IDLE_S)
    server = ObjectServer(_NoObjects(), key=key, listener=listener, limits=limits, other_handlers=more)
    return RankStore(values.apply_operation, limit_s=limit_s, close=server.close)


def _answer_request(values: StoredValues, channel: wire.Channel, question: dict[str, Any]) -> None:
    """Answer a request. Raises PeerError, which closes the connection, for a malformed request."""
    given = _receive_value(channel, question)
    try:
        said, value = values.apply_operation(question, given)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise wire.PeerError(f"a rank sent a malformed request: {error}") from error
    _send_message(channel, said, value)


def connect_to_store(address: str, *, key: bytes, limit_s: float) -> RankStore:
    channel = wire.connect_to_peer(address, key=key, limits=wire.WireLimits(silence_s=limit_s + 10.0))
    one_at_a_time = threading.Lock()

    def ask(question: dict[str, Any], given: bytes) -> Answer:
        try:
            with one_at_a_time:
                _send_message(channel, question, given)
                answer = channel.receive()
                return answer, _receive_value(channel, answer)
        except (wire.PeerError, OSError) as error:
            raise StoreError(f"rank 0, which serves the rendezvous, is lost: {error}") from error

    return RankStore(ask, limit_s=limit_s, close=channel.close)


class _NoObjects:
    def lend_copy(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002  # any name is accepted
        return nullcontext()

    def is_fetching(self, name: str) -> bool:  # noqa: ARG002  # any name is accepted
        return False


def _send_message(channel: wire.Channel, header: dict[str, Any], value: bytes) -> None:
    digest = {"sha256": hashlib.sha256(value).hexdigest()} if value else {}
    channel.send({**header, **digest}, value)


def _receive_value(channel: wire.Channel, header: dict[str, Any]) -> bytes:
    """Read the value that follows a header. Raises PeerError if the value does not match the header."""
    size = header["body"]
    if size > MOST_VALUE_BYTES:
        raise wire.PeerError(f"a value of {size} bytes is longer than {MOST_VALUE_BYTES} bytes")
    data = bytearray(size)
    channel.receive_body(memoryview(data))
    if size and hashlib.sha256(data).hexdigest() != header.get("sha256"):
        raise wire.PeerError("a value was changed in transit")
    return bytes(data)
