"""A program's files in its session folder: large arguments and results, objects of recipes, and sources.

Calls of a client share a file if their arguments are equal, until the last of these calls ends. The file of a result is
removed after the program has read it.
"""

from __future__ import annotations

import inspect
import linecache
import logging
import mmap
import os
import threading
import types
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from stoker.contexts.factory import find_local_loader
from stoker.contexts.objects import make_object_ref, publish_objects, read_object_manifest
from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.contexts.user_code import is_installed
from stoker.errors import RecipeError
from stoker.protocol.calls import CallEnd
from stoker.protocol.session import LONGEST_TEXT, ProgramSource, program_source_file, source_text_file
from stoker.protocol.to_manager import DefineManifest
from stoker.whole_files import write_whole

logger = logging.getLogger("stoker")


class LargeArgumentFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._program_id = uuid4().hex[:8]
        self._call_counts: Counter[str] = Counter()
        self._lock = threading.RLock()  # reentrant, because garbage collection of a `map` may take the lock again

    def store_arguments(self, data: bytes) -> ObjectRef:
        draft = self.folder / f"draft-{uuid4().hex}"
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
        except OSError:
            draft.unlink(missing_ok=True)  # free the space on a full disk
            raise
        ref = make_object_ref(draft)
        place = self.folder / f"{ref.name}~{self._program_id}"
        with self._lock:
            self._call_counts[ref.name] += 1
            if self._call_counts[ref.name] == 1 or not place.exists():
                draft.replace(place)
            else:  # another call uses the existing file, so do not replace it
                draft.unlink()
            # No process writes to this file again, so size, time and inode stay valid.
            facts = place.stat()
            return ObjectRef(ref.name, ref.size_bytes, str(place), changed_ns=facts.st_mtime_ns, inode=facts.st_ino)

    def release_file(self, ref: ObjectRef) -> None:
        with self._lock:
            self._call_counts[ref.name] -= 1
            if self._call_counts[ref.name] <= 0:
                del self._call_counts[ref.name]
                Path(ref.source).unlink(missing_ok=True)


def remove_result_file(end: CallEnd) -> None:
    payload = end.payload
    if isinstance(payload, ObjectRef) and payload.name.startswith("result-"):
        Path(payload.source).unlink(missing_ok=True)


def read_result(ref: ObjectRef) -> mmap.mmap | bytes:
    """Map a result's file privately, so that its arrays need no copy, and remove the file."""
    path = Path(ref.source)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if ref.size_bytes else b""
    if ref.name.startswith("result-"):
        path.unlink(missing_ok=True)
    return data


MOST_MANIFEST_BYTES = 4_000_000


def publish_files_and_create_manifests(recipe: Recipe, objects: Path) -> list[DefineManifest]:
    """Publish a recipe's files for pilots without a shared file system. Return the manifests of the unchanged files."""
    name, told = recipe.name, []
    try:
        publish_objects(objects, recipe.objects)
    except OSError as error:
        logger.warning("pilots that share no files with this machine cannot get the files of %s: %s", name, error)
    for ref in recipe.objects:
        try:
            told.append(DefineManifest(ref.name, read_object_manifest(ref)))
        except RecipeError as error:
            logger.warning("%s of %s: %s", ref.source, name, error)
    return [each for each in told if len(each.manifest) <= MOST_MANIFEST_BYTES]


MAX_SOURCES = 200


class ProgramSourceStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stored_keys: set[str] = set()
        self._stored_texts: set[str] = set()

    def store_sources(self, key: str, function: Callable[..., Any], recipe: Recipe) -> None:
        if (
            recipe.loader
            and recipe.key not in self._stored_keys
            and (known := find_local_loader(recipe.key)) is not None
        ):
            self._store_source(recipe.key, *known)
        self._store_source(key, function, {})

    def _store_source(self, key: str, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        if key in self._stored_keys or len(self._stored_keys) >= MAX_SOURCES:
            return
        self._stored_keys.add(key)
        try:
            plain = inspect.unwrap(function)
            plain = getattr(plain, "loader", plain)
            if not isinstance(plain, types.FunctionType):
                return
            file = plain.__code__.co_filename
            text = "".join(linecache.getlines(file, plain.__globals__))  # linecache also knows notebook cells
            if not text or len(text) > LONGEST_TEXT:
                return
            data = text.encode(errors="replace")
            digest = blake2b(data, digest_size=16).hexdigest()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if digest not in self._stored_texts:
                self._stored_texts.add(digest)
                write_whole(source_text_file(self._folder, digest), data)
            file = file if os.path.isfile(file) else ""
            is_own = not is_installed(getattr(function, "__module__", None) or "__main__")
            folder = os.path.dirname(file) or os.getcwd() if is_own else ""
            name = plain.__qualname__.replace(".<locals>", "")
            source = ProgramSource(digest, name, file, folder, arguments)
            write_whole(program_source_file(self._folder, key), msgspec.json.encode(source))
        except Exception as error:  # an unreadable source must not stop the call
            logger.debug("the source of %r could not be stored: %r", key, error)
