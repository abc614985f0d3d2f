"""Large payloads: arguments that wait in a file for their call to end, results that are read once.

A file of arguments is named by its content and its client, so calls of one client with equal arguments share it; it
goes when the last of them has ended. Another program of the session has its own: it ends at another time. A result's
file is its own and goes when it has been read. What a killed program leaves goes with its session.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from pathlib import Path
from uuid import uuid4

from stoker.contexts.objects import object_of
from stoker.contexts.recipe import ObjectRef
from stoker.protocol.calls import CallEnd


class LargeArguments:
    """The files of one client's large arguments, in the session's objects."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mine = uuid4().hex[:8]
        self._users: Counter[str] = Counter()
        self._lock = threading.RLock()  # a collected `map` may drop its files wherever a collection starts

    def put(self, data: bytes) -> ObjectRef:
        """Write bytes, for one call; they are called by their cache name. Raises OSError."""
        draft = self.folder / f"draft-{uuid4().hex}"
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
        except OSError:
            draft.unlink(missing_ok=True)  # what it holds is in the way of whatever else is to be written there
            raise
        ref = object_of(draft)
        place = self.folder / f"{ref.name}~{self._mine}"
        with self._lock:
            self._users[ref.name] += 1
            if self._users[ref.name] == 1 or not place.exists():
                draft.replace(place)
            else:  # a file that another call has named already must not change
                draft.unlink()
            # Nobody writes to it again, so that it is young does not matter.
            facts = place.stat()
            return ObjectRef(ref.name, ref.size_bytes, str(place), changed_ns=facts.st_mtime_ns, inode=facts.st_ino)

    def drop(self, ref: ObjectRef) -> None:
        """One call that used it has ended."""
        with self._lock:
            self._users[ref.name] -= 1
            if self._users[ref.name] <= 0:
                del self._users[ref.name]
                Path(ref.source).unlink(missing_ok=True)


def discard_result(end: CallEnd) -> None:
    """Remove the file of a result that the program does not take, if it has one."""
    payload = end.payload
    if isinstance(payload, ObjectRef) and payload.name.startswith("result-"):
        Path(payload.source).unlink(missing_ok=True)


def read_result(ref: ObjectRef) -> mmap.mmap | bytes:
    """The bytes of a result, mapped privately so that arrays in it need no copy. Its file goes. Raises OSError."""
    path = Path(ref.source)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if ref.size_bytes else b""
    if ref.name.startswith("result-"):
        path.unlink(missing_ok=True)
    return data
