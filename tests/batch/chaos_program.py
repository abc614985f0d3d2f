"""A program on the head node that uses a joined session until the stop file exists."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import random
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import stoker

session, name, folder = sys.argv[1:]
log, stop = os.path.join(folder, "ran"), os.path.join(folder, "stop")

ROUND_S = 10.0
"""Seconds that a program uses one context."""
FILE_BYTES = 8 << 20
LARGE_BYTES = 3 << 19
"""Bytes of a result larger than a message."""
LARGE_EVERY = 40
STEPS = 10
STEP_S = 0.1
OPEN = {"plain": 12, "steps": 2, "gang": 1}
"""Number of calls of each kind in flight in `mixed`."""
LAST_S = 300.0
"""Seconds after `stop` until an open call counts as lost."""
KEPT = 20
"""Maximum wrong results and failures that are reported in full."""


class Found:
    def __init__(self) -> None:
        self.asked = Counter[str]()
        self.results = Counter[str]()
        self.wrong: list[str] = []
        self.failed: list[str] = []
        self._told_at = 0.0

    def result(self, kind: str, number: int, *, right: bool, got: object) -> None:
        self.results[kind] += 1
        if not right:
            self.wrong.append(f"{name}-{kind}-{number}: {got!r}"[:400])
        self.tell()

    def failure(self, kind: str, number: int, error: BaseException) -> None:
        self.results[kind] += 1
        self.failed.append(f"{name}-{kind}-{number}: {type(error).__name__}: {error}"[:2000])
        self.tell()

    def tell(self) -> None:
        if time.monotonic() - self._told_at > 0.5:
            self._told_at = time.monotonic()
            write(f"{name}.now", self.results)

    def end(self) -> None:
        write(f"{name}.now", self.results)
        missing = {kind: self.asked[kind] - self.results[kind] for kind in self.asked}
        write(
            f"{name}.json",
            {
                "asked": self.asked,
                "results": self.results,
                "lost": sum(count for count in missing.values() if count > 0),
                "twice": -sum(count for count in missing.values() if count < 0),
                "wrong": self.wrong[:KEPT],
                "failed": self.failed[:KEPT],
                "many_wrong": len(self.wrong),
                "many_failed": len(self.failed),
            },
        )


def write(file: str, content: object) -> None:
    draft = Path(folder, f"{file}.draft")
    draft.write_text(json.dumps(content))
    draft.replace(Path(folder, file))


def note(call: str, what: str) -> None:
    """Log that a call begins or ends (`what`), with this node and process."""
    with open(log, "a") as file:
        file.write(f"{call} {os.environ.get('SLURMD_NODENAME', 'head')} {os.getpid()} {what}\n")


# ---- a map over contexts with files


@stoker.context(memory="200 MB", files=["path"])
def model(path: str) -> str:
    time.sleep(0.3)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def work(digest: str, item: tuple[int, bytes]) -> tuple[int, str, bytes]:
    number, blob = item
    note(f"{name}-{number}", "begins")
    time.sleep(0.05)
    note(f"{name}-{number}", "ends")
    return 3 * number, digest, blob[::-1]


def file_of(turn: int) -> tuple[str, str]:
    """Write the input file of a round, with equal content in every program; return path and digest. Remove the file of
    60 rounds ago.
    """
    content = random.Random(turn).randbytes(FILE_BYTES)
    Path(folder, f"model-{turn - 60}-{name}.bin").unlink(missing_ok=True)
    path = Path(folder, f"model-{turn}-{name}.bin")
    path.write_bytes(content)
    return str(path), hashlib.sha256(content).hexdigest()


def blob_of(number: int) -> bytes:
    """Return the input text of a call, which the call returns reversed."""
    return bytes([number % 256, 1]) * (LARGE_BYTES // 2 if number % LARGE_EVERY == 0 else 1)


def mapped(found: Found) -> None:
    """Map over one context after another until `stop` exists."""

    def items(turn: int) -> Iterator[tuple[int, bytes]]:
        while not os.path.exists(stop) and time.time() // ROUND_S == turn:
            number = found.asked["map"]
            found.asked["map"] += 1
            yield number, blob_of(number)

    while not os.path.exists(stop):
        turn = int(time.time() // ROUND_S)
        path, digest = file_of(turn)
        number = found.asked["map"]
        try:
            for got in stoker.map(stoker.app(context=model(path))(work), items(turn), window=100):
                right = got == (3 * number, digest, blob_of(number)[::-1])
                found.result("map", number, right=right, got=(got[:2], digest))
                number += 1
        except Exception as error:
            found.failure("map", number, error)
            found.asked["map"] = number + 1  # the map cancelled the calls queued after this item


# ---- concurrent calls of several kinds


@stoker.context
def nothing() -> int:
    return 7


@stoker.app(context=nothing())
def plain(seven: int, number: int) -> int:
    note(f"{name}-plain-{number}", "begins")
    print("plain call", number)
    time.sleep(0.02)
    note(f"{name}-plain-{number}", "ends")
    return seven * number


@stoker.app(context=nothing())
def steps(seven: int, number: int) -> int:
    from stoker.contexts import saved_state

    first, total = saved_state((0, 0))
    note(f"{name}-steps-{number}", "begins")
    for step in range(first, STEPS):
        time.sleep(STEP_S)
        total += seven * number
        stoker.progress(step + 1, STEPS, state=(step + 1, total))
    note(f"{name}-steps-{number}", "ends")
    return total


def take(peer: socket.socket, count: int) -> bytes:
    heard = b""
    while len(heard) < count:
        more = peer.recv(count - len(heard))
        if not more:
            raise ConnectionError("the other side has hung up")
        heard += more
    return heard


def greet(place: Any) -> socket.socket:
    """Return a socket to the other rank. Check the gang key first, because the test also connects strangers to this
    port. Raises OSError.
    """
    if place.rank:
        host, _, port = place.rendezvous.rpartition(":")
        peer = socket.create_connection((host, int(port)), timeout=30)
        peer.sendall(hmac.digest(place.key, b"rank 1", "sha256"))
        return peer
    until = time.monotonic() + 30
    place.listener.settimeout(30)
    while time.monotonic() < until:
        peer = place.listener.accept()[0]
        peer.settimeout(2)
        try:
            if hmac.compare_digest(take(peer, 32), hmac.digest(place.key, b"rank 1", "sha256")):
                peer.settimeout(30)
                return peer
        except OSError:
            pass
        peer.close()
    raise TimeoutError("the other rank has not come")


@stoker.app(context=nothing(), gang=(2, 2))
def gang(seven: int, number: int) -> int:
    from stoker.errors import GangBroken

    place = stoker.gang()
    note(f"{name}-gang-{number}-{place.rank}", "begins")
    own = number + place.rank
    try:
        with greet(place) as peer:
            peer.sendall(own.to_bytes(8, "little"))
            heard = take(peer, 8)
    except OSError as error:
        raise GangBroken(f"rank {place.rank} lost the other: {error}") from error
    note(f"{name}-gang-{number}-{place.rank}", "ends")
    return seven * (own + int.from_bytes(heard, "little"))


RIGHT = {
    "plain": lambda number: 7 * number,
    "steps": lambda number: 7 * number * STEPS,
    "gang": lambda number: 7 * (2 * number + 1),
}


def mixed(found: Found) -> None:
    apps: dict[str, Any] = {"plain": plain, "steps": steps, "gang": gang}
    under_way: dict[str, deque[tuple[int, Future[int]]]] = {kind: deque() for kind in OPEN}
    until = float("inf")
    while until > time.time() and (not os.path.exists(stop) or any(under_way.values())):
        if os.path.exists(stop):
            until = min(until, time.time() + LAST_S)
        for kind, calls in under_way.items():
            while len(calls) < OPEN[kind] and not os.path.exists(stop):
                number = found.asked[kind]
                found.asked[kind] += 1
                calls.append((number, apps[kind](number)))
            for number, future in [each for each in calls if each[1].done()]:
                calls.remove((number, future))
                if (error := future.exception()) is not None:
                    found.failure(kind, number, error)
                else:
                    got = future.result()
                    found.result(kind, number, right=got == RIGHT[kind](number), got=got)
        time.sleep(0.02)


def main() -> None:
    found = Found()
    with stoker.load(session=session, run_dir=os.path.join(folder, "runinfo")):
        (mixed if name == "mixed" else mapped)(found)
    found.end()


if __name__ == "__main__":
    main()
