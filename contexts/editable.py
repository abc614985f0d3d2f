"""Packages that were installed as a link to their source (`pip install -e`), and whether that has been edited.

They travel by name, like all that is installed. But a library of a session that stays up outlives the edit, and would
run the code of before: so a function brings the stamps of these packages along, and a library that has imported one at
another stamp imports it anew (`carried_modules`). A recipe's key covers the stamps of its loader's packages.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable

from stoker.contexts.user_code import is_linked, place_of

_FRESH_S = 0.2
"""A stamp is not taken again within this time."""
_MOST_FILES = 20_000
_stamps: dict[str, tuple[float, str]] = {}


def stamp_of(name: str) -> str:
    """A digest of the names, sizes and times of change of all source files of the linked package that the module `name`
    belongs to; empty for every other module."""
    top = name.partition(".")[0]
    if not is_linked(top):
        return ""
    known = _stamps.get(top)
    if known is None or time.monotonic() - known[0] > _FRESH_S:
        place = place_of(top)
        known = _stamps[top] = (time.monotonic(), _stamp(place) if place else "")
    return known[1]


def stamps_of(names: Iterable[str] = ()) -> dict[str, str]:
    """The stamps of all linked packages that this process has imported or that `names` lists."""
    tops = {name for name in list(sys.modules) if "." not in name}
    tops.update(name.partition(".")[0] for name in names)
    return {top: stamp_of(top) for top in sorted(filter(is_linked, tops)) if stamp_of(top)}


def _stamp(place: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in _source_files(place):
        try:
            status = os.stat(file)
        except OSError:
            continue
        digest.update(
            f"{os.path.relpath(file, place)} {status.st_size} {status.st_mtime_ns}\n".encode(errors="replace")
        )
    return digest.hexdigest()


def _source_files(place: str) -> list[str]:
    if not os.path.isdir(place):
        return [place]
    found: list[str] = []
    for folder, folders, files in os.walk(place):
        folders[:] = sorted(each for each in folders if not each.startswith((".", "__pycache__")))
        found += [os.path.join(folder, file) for file in sorted(files) if file.endswith((".py", ".so"))]
        if len(found) > _MOST_FILES:
            break
    return found
