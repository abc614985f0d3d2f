"""A program leaves the sources of its functions and loaders in the session's folder, where the advisor reads them.

Nothing depends on that: a source that cannot be found or written is not left, and a program that makes functions by the
thousand leaves those of the first `MOST`.
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
from stoker.contexts.recipe import Recipe
from stoker.contexts.user_code import is_installed
from stoker.protocol.session import LONGEST_TEXT, ProgramSource, source_file, text_file
from stoker.whole_files import write_whole

log = logging.getLogger("stoker")

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
            log.debug("the source of %r was not left: %r", key, error)


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
