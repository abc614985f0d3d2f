"""What this Python environment consists of, and a key that names its state.

Four places hold packages: the `site-packages` folders on `sys.path` (of the virtual environment, of the system where
it is shown, of the user); source folders that an editable install names in a `.pth` file; those that its import hook
maps; and folders of `PYTHONPATH` into which `pip install --target` has put some. Where two have a package of one name
the earlier wins, as when it is imported.

The key covers Python itself, each distribution with its version and its RECORD (in which installers note a digest of
each file), the names at the top of each folder, and for editable sources every file's length and time. Reading it
takes a fraction of a second. What it cannot see is an installed file that was edited by hand.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple
from urllib.parse import unquote, urlparse

import msgspec

from stoker.contexts.user_code import recorded_folders
from stoker.errors import ConfigError

# ---- files below a folder


SKIPPED = frozenset({"__pycache__", ".git", ".hg", ".svn", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".venv"})


class FoundFile(NamedTuple):
    """A file: its name relative to the folder, and its path. `link`: the target if it is a link within the folder;
    empty for files and for links that are followed."""

    name: str
    path: str
    facts: os.stat_result
    link: str = ""


def files_below(folder: str, *, skip: Callable[[str], object] = lambda _name: False) -> Iterator[FoundFile]:
    """Yield every file, sorted by name. `skip` gets relative names of files and folders. Unreadable files and folders
    that contain themselves are left out."""
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
    """Return a digest of the names, sizes and times of a file or folder, which changes with an edit."""
    whole = hashlib.sha256()
    if os.path.isdir(path):
        for found in files_below(path):
            whole.update(f"{found.name}\0{found.facts.st_size}\0{found.facts.st_mtime_ns}\0".encode(errors="replace"))
    else:
        facts = os.stat(path)
        whole.update(f"{facts.st_size}\0{facts.st_mtime_ns}".encode())
    return whole.hexdigest()


# ---- the environment


_FORMAT = "stoker-environment-1"
"""Change this number if the archive of the same environment changes."""


class Editable(msgspec.Struct, frozen=True):
    """A package or module used from its source folder: its place in `site-packages` and its path. `is_first`: it hides
    what `site-packages` has under that name."""

    name: str
    path: str
    is_first: bool = False


class Installed(msgspec.Struct, frozen=True):
    """This environment: its package folders in search order, and its editable installs."""

    folders: tuple[str, ...]
    editables: tuple[Editable, ...]
    scripts: str
    """The folder of its programs; empty for the system's."""
    conda: str
    """The prefix of a conda environment, whose packages need further libraries and data; else empty."""
    key: str


def this_environment() -> Installed:
    """Return the environment of this process. Raises ConfigError for an editable install without its sources."""
    folders = tuple(_folders())
    editables = tuple({one.name: one for one in [*_mapped(), *_named_in_pth(folders), *_targets()]}.values())
    _check_editables(folders, editables)
    conda = sys.prefix if os.path.isdir(os.path.join(sys.prefix, "conda-meta")) else ""
    return Installed(
        folders=folders,
        editables=editables,
        scripts=sysconfig.get_path("scripts") if conda or sys.prefix != sys.base_prefix else "",
        conda=conda,
        key=_key(folders, editables, conda),
    )


def _folders() -> Iterator[str]:
    known = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    wanted = {os.path.realpath(folder) for folder in known}
    on_path = dict.fromkeys(os.path.realpath(place) for place in sys.path if place)
    return (place for place in on_path if place in wanted and os.path.isdir(place))


def _named_in_pth(folders: Iterable[str]) -> Iterator[Editable]:
    for folder in folders:
        for file in sorted(os.listdir(folder)):
            if not file.endswith(".pth"):
                continue
            with open(os.path.join(folder, file), encoding="utf-8", errors="replace") as lines:
                places = [line.strip() for line in lines if line.strip() and not line.startswith(("#", "import"))]
            for place in places:
                source = os.path.realpath(os.path.join(folder, place))
                if not source.startswith(folder + os.sep):
                    yield from _importable(source)


def _importable(folder: str) -> Iterator[Editable]:
    if not os.path.isdir(folder):
        return
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        stem, suffix = os.path.splitext(entry.name)
        is_module = entry.is_file() and suffix in (".py", ".so") and stem != "setup"
        if is_module or (entry.is_dir() and stem.isidentifier() and not suffix and _holds_python(entry.path)):
            yield Editable(entry.name, os.path.realpath(entry.path))


def _targets() -> Iterator[Editable]:
    places = [os.path.abspath(place) for place in sys.path if place]
    first_site = min((places.index(place) for place in site.getsitepackages() if place in places), default=len(places))
    for folder, recorded in recorded_folders():
        is_first = folder not in places[first_site:]
        for name in sorted({os.path.relpath(path, folder).partition(os.sep)[0] for path in recorded}):
            yield Editable(name, os.path.realpath(os.path.join(folder, name)), is_first)


def _holds_python(folder: str) -> bool:
    try:
        return any(name.endswith((".py", ".so")) for name in os.listdir(folder))
    except OSError:
        return False


def _mapped() -> Iterator[Editable]:
    for finder in sys.meta_path:
        home = sys.modules.get(getattr(finder, "__module__", "") or "")
        if home is not None and home.__name__.startswith("__editable__"):
            for name, path in sorted(getattr(home, "MAPPING", {}).items()):
                suffix = os.path.splitext(path)[1] if os.path.isfile(path) else ""
                yield Editable(name.replace(".", "/") + suffix, os.path.realpath(path))


def _check_editables(folders: tuple[str, ...], editables: tuple[Editable, ...]) -> None:
    for distribution in importlib.metadata.distributions(path=list(folders)):
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not origin.get("dir_info", {}).get("editable"):
            continue
        source = os.path.realpath(unquote(urlparse(origin.get("url", "")).path))
        names = set((distribution.read_text("top_level.txt") or "").split())
        if not any(one.path.startswith(source + os.sep) or one.name.partition(".")[0] in names for one in editables):
            name = distribution.metadata["Name"]
            raise ConfigError(
                f"the environment cannot travel: {name} is an editable install of {source} through a hook that Stoker"
                f" does not know; install it plainly (pip install {source}) or without a build hook",
                key="environment",
            )


def _key(folders: tuple[str, ...], editables: tuple[Editable, ...], conda: str) -> str:
    parts = [_FORMAT, sys.version, str(sysconfig.get_config_var("SOABI"))]
    for place, folder in enumerate(folders):
        parts += [f"{place} {name}" for name in sorted(os.listdir(folder)) if name != "__pycache__"]
    parts += sorted(os.listdir(os.path.join(conda, "conda-meta"))) if conda else []  # a file a package and build
    records = []
    for distribution in importlib.metadata.distributions(path=list(folders)):
        record = distribution.read_text("RECORD") or distribution.read_text("SOURCES.txt") or ""
        digest = hashlib.sha256(record.encode(errors="replace")).hexdigest()
        records.append(f"{distribution.metadata['Name']} {distribution.version} {digest}")
    parts += sorted(records)
    parts += [f"{one.name} {listing_digest(one.path)}" for one in editables]
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="replace")
        whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()[:32]
