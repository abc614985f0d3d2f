"""What a `stoker batch` and a gateway tell each other through files, and the form of lines that both write.

The gateway writes how many calls may have begun into a file, the *permits*; the batch writes how many have ended, and
their tokens, into the file next to it, the *use*. Both count from the beginning of the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

OK = 200
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that JSON takes as they are and at which some readers, such as `str.splitlines`, end a line."""


class BatchUse(msgspec.Struct, frozen=True):
    """Calls of a `stoker batch` that have ended, and their tokens."""

    ended: int = 0
    tokens: int = 0


class PermitFile:
    """The permits at `path`, and the use of them. Writing raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._use_path = path.with_suffix(".use")

    def allowed(self, *, known: int) -> int:
        """How many calls may have begun; `known` while that cannot be read."""
        with suppress(OSError, ValueError):
            return int(self._path.read_text())
        return known

    def allow(self, number: int) -> None:
        """Let this number of calls begin."""
        _replace(self._path, str(number).encode())

    def use(self, *, known: BatchUse) -> BatchUse:
        """The use of the permits; `known` while that cannot be read."""
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self._use_path.read_bytes(), type=BatchUse)
        return known

    def note_use(self, use: BatchUse) -> None:
        """Write the use of the permits."""
        _replace(self._use_path, msgspec.json.encode(use))

    def reset(self) -> None:
        """Start from 0."""
        self._use_path.unlink(missing_ok=True)
        self.allow(0)


def json_line(value: Any) -> bytes:
    """A line of JSON that no reader ends early."""
    text = json.dumps(value, ensure_ascii=False)
    for character, escaped in _LINE_ENDS.items():
        text = text.replace(character, escaped)
    return f"{text}\n".encode()


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Write a line of JSON for each value."""
    with path.open("wb") as file:
        file.writelines(map(json_line, values))


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_name(f"{path.name}-draft")
    draft.write_bytes(data)
    draft.replace(path)
