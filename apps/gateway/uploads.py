"""`/v1/files`: the files that clients upload for batches, and the files of answers that batches write.

A file is a folder below the gateway's own: `data`, and `file.json` with what is told of it.
"""

from __future__ import annotations

import email.parser
import email.policy
import re
import secrets
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.common.openai.request import RequestRefused

KEPT_S = 30 * 86_400
"""Files, and what is told of batches, are removed when they are so old: as OpenAI keeps those of batches."""
_ID = re.compile(r"file-[0-9a-f]{24}")


class StoredFile(msgspec.Struct, frozen=True):
    """A file. `owner`: the name of the key that made it; empty where no key was wanted."""

    id: str
    owner: str
    filename: str
    purpose: str
    created_at: int
    bytes: int

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI has it."""
        return {
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created_at,
            "expires_at": self.created_at + KEPT_S, "filename": self.filename, "purpose": self.purpose,
            "status": "processed",
        }  # fmt: skip


class FileStore:
    """The files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, data: bytes | Path, *, filename: str, purpose: str, owner: str) -> StoredFile:
        """Keep bytes, or a copy of a file. Raises OSError, and keeps nothing then."""
        id = f"file-{secrets.token_hex(12)}"
        place = self._folder / id
        place.mkdir(mode=0o700, parents=True)
        try:
            if isinstance(data, Path):
                shutil.copyfile(data, place / "data")
            else:
                (place / "data").write_bytes(data)
            size = (place / "data").stat().st_size
            made = StoredFile(id, owner, filename, purpose, int(time.time()), size)
            (place / "file.json").write_bytes(msgspec.json.encode(made))  # last: a file without it is none
        except OSError:  # a full disk, most of the time: what has been written makes it no better
            shutil.rmtree(place, ignore_errors=True)
            raise
        return made

    def get(self, id: str, *, owner: str) -> StoredFile:
        """A file of this owner. Raises RequestRefused (404)."""
        if _ID.fullmatch(id):
            try:
                found = msgspec.json.decode((self._folder / id / "file.json").read_bytes(), type=StoredFile)
            except (OSError, msgspec.DecodeError):
                pass
            else:
                if found.owner == owner:
                    return found
        raise RequestRefused(f"there is no file {id!r:.80}", param="id", code="file_not_found", status=404)

    def data(self, id: str) -> Path:
        """Where a file's bytes lie."""
        return self._folder / id / "data"

    def all(self, *, owner: str) -> list[StoredFile]:
        """The files of this owner, the newest first."""
        found = []
        for place in self._folder.glob("file-*"):
            try:
                found.append(self.get(place.name, owner=owner))
            except RequestRefused:  # another one's, or just being made
                continue
        return sorted(found, key=lambda one: one.created_at, reverse=True)

    def remove(self, id: str, *, owner: str) -> None:
        """Forget a file. Raises RequestRefused (404)."""
        shutil.rmtree(self._folder / self.get(id, owner=owner).id)

    def remove_old(self, now: float, *, needed: Collection[str]) -> None:
        """Remove files that are old and not `needed`, and what is left of uploads that were cut off."""
        for place in self._folder.glob("file-*"):
            with suppress(OSError):
                if place.name not in needed and place.stat().st_mtime + KEPT_S < now:
                    shutil.rmtree(place)


def read_upload(content_type: str, body: bytes) -> tuple[str, str, bytes]:
    """The name, the purpose and the bytes of the file in a form. Raises RequestRefused."""
    head = b"Content-Type: " + content_type.encode("latin-1") + b"\r\n\r\n"
    form = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
    fields: dict[str, tuple[str, bytes]] = {}
    for part in form.iter_parts() if form.is_multipart() else ():
        name = part.get_param("name", header="content-disposition")
        payload = part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(payload, bytes):
            fields[name] = (part.get_filename() or "", payload)
    for name in ("file", "purpose"):
        if name not in fields:
            raise RequestRefused(f"{name} is missing", param=name, code="missing_required_parameter")
    purpose = fields["purpose"][1].decode(errors="replace")
    if purpose != "batch":
        raise RequestRefused(
            f"purpose is {purpose!r:.60}; only batch can be had here", param="purpose", code="invalid_value"
        )
    for name in fields.keys() - {"file", "purpose"}:
        text = f"{name:.80} is not supported here: files are removed after 30 days"
        raise RequestRefused(text, param=name, code="unsupported_parameter")
    filename, data = fields["file"]
    return filename or "file", purpose, data
