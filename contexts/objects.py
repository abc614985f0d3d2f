"""Files and folders as objects, named `<kind>-<digest of the manifest><suffix>` (see `manifest`).

The content of a file is its bytes and the owner's execute permission. A folder's content is its names, files, folders
and links. A link that leads out of the folder counts as its target. Digests of parts are cached by path, size, mtime,
ctime and inode. Files that changed within the last two seconds are excluded (as in git).

    <session folder>/objects/index.jsonl        one line per object: {"name": ..., "size_bytes": ..., "source": ...}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
import stat
import time
from collections import OrderedDict
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from stoker.contexts.folders import state_folder
from stoker.contexts.manifest import (
    PART_BYTES,
    Entry,
    EntryKind,
    Manifest,
    encode_manifest,
    is_manifest_of,
    object_name_of_manifest,
)
from stoker.contexts.recipe import ObjectRef
from stoker.errors import RecipeError
from stoker.whole_files import write_all

_SUFFIX = re.compile(r"(\.[A-Za-z0-9]{1,16}){1,2}")
_NAME = re.compile(r"(file|folder)-[0-9a-f]{64}((\.[A-Za-z0-9]{1,16}){1,2})?")
_RECENT_CHANGE_NS = 2_000_000_000
_MAX_CACHED_MANIFESTS = 32
_MAX_CACHED_MANIFEST_BYTES = 1 << 20
"""Maximum bytes of a manifest that stays in the memory cache."""


def make_object_ref(path: str | os.PathLike[str], *, digest_cache_file: Path | None = None) -> ObjectRef:
    """Compute the name of a file or folder as an object. `digest_cache_file`: SQLite file with known digests. Raises
    RecipeError.
    """
    given = Path(path)
    try:
        real = given.resolve(strict=True)
        str(real).encode()  # the path must be UTF-8, because it is sent as text
        with _DigestCache(digest_cache_file or state_folder() / "objects.sqlite") as digest_cache:
            if real.is_file():  # flush cached writes of the file before its times are read
                with suppress(OSError), real.open("rb") as opened:
                    os.fsync(opened.fileno())
            facts = real.stat()
            made = _build_manifest(real, digest_cache)
    except UnicodeEncodeError:
        raise RecipeError(f"the path {os.fsencode(given)!r} is not UTF-8, so it cannot be sent; rename it") from None
    except FileNotFoundError as error:
        why = f"{given} cannot be found ({error.filename or given} does not exist); check the path"
        raise RecipeError(why, path=str(given)) from None
    except (OSError, RuntimeError) as error:
        raise RecipeError(f"{given} cannot be read: {error}", path=str(given)) from error
    data, is_file = encode_manifest(made), made.kind is EntryKind.FILE
    name = object_name_of_manifest(data, suffix=given.suffix if is_file and _SUFFIX.fullmatch(given.suffix) else "")
    _cache_manifest(name, data)
    ref = ObjectRef(name=name, size_bytes=made.size_bytes, source=str(real))
    if is_file and time.time_ns() - facts.st_mtime_ns > _RECENT_CHANGE_NS:
        return msgspec.structs.replace(ref, changed_ns=facts.st_mtime_ns, inode=facts.st_ino)
    return ref


def read_object_manifest(ref: ObjectRef) -> bytes:
    """Return an object's manifest as bytes. Raises RecipeError if the source is unreadable or was changed."""
    if (kept := _manifest_cache.get(ref.name)) is not None:
        return kept
    try:
        with _DigestCache(state_folder() / "objects.sqlite") as digest_cache:
            data = encode_manifest(_build_manifest(Path(ref.source).resolve(strict=True), digest_cache))
    except (OSError, RuntimeError) as error:
        raise RecipeError(f"{ref.source} cannot be read: {error}", path=ref.source) from error
    if not is_manifest_of(ref.name, data):
        what = "the file or folder has changed since the recipe was made; make the recipe again"
        raise RecipeError(what, path=ref.source)
    _cache_manifest(ref.name, data)
    return data


def is_object_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def has_content_of(path: str | os.PathLike[str], ref: ObjectRef) -> bool:
    """True if the file or folder has the content of `ref`. Reads all data."""
    try:
        with _DigestCache(None) as nothing:
            return is_manifest_of(ref.name, encode_manifest(_build_manifest(Path(path), nothing)))
    except (OSError, RecipeError):
        return False


def copy_object(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a file or folder to a new `target`, which gets the same object name. Raises OSError, RecipeError."""
    root, goal = Path(source).resolve(strict=True), Path(target)
    if root.is_file():
        _copy_file(root, goal)
        return
    goal.mkdir(mode=0o700)
    for name, path, kind in _list_folder_entries(root):
        place = Path(os.fsdecode(os.path.join(os.fsencode(goal), name)))
        if kind is EntryKind.FOLDER:
            place.mkdir(mode=0o700)
        elif kind is EntryKind.LINK:
            os.symlink(os.readlink(path), place)
        else:
            _copy_file(path, place)


def _copy_file(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    target.chmod(0o700 if _is_owner_executable(source.stat()) else 0o600)


_manifest_cache: OrderedDict[str, bytes] = OrderedDict()


def _cache_manifest(name: str, data: bytes) -> None:
    if len(data) <= _MAX_CACHED_MANIFEST_BYTES:
        _manifest_cache[name] = data
        while len(_manifest_cache) > _MAX_CACHED_MANIFESTS:
            with suppress(KeyError):  # another thread may have removed the last entry
                _manifest_cache.popitem(last=False)


def _is_owner_executable(facts: os.stat_result) -> bool:
    return bool(facts.st_mode & stat.S_IXUSR)


def _build_manifest(root: Path, digest_cache: _DigestCache) -> Manifest:
    if not root.is_dir():
        return Manifest(EntryKind.FILE, (_build_file_entry(root, b"", digest_cache),))
    return Manifest(EntryKind.FOLDER, tuple(_build_entry(*found, digest_cache) for found in _list_folder_entries(root)))


def _build_entry(name: bytes, path: Path, kind: EntryKind, digest_cache: _DigestCache) -> Entry:
    if kind is EntryKind.FILE:
        return _build_file_entry(path, name, digest_cache)
    return Entry(name, kind, target=os.fsencode(os.readlink(path)) if kind is EntryKind.LINK else b"")


def _build_file_entry(path: Path, name: bytes, digest_cache: _DigestCache) -> Entry:
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise RecipeError(f"{path} is neither a file nor a folder, so it cannot be sent; leave it out", path=str(path))
    parts = digest_cache.get(path, facts)
    if parts is None:
        parts = _digest_parts(path)
        after = path.stat()
        if (after.st_size, after.st_mtime_ns, after.st_ino) != (facts.st_size, facts.st_mtime_ns, facts.st_ino):
            raise RecipeError(f"{path} changed while it was read; wait until it is written", path=str(path))
        digest_cache.put(path, facts, parts)
    return Entry(name, EntryKind.FILE, executable=_is_owner_executable(facts), size_bytes=facts.st_size, parts=parts)


def _digest_parts(path: Path) -> bytes:
    digests: list[bytes] = []
    view = memoryview(bytearray(PART_BYTES))
    with path.open("rb", buffering=0) as file:
        while True:
            size = 0
            while size < PART_BYTES and (more := file.readinto(view[size:])):
                size += more
            if not size:
                return b"".join(digests)
            digests.append(hashlib.sha256(view[:size]).digest())


def _list_folder_entries(root: Path) -> list[tuple[bytes, Path, EntryKind]]:
    found: list[tuple[bytes, Path, EntryKind]] = []
    real_root = os.path.realpath(root) + os.sep

    def walk_folder(folder: Path, prefix: bytes, above: frozenset[str]) -> None:
        real = os.path.realpath(folder)
        if real in above:
            raise RecipeError(f"{folder} is a link to a folder that contains it; remove the link", path=str(folder))
        with os.scandir(folder) as listing:
            for entry in listing:
                name, path = prefix + os.fsencode(entry.name), Path(entry.path)
                relative = entry.is_symlink() and not os.path.isabs(os.readlink(path))
                if relative and (os.path.realpath(path) + os.sep).startswith(real_root):
                    found.append((name, path, EntryKind.LINK))
                elif entry.is_dir():
                    found.append((name, path, EntryKind.FOLDER))
                    walk_folder(path, name + b"/", above | {real})
                else:
                    found.append((name, path, EntryKind.FILE))

    walk_folder(root, b"", frozenset())
    return sorted(found, key=lambda entry: entry[0])


class _DigestCache:
    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._new_rows: list[tuple[str, int, int, int, int, bytes]] = []

    def __enter__(self) -> _DigestCache:
        if self._path is not None:
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._db = self._connect(self._path)
            except (OSError, sqlite3.OperationalError):
                pass
            except sqlite3.DatabaseError:  # the file is damaged
                with suppress(OSError, sqlite3.Error):
                    self._path.unlink()
                    self._db = self._connect(self._path)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._db is not None:
            with closing(self._db) as db, suppress(sqlite3.Error), db:
                db.executemany("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?)", self._new_rows)

    def get(self, path: Path, facts: os.stat_result) -> bytes | None:
        query = "SELECT digests FROM parts WHERE path = ? AND size = ? AND mtime = ? AND ctime = ? AND inode = ?"
        with suppress(sqlite3.Error):
            row = self._db.execute(query, _digest_key(path, facts)).fetchone() if self._db is not None else None
            return row[0] if row else None
        return None

    def put(self, path: Path, facts: os.stat_result, digests: bytes) -> None:
        if time.time_ns() - max(facts.st_mtime_ns, facts.st_ctime_ns) > _RECENT_CHANGE_NS:
            self._new_rows.append((*_digest_key(path, facts), digests))

    @staticmethod
    def _connect(path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, timeout=10)
        db.execute(
            "CREATE TABLE IF NOT EXISTS parts (path TEXT PRIMARY KEY, size INTEGER, mtime INTEGER, ctime INTEGER,"
            " inode INTEGER, digests BLOB)"
        )
        return db


def _digest_key(path: Path, facts: os.stat_result) -> tuple[str, int, int, int, int]:
    shown = os.fsencode(path).hex() if not str(path).isprintable() else str(path)
    return shown, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino


_INDEX_FILE = "index.jsonl"


def publish_objects(folder: Path, refs: tuple[ObjectRef, ...]) -> None:
    """Add objects to the session's index, so that its seed process sends them from their sources. Raises OSError.

    Several clients may append at the same time, so an unfinished last line is ended and never removed.
    """
    lines = [json.dumps({"name": ref.name, "size_bytes": ref.size_bytes, "source": ref.source}) + "\n" for ref in refs]
    if not lines:
        return
    file = os.open(folder / _INDEX_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(file).st_size
        unfinished = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        write_all(file, ("\n" * unfinished + "".join(lines)).encode())
    finally:
        os.close(file)


class PublishedObjects:
    """The published objects of a session."""

    def __init__(self, folder: Path) -> None:
        self._index_file = folder / _INDEX_FILE
        self._read = 0
        self._known: dict[str, ObjectRef] = {}

    def find(self, name: str) -> ObjectRef | None:
        if name not in self._known:
            self._read_new_lines()
        return self._known.get(name)

    def _read_new_lines(self) -> None:
        try:
            with self._index_file.open("rb") as file:
                file.seek(self._read)
                whole, end, _ = file.read().rpartition(b"\n")
        except OSError:
            return
        self._read += len(whole + end)
        for line in whole.splitlines():
            with suppress(ValueError, RecursionError, KeyError, TypeError):
                said = json.loads(line)
                self._known[said["name"]] = ObjectRef(said["name"], said["size_bytes"], said["source"])
