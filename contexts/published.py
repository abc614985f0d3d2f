"""Which objects the seed of a session may hand out, and where they lie: a file that clients append to and the seed
reads.

    <session folder>/objects/index.jsonl        one line an object: {"name": ..., "size_bytes": ..., "source": ...}

The client says so when it defines a recipe with objects, and nothing else on its disk is ever served.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from stoker.contexts.recipe import ObjectRef
from stoker.whole_files import write_all

_FILE = "index.jsonl"


def publish(folder: Path, refs: tuple[ObjectRef, ...]) -> None:
    """Let the seed of a session serve these objects from where they lie. `folder` is the session's objects.

    Raises OSError. Saying it twice is fine. Several clients may append at once, so nothing is ever cut off: a line that
    a full disk or a killed client left unfinished is ended, and publishes nothing.
    """
    lines = [json.dumps({"name": ref.name, "size_bytes": ref.size_bytes, "source": ref.source}) + "\n" for ref in refs]
    if not lines:
        return
    file = os.open(folder / _FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(file).st_size
        unfinished = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        write_all(file, ("\n" * unfinished + "".join(lines)).encode())
    finally:
        os.close(file)


class Published:
    """What was published in a session's folder of objects, read again as it grows."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _FILE
        self._read = 0
        self._known: dict[str, ObjectRef] = {}

    def find(self, name: str) -> ObjectRef | None:
        """The object of that name, with where it lies; None if nobody published it."""
        if name not in self._known:
            self._read_on()
        return self._known.get(name)

    def _read_on(self) -> None:
        try:
            with self._file.open("rb") as file:
                file.seek(self._read)
                fresh = file.read()
        except OSError:
            return
        whole, _, _ = fresh.rpartition(b"\n")
        self._read += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            try:
                said = json.loads(line)
                ref = ObjectRef(name=said["name"], size_bytes=said["size_bytes"], source=said["source"])
            except (ValueError, RecursionError, KeyError, TypeError):
                continue  # a line that was damaged publishes nothing
            self._known[ref.name] = ref
