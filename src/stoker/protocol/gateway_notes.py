"""What the gateways of a session say of their models: a small file each, in the session's folder.

    <session folder>/gateways/NAME.json

A gateway writes its note anew every few seconds and removes it as it ends; the note of one that was killed stays, and
its age tells. Readers ask no gateway: `stoker status` works without a key, and wherever the folder can be read.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.decoding import UNREADABLE
from stoker.protocol.session import SessionFolder
from stoker.whole_files import draft_of

WRITTEN_EVERY_S = 2.0
SILENT_AFTER_S = 15.0
"""A note that is older is of a gateway that was killed, or cannot write."""


class ServedModelFigures(msgspec.Struct, frozen=True):
    """One model of a gateway. `key`, `recipe`: its context's key and name (empty: its folder has not been read; if it
    could not be, `trouble` says why). Times are seconds; `ttft_s` is the median of the last streams, None of none.
    `met`: the share of the last streams that met their objectives, 0 to 1; None: no objective, or no stream yet."""

    name: str
    key: str = ""
    recipe: str = ""
    running: int = 0
    tokens_per_s: float = 0.0
    ttft_s: float | None = None
    ttft_objective_s: float | None = None
    met: float | None = None
    trouble: str = ""


class GatewayNote(msgspec.Struct, frozen=True):
    """A gateway: where clients find it (a URL, or the path of a Unix socket), its process and host, and its models.
    `at`: when it was written, in seconds since 1970."""

    address: str
    host: str
    pid: int
    models: tuple[ServedModelFigures, ...] = ()
    at: float = 0.0

    def silent_s(self, now: float) -> float:
        """For how long the gateway has said nothing; 0 for one that still writes."""
        age = now - self.at
        return age if age > SILENT_AFTER_S else 0.0


def write_gateway_note(session: Path, name: str, note: GatewayNote) -> None:
    """Write the note of the gateway `name` (a file name) into the folder of a session. Raises OSError."""
    file = _file(session, name)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    with draft_of(file) as draft:
        draft.write_bytes(msgspec.json.encode(note))


def remove_gateway_note(session: Path, name: str) -> None:
    """Remove the note of a gateway that ends."""
    with suppress(OSError):
        _file(session, name).unlink()


def gateway_notes(folder: SessionFolder) -> list[GatewayNote]:
    """The notes of a session's gateways, by address. One that cannot be read is left out."""
    found = []
    for file in (folder.path / "gateways").glob("[!.]*.json"):
        with suppress(OSError, *UNREADABLE):
            found.append(msgspec.json.decode(file.read_bytes(), type=GatewayNote))
    return sorted(found, key=lambda note: note.address)


def _file(session: Path, name: str) -> Path:
    return session / "gateways" / f"{name}.json"
