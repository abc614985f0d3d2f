"""What a program leaves in the session's folder: a recipe's objects, and the sources of its functions.

Pilots fetch the objects from each other or from the session's seed; the advisor reads the sources. No call depends on a
source: one that cannot be found or written is not left, and of thousands of functions only the first `MOST` are.
"""

from __future__ import annotations

import inspect
import linecache
import logging
import os
import types
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from stoker.contexts.factory import loader_of
from stoker.contexts.objects import manifest_of, publish
from stoker.contexts.recipe import Recipe
from stoker.contexts.user_code import is_installed
from stoker.errors import RecipeError
from stoker.protocol.session import LONGEST_TEXT, ProgramSource, source_file, text_file
from stoker.protocol.to_manager import DefineManifest
from stoker.whole_files import write_whole

logger = logging.getLogger("stoker")


# ---- objects


MOST_BYTES = 4_000_000
"""Larger manifests are not sent: the first pilot that reads the object makes one, and hands it on."""


def describe(recipe: Recipe, objects: Path) -> list[DefineManifest]:
    """Let the seed serve a recipe's objects; returns their manifests. `objects` is the session's folder for objects.

    An object that has changed since the recipe was made gets no manifest: a pilot that reads it reports the change.
    """
    try:
        publish(objects, recipe.objects)
    except OSError as error:
        logger.warning("pilots that see no files of this machine can't have those of %s: %s", recipe.name, error)
    told = []
    for ref in recipe.objects:
        try:
            manifest = manifest_of(ref)
        except RecipeError as error:
            logger.warning("%s of %s: %s", ref.source, recipe.name, error)
            continue
        if len(manifest) <= MOST_BYTES:
            told.append(DefineManifest(ref.name, manifest))
    return told


# ---- sources


MOST = 200


class SourceShelf:
    """The session's folder for sources, as one program fills it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left: set[str] = set()
        self._texts: set[str] = set()

    def leave(self, key: str, function: Callable[..., Any], recipe: Recipe) -> None:
        """Leave the source of a function, whose calls name it by this key, and of its context's loader."""
        known = loader_of(recipe.key) if recipe.loader and recipe.key not in self._left else None
        if known is not None:
            self._leave(recipe.key, known[0], known[1])
        self._leave(key, function, {})

    def _leave(self, key: str, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        if key in self._left or len(self._left) >= MOST:
            return
        self._left.add(key)
        try:
            found = _source_of(function)
            if found is None:
                return
            text, name, file = found
            digest = blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if digest not in self._texts:
                self._texts.add(digest)
                write_whole(text_file(self._folder, digest), text.encode(errors="replace"))
            folder = (
                ""
                if is_installed(getattr(function, "__module__", None) or "__main__")
                else os.path.dirname(file) or os.getcwd()
            )
            source = ProgramSource(digest, name, file, folder, arguments)
            write_whole(source_file(self._folder, key), msgspec.json.encode(source))
        except Exception as error:  # whatever the function is: its call goes on
            logger.debug("the source of %r was not left: %r", key, error)


def _source_of(function: Callable[..., Any]) -> tuple[str, str, str] | None:
    """The text of the file that a function stands in, its name there, and the file; of a notebook or a prompt the text
    that is known."""
    plain = inspect.unwrap(function)
    plain = getattr(plain, "loader", plain)
    if not isinstance(plain, types.FunctionType):
        return None
    file = plain.__code__.co_filename
    lines = linecache.getlines(file, plain.__globals__)
    text = "".join(lines)
    if not text or len(text) > LONGEST_TEXT:
        return None
    return text, plain.__qualname__.replace(".<locals>", ""), file if os.path.isfile(file) else ""
