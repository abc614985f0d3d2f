"""Single exchanges: an object from wherever it can be had, a result to the seed. For who has no manager to plan for
it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import FetchOutcome, ObjectSource
from stoker.pilot.transfer.fetch import ObjectFetch
from stoker.pilot.transfer.sources import SourceAccess

_CHUNK = 1 << 20


SEED_FILE = "seed.address"
"""In the session's folder, once its seed listens: its `host:port`."""


def read_key(file: str | os.PathLike[str]) -> bytes:
    """A session's transfer key, from `keys/transfer.json` in its folder. Raises OSError, ValueError."""
    try:
        return bytes.fromhex(json.loads(Path(file).read_bytes())["secret"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} holds no transfer key: {error}") from error


def get(
    name: str, target: Path, *, addresses: Iterable[str], key: bytes, limits: wire.WireLimits = wire.LIMITS
) -> FetchOutcome:
    """Bring an object to `target`, whole or not at all; what a try that failed has got is used by the next.

    Raises PeerError when none of the addresses serves it, OSError when the disk does not take it.
    """
    draft = target.with_name(f".{target.name}.draft")
    fetch = ObjectFetch(name, draft, means=SourceAccess(key=key, limits=limits))
    fetch.offer(ObjectSource(address=address, origin=True) for address in addresses)
    outcome = fetch.run(alone_s=0.0)
    os.replace(draft, target)
    return outcome


def put(
    name: str, parts: Sequence[wire.Buffer], *, address: str, key: bytes, limits: wire.WireLimits = wire.LIMITS
) -> str:
    """Hand a result to the seed; returns the path at which it lies there. Raises PeerError."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    channel = wire.connect(address, key=key, limits=limits)
    try:
        size = sum(len(part) for part in parts)
        channel.send({"op": "put", "name": name, "size": size, "sha256": whole.hexdigest()})
        _answer(channel)
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _CHUNK):
                channel.send_body(view[start : start + _CHUNK])
        return str(_answer(channel)["path"])
    finally:
        channel.close()


def _answer(channel: wire.Channel) -> dict[str, object]:
    header = channel.receive()
    if header.get("error") or header["body"]:
        raise wire.PeerError(f"the session's seed did not take it: {header.get('text') or header.get('error')}")
    return header
