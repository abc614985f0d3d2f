"""`python -m stoker.pilot.transfer.seed --session DIR`: serves a session's objects to pilots without shared files.

The seed runs next to the manager, serves files of recipes and large arguments, and receives large results. Its address
is in `seed.address` in the session folder. The seed exits with the session.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker import connections, locks
from stoker.config import load_site
from stoker.connections import split_address
from stoker.contexts.objects import PublishedObjects, is_object_name, read_object_manifest
from stoker.contexts.recipe import ObjectRef
from stoker.errors import StokerError
from stoker.log_files import log_to_file
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import ObjectCopy
from stoker.pilot.transfer.fetch import SEED_FILE, read_key
from stoker.pilot.transfer.meeting import SeedMeetings, answer_report
from stoker.pilot.transfer.server import ObjectServer
from stoker.protocol.session import SessionFolder
from stoker.whole_files import draft_file, write_all, write_whole

log = logging.getLogger("stoker.transfer")

# Maximum number of pilots served at once: one pilot reads a shared object, but each fetches its own arguments.
MOST_PEERS = 32

_RESULT = re.compile(r"result-[0-9a-f]{1,16}-[0-9a-f]{12}")
_CHUNK = 1 << 20
_POLL_S = 0.5


class Seed:
    """Answers requests to a session's seed. Thread-safe."""

    def __init__(self, objects: Path) -> None:
        self._objects = objects
        self._published = PublishedObjects(objects)
        self._meetings = SeedMeetings()
        self._lock = threading.Lock()

    def serve(self, *, key: bytes, host: str, ports: tuple[int, int] = (0, 0)) -> ObjectServer:
        more = {"put": self._receive_result, "meet": self._answer_meet_request}
        return ObjectServer(
            self,
            key=key,
            host=host,
            ports=ports,
            most=MOST_PEERS,
            other_handlers=more,
            resend_delay=self._meetings.resend_delay_s,
        )

    @contextmanager
    def lend_copy(self, name: str) -> Iterator[ObjectCopy | None]:
        """Yield the original object, or None if the object is unknown or has changed."""
        ref = self._find_object(name)
        copy = None
        if ref is not None:
            try:
                copy = ObjectCopy(Path(ref.source), name, read_object_manifest(ref), whole=True)
            except (OSError, ValueError, StokerError) as error:
                log.warning("%s cannot be served: %s", name, error)
        yield copy

    def is_fetching(self, name: str) -> bool:  # noqa: ARG002  # always False
        """Return False, because a seed has complete objects only."""
        return False

    def _find_object(self, name: str) -> ObjectRef | None:
        if not is_object_name(name):
            return None
        with self._lock:
            ref = self._published.find(name)
        if ref is None:  # the object may be arguments, which each client writes to its own file
            ref = next((ObjectRef(name, 0, str(place)) for place in self._objects.glob(f"{name}~*")), None)
        return ref

    def _answer_meet_request(self, channel: wire.Channel, request: dict[str, Any]) -> None:
        channel.send({"others": answer_report(self._meetings, request)})

    def _receive_result(self, channel: wire.Channel, request: dict[str, Any]) -> None:
        name, size, digest = request.get("name"), request.get("size"), request.get("sha256")
        if not isinstance(name, str) or not _RESULT.fullmatch(name) or type(size) is not int or size < 0:
            channel.send({"error": "refused", "text": f"{name!r} of {size} bytes is not a result"})
            return
        channel.send({"go": True})
        place = self._objects / name
        try:
            with draft_file(place) as draft:
                if _receive_body_into_file(channel, draft, size) != digest:
                    raise OSError("it was changed in transit")
        except OSError as error:  # the unread bytes of the result make the connection useless
            channel.send({"error": "refused", "text": f"{place} could not be written: {error}"})
            raise wire.PeerError(f"{name} was refused: {error}") from error
        channel.send({"path": str(place)})


def _receive_body_into_file(channel: wire.Channel, into: Path, size: int) -> str:
    whole = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    with os.fdopen(os.open(into, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
        while size:
            chunk = buffer[: min(size, _CHUNK)]
            channel.receive_body(chunk)
            whole.update(chunk)
            size -= len(chunk)
            write_all(file.fileno(), chunk)
    return whole.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve objects until the session ends or SIGTERM arrives."""
    parser = argparse.ArgumentParser(
        prog="python -m stoker.pilot.transfer.seed", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--session", required=True, metavar="DIR", help="the session's folder")
    parser.add_argument(
        "--parent", type=int, default=os.getppid(), metavar="PID", help="process id of the manager that starts the seed"
    )
    options = parser.parse_args(arguments)
    session = SessionFolder(options.session)
    log_to_file(session.path / "seed.log")
    connections.raise_descriptor_limit()
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the client
    try:
        lock = os.open(session.path / "seed.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while not locks.try_lock(lock):
            if stopped.wait(_POLL_S) or _has_session_ended(session) or os.getppid() != options.parent:
                return 0
        server = _start_server(session)
    except (OSError, ValueError, StokerError) as error:
        log.error("the seed of %s cannot listen: %s", session.path, error)
        return 1
    log.info("serving %s at %s", session.objects, server.address)
    untold = _write_address(session, server.address)
    if untold:
        log.warning("%s; retrying until it succeeds", untold)
    while not stopped.wait(_POLL_S) and not _has_session_ended(session):
        untold = untold and _write_address(session, server.address)
    server.close()
    return 0


def _write_address(session: SessionFolder, address: str) -> str:
    file = session.path / SEED_FILE
    try:
        write_whole(file, address.encode())
    except OSError as error:
        return f"the seed's address cannot be written to {file}: {error.strerror}"
    return ""


def _has_session_ended(session: SessionFolder) -> bool:
    return not session.objects.is_dir() or bool(session.end_reason())


def _start_server(session: SessionFolder) -> ObjectServer:
    seed = Seed(session.objects)
    key = read_key(session.key_file("transfer"))
    host, _ = split_address(session.read().address.removeprefix("tcp://"))
    with suppress(OSError, ValueError):
        before = split_address((session.path / SEED_FILE).read_text())
        if before[0] == host:
            return seed.serve(key=key, host=host, ports=(before[1], before[1]))
    sites = [load_site(file) for file in sorted(session.sites.glob("*.toml"))]
    return seed.serve(key=key, host=host, ports=sites[0].session.port_range if sites else (0, 0))


if __name__ == "__main__":
    sys.exit(main())
