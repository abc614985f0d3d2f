"""Files below a folder, as they are packed: links that lead out of it are followed, caches are left out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

SKIPPED = frozenset({"__pycache__", ".git", ".hg", ".svn", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".venv"})


class FoundFile(NamedTuple):
    """A file: its name relative to the folder, with slashes, and where it lies. `link` is the target of a link that
    stays inside the folder; empty for a file and for a link that is followed."""

    name: str
    path: str
    facts: os.stat_result
    link: str = ""


def files_below(folder: str, *, skip: Callable[[str], object] = lambda _name: False) -> Iterator[FoundFile]:
    """Every file, sorted by name. `skip` is asked for relative names of files and folders; what can't be read is left
    out, and so is a folder that is met again below itself."""
    root = os.path.realpath(folder)
    yield from _walk(root, root, "", skip, frozenset({root}))


def _walk(
    root: str, folder: str, prefix: str, skip: Callable[[str], object], above: frozenset[str]
) -> Iterator[FoundFile]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        name = prefix + entry.name
        if entry.name in SKIPPED or skip(name):
            continue
        try:
            link = _inner_link(entry, root) if entry.is_symlink() else ""
            if link:
                yield FoundFile(name, entry.path, entry.stat(follow_symlinks=False), link)
            elif entry.is_dir():
                real = os.path.realpath(entry.path)
                if real not in above:
                    yield from _walk(root, entry.path, name + "/", skip, above | {real})
            elif entry.is_file():
                yield FoundFile(name, entry.path, entry.stat())
        except OSError:  # a link to nothing, a file that has just gone
            continue


def _inner_link(entry: os.DirEntry[str], root: str) -> str:
    target = os.readlink(entry.path)
    inside = os.path.realpath(entry.path).startswith(root + os.sep)
    return target if inside and not os.path.isabs(target) and os.path.exists(entry.path) else ""


def listing_digest(path: str) -> str:
    """A digest of the names, lengths and times of what lies at `path`, a file or a folder: other when it was edited."""
    whole = hashlib.sha256()
    if os.path.isdir(path):
        for found in files_below(path):
            whole.update(f"{found.name}\0{found.facts.st_size}\0{found.facts.st_mtime_ns}\0".encode(errors="replace"))
    else:
        facts = os.stat(path)
        whole.update(f"{facts.st_size}\0{facts.st_mtime_ns}".encode())
    return whole.hexdigest()
