"""Files and folders as objects: their content's digest is their name.

A name is `<kind>-<digest><suffix>`: kind `file` or `folder`; the digest is SHA-256 over an encoding in which every part
carries its length, so that no two different contents (names with newlines, empty folders, links) can encode alike; a
file keeps a short plain suffix (`.gguf`), because loaders look at it.

What counts: a file's bytes and whether its owner may execute it; a folder's names, files, folders (empty ones too) and
links. A link that stays inside the folder is a link; one that leads out of it (as in a model hub's cache) counts as
what it leads to, since the pilot has nothing else there. What does not count: times, owners, other mode bits.

Reading a model takes seconds, so digests are remembered in the state folder by path, size, mtime, ctime and inode; a
file that changed within the last two seconds is not, as git does it, since a second change could leave no trace.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from stoker.contexts.recipe import ObjectRef
from stoker.contexts.state import state_folder
from stoker.errors import RecipeError

_SUFFIX = re.compile(r"(\.[A-Za-z0-9]{1,16}){1,2}")
_NAME = re.compile(r"(file|folder)-[0-9a-f]{64}((\.[A-Za-z0-9]{1,16}){1,2})?")
_RACY_NS = 2_000_000_000


def object_of(path: str | os.PathLike[str], *, memo: Path | None = None) -> ObjectRef:
    """The object of a file or folder as it is now. `memo` is the file of remembered digests (default: state folder).

    Raises RecipeError for a path that does not exist, can't be read, or holds what is neither file, folder nor link.
    """
    given = Path(path)
    try:
        real = given.resolve(strict=True)
        str(real).encode()  # it travels as text
        with _Memo(memo or state_folder() / "objects.sqlite") as remembered:
            if real.is_dir():
                digest, size = _folder_digest(real, remembered)
                return ObjectRef(name=f"folder-{digest}", size_bytes=size, source=str(real))
            digest, size = _file_digest(real, remembered)
    except UnicodeEncodeError:
        raise RecipeError(f"the path {os.fsencode(given)!r} is not UTF-8, so it can't travel; rename it") from None
    except FileNotFoundError as error:
        missing = error.filename or given
        raise RecipeError(f"{given} is not there ({missing} does not exist); check the path", path=str(given)) from None
    except (OSError, RuntimeError) as error:
        raise RecipeError(f"{given} can't be read: {error}", path=str(given)) from error
    return ObjectRef(name=f"file-{digest}{_suffix_of(given.name)}", size_bytes=size, source=str(real))


def is_object_name(name: str) -> bool:
    """Whether `name` has the form of a cache name: safe as a file name, and nothing else."""
    return _NAME.fullmatch(name) is not None


def matches(path: str | os.PathLike[str], ref: ObjectRef) -> bool:
    """Whether what lies at `path` (under whatever name) has the content of `ref`. Reads all of it."""
    real = Path(path)
    try:
        with _Memo(None) as nothing:
            if ref.name.startswith("folder-"):
                return real.is_dir() and ref.name == f"folder-{_folder_digest(real, nothing)[0]}"
            return real.is_file() and ref.name.partition(".")[0] == f"file-{_file_digest(real, nothing)[0]}"
    except (OSError, RecipeError):
        return False


def copy_object(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a file or folder so that the copy has the same digest: links that lead out are copied as what they lead to.

    `target` must not exist. Raises OSError, and RecipeError for what can't be an object.
    """
    root = Path(source).resolve(strict=True)
    goal = Path(target)
    if root.is_file():
        shutil.copyfile(root, goal)
        goal.chmod(0o700 if _executable(root.stat()) else 0o600)
        return
    goal.mkdir(mode=0o700)
    for name, path, kind in _entries(root):
        place = Path(os.fsdecode(os.path.join(os.fsencode(goal), name)))
        if kind == "folder":
            place.mkdir(mode=0o700)
        elif kind == "link":
            os.symlink(os.readlink(path), place)
        else:
            shutil.copyfile(path, place)
            place.chmod(0o700 if _executable(path.stat()) else 0o600)


def _suffix_of(name: str) -> str:
    stem, dot, last = name.rpartition(".")
    suffix = dot + last
    return suffix if stem and _SUFFIX.fullmatch(suffix) else ""


def _executable(facts: os.stat_result) -> bool:
    return bool(facts.st_mode & stat.S_IXUSR)


def _frame(*parts: bytes) -> bytes:
    """Parts with their lengths before them: no two different sequences of parts frame alike."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _file_digest(path: Path, remembered: _Memo) -> tuple[str, int]:
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise RecipeError(f"{path} is neither a file nor a folder, so it can't travel; leave it out", path=str(path))
    known = remembered.get(path, facts)
    if known is None:
        with path.open("rb") as file:
            known = hashlib.file_digest(file, "sha256").hexdigest()
        after = path.stat()
        if (after.st_size, after.st_mtime_ns, after.st_ino) != (facts.st_size, facts.st_mtime_ns, facts.st_ino):
            raise RecipeError(f"{path} changed while it was read; wait until it is written", path=str(path))
        remembered.put(path, facts, known)
    mode = b"x" if _executable(facts) else b"-"
    return hashlib.sha256(_frame(b"file", mode, bytes.fromhex(known))).hexdigest(), facts.st_size


def _folder_digest(root: Path, remembered: _Memo) -> tuple[str, int]:
    total, whole = 0, hashlib.sha256(_frame(b"folder"))
    for name, path, kind in _entries(root):
        if kind == "folder":
            content = b""
        elif kind == "link":
            content = os.fsencode(os.readlink(path))
        else:
            digest, size = _file_digest(path, remembered)
            content, total = bytes.fromhex(digest), total + size
        whole.update(_frame(name, kind.encode(), content))
    return whole.hexdigest(), total


def _entries(root: Path) -> Iterator[tuple[bytes, Path, str]]:
    """Everything below a folder, sorted by relative name as bytes: `(name, path, "file" | "folder" | "link")`."""
    found: list[tuple[bytes, Path, str]] = []
    real_root = os.path.realpath(root)

    def walk(folder: Path, prefix: bytes, above: frozenset[str]) -> None:
        real = os.path.realpath(folder)
        if real in above:
            raise RecipeError(f"{folder} is a link to a folder that it lies in; remove it", path=str(folder))
        with os.scandir(folder) as listing:
            for entry in listing:
                name = prefix + os.fsencode(entry.name)
                path = Path(entry.path)
                if entry.is_symlink() and _stays_inside(path, real_root):
                    found.append((name, path, "link"))
                elif entry.is_dir():
                    found.append((name, path, "folder"))
                    walk(path, name + b"/", above | {real})
                else:
                    found.append((name, path, "file"))

    walk(root, b"", frozenset())
    return iter(sorted(found, key=lambda entry: entry[0]))


def _stays_inside(link: Path, real_root: str) -> bool:
    target = os.readlink(link)
    if os.path.isabs(target):
        return False
    return (os.path.realpath(link) + os.sep).startswith(real_root + os.sep)


class _Memo:
    """Digests of files by what `stat` says of them. A memo that can't be used is none: it only costs time."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._fresh: list[tuple[str, int, int, int, int, str]] = []

    def __enter__(self) -> _Memo:
        if self._path is not None:
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._db = self._connect(self._path)
            except (OSError, sqlite3.OperationalError):
                self._db = None
            except sqlite3.DatabaseError:  # damaged: it holds nothing that can't be found again
                with suppress(OSError, sqlite3.Error):
                    self._path.unlink()
                    self._db = self._connect(self._path)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._db is not None:
            with closing(self._db) as db, suppress(sqlite3.Error), db:
                db.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?, ?)", self._fresh)

    def get(self, path: Path, facts: os.stat_result) -> str | None:
        """The file's digest if `stat` says the same as when it was read."""
        if self._db is None:
            return None
        with suppress(sqlite3.Error):
            row = self._db.execute(
                "SELECT digest FROM digests WHERE path = ? AND size = ? AND mtime = ? AND ctime = ? AND inode = ?",
                _key(path, facts),
            ).fetchone()
            return row[0] if row else None
        return None

    def put(self, path: Path, facts: os.stat_result, digest: str) -> None:
        """Remember a digest, unless the file is so young that it could change without a trace."""
        if time.time_ns() - max(facts.st_mtime_ns, facts.st_ctime_ns) > _RACY_NS:
            self._fresh.append((*_key(path, facts), digest))

    @staticmethod
    def _connect(path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, timeout=10)
        db.execute(
            "CREATE TABLE IF NOT EXISTS digests (path TEXT PRIMARY KEY, size INTEGER, mtime INTEGER, ctime INTEGER,"
            " inode INTEGER, digest TEXT)"
        )
        return db


def _key(path: Path, facts: os.stat_result) -> tuple[str, int, int, int, int]:
    shown = os.fsencode(path).hex() if not str(path).isprintable() else str(path)
    return shown, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino
