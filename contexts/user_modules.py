"""The user's own modules that functions import when they run, read without importing them.

The sources of these modules travel with a function (`carried_modules` imports them), with those that they import. A
module's `version` is the digest of its code, of its packages' and of all that these import of the user's own. Comments
do not count, and two programs with the same sources share one module, unless it asks for `__file__`.

Packages that were installed as a link (`pip install -e`) travel by name. A library may outlive an edit, so a function
brings their stamps along: a library that has imported a package at another stamp imports it again. A recipe's key
covers the stamps of its loader's packages.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from stoker.contexts.function_code import asks_where_it_lies, imports
from stoker.contexts.user_code import ModuleSource, is_linked, place_of, source_of
from stoker.units import show_bytes

# ---- user modules


logger = logging.getLogger("stoker.captured")

MOST_BYTES = 8_000_000
"""Modules of more source than this do not travel: they are imported from where the library finds them."""

Table = dict[str, tuple[str, bool, str, bytes]]
"""Modules by dotted name: file, whether it is a package, version, source."""


class _Read(NamedTuple):
    stamp: tuple[int, int]
    data: bytes
    digest: str
    imported: frozenset[str]


def imported_by(code: types.CodeType, package: str) -> frozenset[str]:
    """Return dotted names of possible modules that code imports: `from a.b import c` may import a, a.b, a.b.c.
    `package` is the package of the code, for relative imports."""
    found: set[str] = set()
    for level, module, names in imports(code):
        base = module
        if level:
            above = package.rsplit(".", level - 1)[0] if package else ""
            base = ".".join(part for part in (above, module) if part) if above else ""
        if base:
            found.update(_with_packages(base))
            found.update(f"{base}.{name}" for name in names if name != "*")
    return frozenset(found)


def package_of(name: str, *, is_package: bool) -> str:
    """Return the package from which a module's relative imports start."""
    return name if is_package else name.rpartition(".")[0]


def imported_when_run(functions: Iterable[types.FunctionType]) -> set[str]:
    """Return dotted names of possible modules that functions import when they run."""
    return {name for function in functions for name in imported_by(function.__code__, package_around(function))}


def modules_for(names: Iterable[str], digest: Callable[[types.CodeType], str]) -> Table:
    """Return the user's own modules among these names, and all that these import of the user's own. `digest` makes the
    digest of a code object. Empty, with a warning, if the sources are more than MOST_BYTES."""
    read, below, size = dict[str, tuple[ModuleSource, _Read]](), dict[str, set[str]](), 0
    waiting = sorted(names)
    while waiting:
        name = waiting.pop()
        source = source_of(name) if name not in below else None
        if source is None:
            continue
        found = _read(source, name, digest)
        if found is None:
            continue
        read[name] = source, found
        below[name] = set(found.imported) | set(_with_packages(name))
        waiting += sorted(below[name])
        size += len(found.data)
        if size > MOST_BYTES:
            logger.warning(
                "modules that a function imports when it runs, %s among them, are over %s of source and do not travel"
                " with it: libraries import them from their search path, once",
                name,
                show_bytes(MOST_BYTES),
            )
            return {}
    versions = {name: _version(name, read, below) for name in sorted(read)}
    return {
        name: (read[name][0].file, read[name][0].is_package, versions[name], read[name][1].data) for name in versions
    }


def code_of(source: ModuleSource) -> types.CodeType | None:
    """Compile a module's source without running it; None for a compiled extension or a missing file."""
    data = _bytes_of(source)
    return _compiled(data, source.file) if data is not None else None


_known: dict[tuple[str, str], _Read] = {}


def _read(source: ModuleSource, name: str, digest: Callable[[types.CodeType], str]) -> _Read | None:
    try:
        status = os.stat(source.file)
    except OSError:
        return None
    stamp = (status.st_mtime_ns, status.st_size)
    known = _known.get((source.file, name))
    if known is not None and known.stamp == stamp:
        return known
    data = _bytes_of(source)
    code = _compiled(data, source.file) if data is not None else None
    if data is None or code is None:
        return None
    imported = imported_by(code, package_of(name, is_package=source.is_package))
    place = source.file if asks_where_it_lies(code) else ""
    found = _known[source.file, name] = _Read(stamp, data, f"{digest(code)} {place}", imported)
    return found


def _bytes_of(source: ModuleSource) -> bytes | None:
    if source.is_package and os.path.isdir(source.file):
        return b""
    if not source.file.endswith(".py"):
        return None
    try:
        with open(source.file, "rb") as file:
            return file.read()
    except OSError:
        return None


@functools.lru_cache(maxsize=512)
def _compiled(data: bytes, file: str) -> types.CodeType | None:
    try:
        return compile(data, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def _version(name: str, read: dict[str, tuple[ModuleSource, _Read]], below: dict[str, set[str]]) -> str:
    seen, waiting = set[str](), [name]
    while waiting:
        one = waiting.pop()
        if one in read and one not in seen:
            seen.add(one)
            waiting += below[one]
    of_all = "\n".join(f"{one} {read[one][1].digest}" for one in sorted(seen))
    return blake2b(of_all.encode(), digest_size=16).hexdigest()


def package_around(function: types.FunctionType) -> str:
    """Return the package from which a function's relative imports start; empty for a program or a plain module."""
    given = function.__globals__.get("__package__")
    return given if isinstance(given, str) else (function.__module__ or "").rpartition(".")[0]


def _with_packages(name: str) -> Iterator[str]:
    """Yield a dotted name and its packages."""
    while name:
        yield name
        name = name.rpartition(".")[0]


# ---- editable


_FRESH_S = 0.2
"""A stamp is not taken again within this time."""
_MOST_FILES = 20_000
_stamps: dict[str, tuple[float, str]] = {}


def stamp_of(name: str) -> str:
    """Return a digest of the names, sizes and times of change of all source files of the linked package that holds the
    module `name`; empty for every other module."""
    top = name.partition(".")[0]
    if not is_linked(top):
        return ""
    known = _stamps.get(top)
    if known is None or time.monotonic() - known[0] > _FRESH_S:
        place = place_of(top)
        known = _stamps[top] = (time.monotonic(), _stamp(place) if place else "")
    return known[1]


def stamps_of(names: Iterable[str] = ()) -> dict[str, str]:
    """Return the stamps of all linked packages that this process has imported or that `names` lists."""
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
