"""The user's own modules that functions import. The program reads their sources, and libraries import these sources.

The `version` of a module is the digest of its code, its packages and its imports. Linked packages (`pip install -e`)
are sent by name with a *stamp*, a digest of the sizes and times of their files. If the stamp has changed, a library
imports the package again.

Import statements find sent modules first. A process has one version of a module at a time. If a call needs another
version, `before_replacing` may end the library. Otherwise functions are unpickled again (`count_replacements`). If
calls run one at a time, a function finds only the modules sent with it. After a call has replaced a module of the
context, later calls get the same module object back.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.machinery import ModuleSpec
from importlib.readers import FileReader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from stoker.contexts.function_code import find_imports, may_read_own_files
from stoker.contexts.user_code import ModuleSource, find_module_source, find_package_path, is_linked_package
from stoker.units import show_bytes

logger = logging.getLogger("stoker.captured")

MAX_SOURCE_BYTES = 8_000_000
"""Maximum bytes of sent sources. Above this limit, libraries import the modules from their search path."""

Table = dict[str, tuple[str, bool, str, bytes]]
"""Sent modules by dotted name: file, True if it is a package, version, source."""


class _ReadSource(NamedTuple):
    source: ModuleSource
    stamp: tuple[int, int]
    data: bytes
    digest: str
    imported: frozenset[str]
    """Names of the modules that this module imports, and of the packages that contain it."""


def module_names_imported_by(code: types.CodeType, package: str) -> frozenset[str]:
    """Return the names of modules that code may import. `from a.b import c` may import a, a.b and a.b.c."""
    found: set[str] = set()
    for level, module, names in find_imports(code):
        if level:
            above = package.rsplit(".", level - 1)[0]
            module = f"{above}.{module}".rstrip(".") if above else ""
        if module:
            found.update(_module_and_parent_names(module), (f"{module}.{name}" for name in names if name != "*"))
    return frozenset(found)


def relative_import_package(name: str, *, is_package: bool) -> str:
    return name if is_package else name.rpartition(".")[0]


def modules_imported_when_run(functions: Iterable[types.FunctionType]) -> set[str]:
    return set().union(*(module_names_imported_by(each.__code__, package_of_function(each)) for each in functions))


def collect_user_modules(names: Iterable[str], digest: Callable[[types.CodeType], str]) -> Table:
    """Return the user's modules among `names`, with their imports; empty if their sources exceed MAX_SOURCE_BYTES."""
    read, size, waiting = dict[str, _ReadSource](), 0, sorted(names)
    while waiting:
        name = waiting.pop()
        source = find_module_source(name) if name not in read else None
        found = _read_source(source, name, digest) if source is not None else None
        if found is None:
            continue
        read[name] = found
        waiting += sorted(found.imported)
        size += len(found.data)
        if size > MAX_SOURCE_BYTES:
            logger.warning(
                "the modules that a function imports when it runs (%s is one of them) have more than %s of source code"
                " and are not sent with the function: libraries import them from their search path, once",
                name,
                show_bytes(MAX_SOURCE_BYTES),
            )
            return {}
    return {name: (*one.source, _module_version(name, read), one.data) for name, one in sorted(read.items())}


def compile_module_source(source: ModuleSource) -> types.CodeType | None:
    """Compile the source of a module. Return None for an extension or a missing file."""
    data = _read_source_bytes(source)
    return _compile_source(data, source.file) if data is not None else None


_read_sources: dict[tuple[str, str], _ReadSource] = {}


def _read_source(source: ModuleSource, name: str, digest: Callable[[types.CodeType], str]) -> _ReadSource | None:
    try:
        status = os.stat(source.file)
    except OSError:
        return None
    stamp = (status.st_mtime_ns, status.st_size)
    known = _read_sources.get((source.file, name))
    if known is not None and known.stamp == stamp:
        return known
    data = _read_source_bytes(source)
    if data is None or (code := _compile_source(data, source.file)) is None:
        return None
    imported = module_names_imported_by(code, relative_import_package(name, is_package=source.is_package))
    place = source.file if may_read_own_files(code) else ""
    with_packages = imported.union(_module_and_parent_names(name))
    found = _read_sources[source.file, name] = _ReadSource(
        source, stamp, data, f"{digest(code)} {place}", with_packages
    )
    return found


def _read_source_bytes(source: ModuleSource) -> bytes | None:
    if source.is_package and os.path.isdir(source.file):
        return b""
    with suppress(OSError):
        if source.file.endswith(".py"):
            return Path(source.file).read_bytes()
    return None


@functools.lru_cache(maxsize=512)
def _compile_source(data: bytes, file: str) -> types.CodeType | None:
    try:
        return compile(data, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def _module_version(name: str, read: dict[str, _ReadSource]) -> str:
    seen, waiting = set[str](), [name]
    while waiting:
        one = waiting.pop()
        if one in read and one not in seen:
            seen.add(one)
            waiting += read[one].imported
    of_all = "\n".join(f"{one} {read[one].digest}" for one in sorted(seen))
    return blake2b(of_all.encode(), digest_size=16).hexdigest()


def package_of_function(function: types.FunctionType) -> str:
    given = function.__globals__.get("__package__")
    return given if isinstance(given, str) else (function.__module__ or "").rpartition(".")[0]


def _module_and_parent_names(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


_STAMP_CACHE_S = 0.2
_stamps: dict[str, tuple[float, str]] = {}


def get_linked_package_stamp(name: str) -> str:
    top = name.partition(".")[0]
    if not is_linked_package(top):
        return ""
    known = _stamps.get(top)
    if known is None or time.monotonic() - known[0] > _STAMP_CACHE_S:
        place = find_package_path(top)
        known = _stamps[top] = (time.monotonic(), _stamp_package(place) if place else "")
    return known[1]


def get_linked_package_stamps(names: Iterable[str] = ()) -> dict[str, str]:
    tops = {name for name in list(sys.modules) if "." not in name}
    tops.update(name.partition(".")[0] for name in names)
    return {top: stamp for top in sorted(tops) if (stamp := get_linked_package_stamp(top))}


def _stamp_package(place: str) -> str:
    digest = blake2b(digest_size=16)
    for file in _source_files(place):
        with suppress(OSError):
            status = os.stat(file)
            line = f"{os.path.relpath(file, place)} {status.st_size} {status.st_mtime_ns}\n"
            digest.update(line.encode(errors="replace"))
    return digest.hexdigest()


def _source_files(place: str) -> Iterator[str]:
    if not os.path.isdir(place):
        yield place
    for folder, folders, files in os.walk(place):
        folders[:] = sorted(each for each in folders if not each.startswith((".", "__pycache__")))
        yield from (os.path.join(folder, file) for file in sorted(files) if file.endswith((".py", ".so")))


class SentModules:
    """The user modules that were sent with one function or loader."""

    def __init__(self, table: Table, stamps: Mapping[str, str]) -> None:
        self._stamps = stamps
        self._activated_at = -1
        self.found = {
            name: _SentModule(file, version, data, is_package=is_package)
            for name, (file, is_package, version, data) in table.items()
        }

    def activate(self) -> None:
        """Make import statements find these modules and the context's other modules."""
        if self._activated_at != _finder.change_count:
            with _lock:
                self._activate()

    def combined_with(self, other: SentModules) -> SentModules:
        """Return the modules of both. If both have a module of the same name, use this object's module."""
        both = SentModules({}, {**other._stamps, **self._stamps})
        both.found = {**other.found, **self.found}
        return both

    def set_as_context_modules(self) -> None:
        self.activate()
        _finder.context = self

    def _activate(self) -> None:
        known, hidden, wanted = (
            _finder.current_modules,
            _finder.replaced_modules,
            {**_finder.context.found, **self.found},
        )
        # If calls run one at a time, a function finds only the modules sent with it, because it must not import modules
        # of another program.
        leaving = {
            name: sent_module
            for name, sent_module in known.items()
            if (wanted[name].version != sent_module.version if name in wanted else before_replacing is not None)
        }
        replaced = [name for name in leaving if name in wanted and is_imported_from_sent_source(name)]
        others = [(name, known[name]) for name in replaced]
        others += [(name, sent_module) for (name, _), (sent_module, _) in hidden.items()]
        if before_replacing is not None and any(
            name in wanted and sent_module.is_imported and sent_module.version != wanted[name].version
            and not _has_context_version(name, sent_module) and not _has_context_version(name, wanted[name])
            for name, sent_module in others
        ):  # fmt: skip
            before_replacing()
        _finder.replacement_count += bool(replaced)
        elsewhere = [name for name in wanted if name in sys.modules and not is_imported_from_sent_source(name)]
        packages = {name.partition(".")[0] for name in (*leaving, *elsewhere)}
        imported = [name for name in list(sys.modules) if name.partition(".")[0] in packages]
        for name in elsewhere:
            _forget_package(name, imported)
        for name, sent_module in leaving.items():
            modules = _forget_package(name, imported) if is_imported_from_sent_source(name) else {}
            # Keep the module object, because a later call may need the same object again.
            if name not in wanted or _has_context_version(name, sent_module):
                hidden[name, sent_module.version] = sent_module, modules
        self._forget_edited_packages()
        back = dict[str, Any]()
        new = {name: sent_module for name, sent_module in wanted.items() if name not in known or name in leaving}
        for name in leaving.keys() - wanted.keys():
            del known[name]
        for name, sent_module in new.items():
            known[name], modules = hidden.pop((name, sent_module.version), (sent_module, {}))
            back |= modules
        for name in sorted(back):  # sorted, so that a package comes before its submodules
            sys.modules[name] = back[name]
            names, last = _parent_namespace_and_name(name)
            names[last] = back[name]
        if new or leaving:
            _finder.change_count += 1
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
        self._activated_at = _finder.change_count

    def _forget_edited_packages(self) -> None:
        for top, stamp in self._stamps.items():
            if top in sys.modules and _imported_at.get(top) != stamp:
                _forget_package(top, list(sys.modules))
                importlib.invalidate_caches()
            _imported_at[top] = stamp


before_replacing: Callable[[], None] | None = None
"""Function to call before another version replaces an imported module, unless the module belongs to the context."""
_imported_at: dict[str, str] = {}
"""Digest of each linked package's files at import time."""


def count_replacements() -> int:
    return _finder.replacement_count


def context_module_versions() -> Mapping[str, str]:
    return {name: sent_module.version for name, sent_module in _finder.context.found.items()}


def is_imported_from_sent_source(name: str) -> bool:
    sent_module = _finder.current_modules.get(name) if name in sys.modules else None
    return sent_module is not None and sent_module.is_imported


def _has_context_version(name: str, sent_module: _SentModule) -> bool:
    own = _finder.context.found.get(name)
    return own is not None and own.version == sent_module.version


class _SentModule(importlib.abc.ExecutionLoader):
    def __init__(self, file: str, version: str, data: bytes, *, is_package: bool) -> None:
        self.path = file
        self.version = version
        self.data = data
        self.is_imported = False
        self._is_package = is_package

    def create_spec(self, name: str) -> ModuleSpec | None:
        folder = os.path.dirname(self.path) if self.path.endswith(".py") else self.path
        places = [folder] if self._is_package else None
        return importlib.util.spec_from_file_location(name, self.path, loader=self, submodule_search_locations=places)

    def exec_module(self, module: ModuleType) -> None:
        self.is_imported = True
        super().exec_module(module)

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002
        return self.path

    def get_source(self, fullname: str) -> str:  # noqa: ARG002
        return importlib.util.decode_source(self.data)

    def is_package(self, fullname: str) -> bool:  # noqa: ARG002
        return self._is_package

    def get_resource_reader(self, fullname: str) -> FileReader | None:  # noqa: ARG002
        return FileReader(self) if self._is_package and self.path.endswith(".py") else None  # type: ignore[arg-type]

    def get_data(self, path: str) -> bytes:
        return Path(path).read_bytes()


NO_MODULES = SentModules({}, {})


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.context = NO_MODULES
        self.current_modules: dict[str, _SentModule] = {}
        """Modules by name, in the version of the last call that sent them."""
        self.replaced_modules: dict[tuple[str, str], tuple[_SentModule, dict[str, Any]]] = {}
        """Modules that other versions have replaced, by name and version, with their submodules. Later calls may need
        them again.
        """
        self.change_count = 0
        self.replacement_count = 0

    def clear(self) -> None:
        for name in [name for name in self.current_modules if is_imported_from_sent_source(name)]:
            _forget_package(name, list(sys.modules))
        self.current_modules.clear()
        self.replaced_modules.clear()
        self.context = NO_MODULES
        self.change_count += 1

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: Any = None) -> ModuleSpec | None:
        sent_module = self.current_modules.get(fullname)
        return sent_module.create_spec(fullname) if sent_module is not None else None


_finder = _Finder()
_lock = threading.Lock()


def _forget_package(name: str, imported: Iterable[str]) -> dict[str, Any]:
    dropped: dict[str, Any] = {}
    for one in imported:
        if (one == name or one.startswith(f"{name}.")) and one in sys.modules:
            dropped[one] = module = sys.modules.pop(one)
            names, last = _parent_namespace_and_name(one)
            if module is not None and names.get(last) is module:
                del names[last]
    return dropped


def _parent_namespace_and_name(name: str) -> tuple[dict[str, Any], str]:
    package, _, last = name.rpartition(".")
    return getattr(sys.modules.get(package), "__dict__", {}), last
