"""Load a recipe's context in a library, list a loader's imports, and explain an unreachable model hub.

Without internet access, `huggingface_hub` retries for minutes per file. `HubLogHandler` reads its log messages and
switches it to local files.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import socket
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CoroutineType
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import msgspec

from stoker.contexts.ambient import related_exceptions
from stoker.contexts.function_code import find_global_names, find_imports, unwrap_partial
from stoker.contexts.inference.adapter import TokenCache
from stoker.contexts.payloads import loads_code
from stoker.contexts.recipe import Recipe
from stoker.contexts.user_code import find_module_source, is_installed
from stoker.errors import RecipeError
from stoker.units import MOST_AT_ONCE


class ObjectPath(NamedTuple):
    """Placeholder for an object's path in pickled arguments. The library replaces it with the local path."""

    name: str
    as_path: bool = False


def load_context(recipe: Recipe, objects: Mapping[str, str]) -> Any:
    """Return the context of a recipe; None without a loader.

    `objects`: local paths by cache name. Raises RecipeError for a missing object.
    """
    if not recipe.loader:
        return None
    (function, args, kwargs, *_), modules = loads_code(recipe.loader)
    modules.set_as_context_modules()
    args, kwargs = _replace_object_paths((args, kwargs), objects, recipe)
    context = function(*args, **kwargs)
    if isinstance(context, CoroutineType):
        context.close()
        raise RecipeError(f"the loader of {recipe.name} returned a coroutine: call asyncio.run(...) in the loader")
    return context


def count_slots(recipe: Recipe, context: Any, *, device_memory_bytes: int) -> int:
    """Return the number of concurrent calls of a library: the recipe's number, or the result of the context's method
    `slots(device_memory_bytes)`, or 1. Raises RecipeError.
    """
    method = getattr(context, "slots", None)
    if recipe.slots or not callable(method):
        return recipe.slots or 1
    answer = method(device_memory_bytes)
    if type(answer) is not int or not 1 <= answer <= MOST_AT_ONCE:
        told = f"slots({device_memory_bytes}) of the context {recipe.name} returned {answer!r}"
        raise RecipeError(f"{told}: it must be a whole number of concurrent calls, 1 to {MOST_AT_ONCE:,}")
    return answer


def get_token_cache(recipe: Recipe, context: Any) -> TokenCache | None:
    """Return the result of the context's method `token_cache`, or None. Raises RecipeError.

    The cache is fixed if the context has no `resize(device_memory_bytes)`.
    """
    method = getattr(context, "token_cache", None)
    found = method() if callable(method) else None
    if not isinstance(found, TokenCache):
        return None
    if find_resize_method(context) is None:
        found = msgspec.structs.replace(found, is_fixed=True)
    if found.weights_bytes < 0 or found.token_bytes < 1 or found.tokens < int(found.is_fixed):
        why = "token_bytes must be 1 or more, and tokens the size of its cache"
        raise RecipeError(f"token_cache() of the context {recipe.name} returned {found!r}: {why}")
    return found


def find_resize_method(context: Any) -> Callable[..., Any] | None:
    """Return a context's method `resize` with a parameter `device_memory_bytes`, or None."""
    method = getattr(context, "resize", None)
    try:
        known = callable(method) and "device_memory_bytes" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # the method is implemented in C and has no signature
        return None
    return method if known else None


def is_loaded(context: Any) -> bool:  # noqa: ARG001
    """Return True. Calling this function in a library makes the library load the context (`Session.warm`)."""
    return True


def _replace_object_paths(value: Any, objects: Mapping[str, str], recipe: Recipe) -> Any:
    if isinstance(value, ObjectPath):
        if value.name not in objects:
            why = f"which is not on this pilot; {len(objects)} other objects are there"
            raise RecipeError(f"the context {recipe.name} needs the object {value.name}, {why}", object=value.name)
        return Path(objects[value.name]) if value.as_path else objects[value.name]
    if type(value) in (list, tuple):
        return type(value)(_replace_object_paths(item, objects, recipe) for item in value)
    if type(value) is dict:
        return {key: _replace_object_paths(item, objects, recipe) for key, item in value.items()}
    return value


def find_modules_used_by(loader: Any) -> tuple[str, ...]:
    """Return the installed modules that a loader uses, followed by its imported names as `module:attribute`."""
    loader = unwrap_partial(loader)
    loader = getattr(loader, "__func__", loader)
    code = getattr(loader, "__code__", None)
    modules, parts = set[str](), set[str]()
    if not isinstance(code, types.CodeType):
        modules.add(str(getattr(loader, "__module__", "")))
    else:
        for level, module, names in find_imports(code):
            if not level and find_module_source(module) is None:
                modules.add(module)
                parts.update(f"{module}:{name}" for name in names)
        for name in find_global_names(code) & loader.__globals__.keys():
            value = loader.__globals__[name]
            home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            if isinstance(home, str) and is_installed(home):
                modules.add(home)
    left_out = ("", "stoker", "__main__", *sys.stdlib_module_names)
    tops = {module.partition(".")[0] for module in modules}.difference(left_out)
    parts = {part for part in parts if part.partition(":")[0].partition(".")[0] in tops}
    return (*sorted(tops, key=lambda top: (top not in ("torch", "transformers"), top)), *sorted(parts))


ANSWER_S = 4
"""Seconds to wait for the hub's answer about a file, unless the environment sets a limit."""

_UNREACHABLE = re.compile(
    r"\[Errno (-2|-3|-5|101|111|113)\]|Name or service not known|name resolution|Network is unreachable"
    r"|No route to host|Connection refused",
    re.IGNORECASE,
)
_RETRYING = "No local file found. Retrying"
"""Part of a message that `huggingface_hub` logs if the hub does not answer the first request about a file."""
_CONNECT_S = 2.0
"""Maximum seconds for connecting to the hub. A firewall may drop the request without an answer."""


class HubLogHandler(logging.Handler):
    """Log handler that notices an unreachable model hub. `unreachable`: the first message about this, or ""."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._files = logging.getLogger("huggingface_hub.file_download")
        self._level = self._files.level
        self.unreachable = ""

    def __enter__(self) -> HubLogHandler:
        limit = os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(ANSWER_S))
        constants = _hub_constants_module()
        if constants is not None and limit == str(ANSWER_S):
            constants.HF_HUB_ETAG_TIMEOUT = ANSWER_S  # huggingface_hub may have been imported before the limit was set
        self._files.setLevel(logging.INFO)
        logging.getLogger("huggingface_hub").addHandler(self)
        return self

    def __exit__(self, *_error: object) -> None:
        logging.getLogger("huggingface_hub").removeHandler(self)
        self._files.setLevel(self._level)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        constants = _hub_constants_module()
        if self.unreachable or constants is None or os.environ.get("HF_HUB_OFFLINE") == "0":
            return
        refused = "thrown while requesting" in text and _UNREACHABLE.search(text) is not None
        if refused or (_RETRYING in text and not _accepts_connections(constants.ENDPOINT)):
            self.unreachable = text
            constants.HF_HUB_OFFLINE = True

    def advice(self, error: BaseException) -> str:
        offline = ("OfflineModeIsEnabled", "LocalEntryNotFoundError")
        if not self.unreachable and not any(type(one).__name__ in offline for one in related_exceptions(error)):
            return ""
        return (
            "this node does not reach the model hub, and the model is not in its cache; on a host with internet, run"
            ' `hf download NAME --local-dir models/NAME` and load that folder (causal_lm("models/NAME") sends it to'
            " every pilot; for a context of your own, list it in its files), or set HF_HOME to a cache that nodes see"
        )


def _accepts_connections(url: str) -> bool:
    if getproxies().keys() & {"http", "https", "all"}:
        return True
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


def _hub_constants_module() -> Any:
    return sys.modules.get("huggingface_hub.constants")
