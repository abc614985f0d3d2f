"""The files through which a `stoker batch` and a gateway communicate, and the JSON lines that both write.

The *permits* file of the gateway says how many calls may have started. The *use* file of the batch, next to it, says
how many have ended, and their tokens. Both count from the start of the process.
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
"""Characters that JSON allows in strings and at which some readers (`str.splitlines`) end a line."""


class BatchUse(msgspec.Struct, frozen=True):
    """Ended calls of a `stoker batch`, and their tokens."""

    ended: int = 0
    tokens: int = 0


class PermitFile:
    """The permits at `path`, and their use. Writing raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._use_path = path.with_suffix(".use")

    def allowed(self, *, known: int) -> int:
        """Return the permits; `known` if they cannot be read."""
        with suppress(OSError, ValueError):
            return int(self._path.read_text())
        return known

    def allow(self, number: int) -> None:
        _replace(self._path, str(number).encode())

    def use(self, *, known: BatchUse) -> BatchUse:
        """Return the use of the permits; `known` if it cannot be read."""
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self._use_path.read_bytes(), type=BatchUse)
        return known

    def note_use(self, use: BatchUse) -> None:
        _replace(self._use_path, msgspec.json.encode(use))

    def reset(self) -> None:
        self._use_path.unlink(missing_ok=True)
        self.allow(0)


def json_line(value: Any) -> bytes:
    """Encode a value as a line of JSON without characters at which some readers end a line."""
    text = json.dumps(value, ensure_ascii=False)
    for character, escaped in _LINE_ENDS.items():
        text = text.replace(character, escaped)
    return f"{text}\n".encode()


def write_lines(path: Path, values: Iterable[Any]) -> None:
    with path.open("wb") as file:
        file.writelines(map(json_line, values))


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_name(f"{path.name}-draft")
    draft.write_bytes(data)
    draft.replace(path)
