"""The files through which `stoker batch` and a gateway communicate, and functions that read and write JSON.

The gateway writes how many calls may start into the *permits* file. The batch writes the number of ended calls and
their tokens into the *use* file. All numbers are totals since the start of the batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stoker.decoding import UNREADABLE

T = TypeVar("T")
OK = 200
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that some line readers (`str.splitlines`) treat as line ends, with their JSON escapes."""


class BatchUse(msgspec.Struct, frozen=True):
    ended: int = 0
    tokens: int = 0


class PermitFile:
    """Reads and writes the permits file, and the use file next to it. Methods that write may raise OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._use_path = path.with_suffix(".use")

    def read_permits(self, *, default: int) -> int:
        """Return the number of permits in the file, or `default` if the file is unreadable."""
        with suppress(OSError, ValueError):
            return int(self._path.read_text())
        return default

    def write_permits(self, number: int) -> None:
        replace_file(self._path, str(number).encode())

    def read_batch_use(self, *, default: BatchUse) -> BatchUse:
        return read_json(self._use_path, BatchUse) or default

    def write_batch_use(self, use: BatchUse) -> None:
        replace_file(self._use_path, msgspec.json.encode(use))

    def reset_counts(self) -> None:
        self._use_path.unlink(missing_ok=True)
        self.write_permits(0)


def encode_json_line(value: Any) -> bytes:
    """Encode a value as a line of JSON, with Unicode line separators escaped."""
    text = json.dumps(value, ensure_ascii=False)
    for character, escaped in _LINE_ENDS.items():
        text = text.replace(character, escaped)
    return f"{text}\n".encode()


def read_json(path: Path, kind: type[T]) -> T | None:
    """Return the value in a file, or None if the file is missing or unreadable."""
    with suppress(OSError, *UNREADABLE):
        return msgspec.json.decode(path.read_bytes(), type=kind)
    return None


def read_json_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield each line of a file, decoded to `kind`. Skip lines that cannot be decoded, and a missing file."""
    with suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            with suppress(*UNREADABLE):
                yield msgspec.json.decode(line, type=kind)


def write_lines(path: Path, values: Iterable[Any]) -> None:
    with path.open("wb") as file:
        file.writelines(map(encode_json_line, values))


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically. Only one process at a time may write the file. Raises OSError."""
    draft = path.with_name(f"{path.name}-draft")
    draft.write_bytes(data)
    draft.replace(path)
