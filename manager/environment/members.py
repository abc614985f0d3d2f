"""List the files of this Python environment to pack, and compute a key that changes with the environment.

Packages are in three places: `site-packages` folders on `sys.path`, source folders of editable installs (from a `.pth`
file or an import hook), and `PYTHONPATH` folders that `pip install --target` filled.

The key depends on the Python version, on each distribution's version and RECORD, on the top-level names in each folder,
and on size and time of each editable source file. Edits of installed files do not change the key.

An archive has the layout of a virtual environment:

    lib/python3.11/site-packages/    every package, editable packages from their sources
    bin/                             programs; their first line finds the Python in this folder
    lib/, share/, ...                libraries and data of a conda environment
    base/bin/python3.11              the interpreter and standard library, unless the site names them
    base/lib/python3.11/
    base/lib/bundled/                shared libraries of this system for the interpreter

Bytecode is packed, because compiling PyTorch takes tens of seconds.
"""

from __future__ import annotations

import enum
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import site
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote, urlparse

import msgspec

from stoker.contexts.user_code import editable_modules, folders_in_pth_files, folders_installed_by_pip
from stoker.errors import ConfigError
from stoker.protocol.session import PYTHON

# ---- files below a folder

SKIPPED_NAMES = frozenset(
    {"__pycache__", ".git", ".hg", ".svn", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".venv"}
)


class FoundFile(NamedTuple):
    """A file below a folder. `link`: the target, if the file is a symbolic link to another file below the folder."""

    name: str
    path: str
    facts: os.stat_result
    link: str = ""


SkipRule = Callable[[str], object]


def walk_files_recursively(folder: str, *, skip: SkipRule = lambda _name: False) -> Iterator[FoundFile]:
    """Yield files sorted by name. Skip unreadable files and loops of links."""
    root = os.path.realpath(folder)
    yield from _walk_folder(root, root, "", skip, frozenset({root}))


def _walk_folder(root: str, folder: str, prefix: str, skip: SkipRule, above: frozenset[str]) -> Iterator[FoundFile]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        name = prefix + entry.name
        if entry.name in SKIPPED_NAMES or skip(name):
            continue
        with suppress(OSError):  # skip broken links, and files that other programs have removed
            link = os.readlink(entry.path) if entry.is_symlink() else ""
            real = os.path.realpath(entry.path) if link or entry.is_dir() else ""
            if link and not os.path.isabs(link) and real.startswith(root + os.sep) and os.path.exists(real):
                yield FoundFile(name, entry.path, entry.stat(follow_symlinks=False), link)
            elif entry.is_dir():
                if real not in above:
                    yield from _walk_folder(root, entry.path, name + "/", skip, above | {real})
            elif entry.is_file():
                yield FoundFile(name, entry.path, entry.stat())


def digest_of_file_listing(path: str) -> str:
    if not os.path.isdir(path):
        facts = os.stat(path)
        return hashlib.sha256(f"{facts.st_size}\0{facts.st_mtime_ns}".encode()).hexdigest()
    lines = (f"{each.name}\0{each.facts.st_size}\0{each.facts.st_mtime_ns}\0" for each in walk_files_recursively(path))
    return hashlib.sha256("".join(lines).encode(errors="replace")).hexdigest()


# ---- the environment

_FORMAT = "stoker-environment-1"
"""The archive layout's version, a part of the environment's key."""


class EditablePackage(msgspec.Struct, frozen=True):
    """A package or module that Python imports from its source folder. `hides_installed_package`: True if Python finds
    it before the same name in `site-packages`.
    """

    name: str
    path: str
    hides_installed_package: bool = False


class InstalledEnvironment(msgspec.Struct, frozen=True):
    """An installed environment. `scripts`: folder of its programs, empty for the system's Python. `conda`: the conda
    prefix, or empty.
    """

    folders: tuple[str, ...]
    editables: tuple[EditablePackage, ...]
    scripts: str
    conda: str
    key: str


def inspect_environment() -> InstalledEnvironment:
    """Describe this environment. Raises ConfigError if an editable install's sources are not found."""
    known = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    wanted = {os.path.realpath(folder) for folder in known}
    on_path = dict.fromkeys(os.path.realpath(place) for place in sys.path if place)
    folders = tuple(place for place in on_path if place in wanted and os.path.isdir(place))
    editables = tuple({one.name: one for one in _find_editable_packages(folders)}.values())
    _refuse_unknown_editable_installs(folders, editables)
    conda = sys.prefix if os.path.isdir(os.path.join(sys.prefix, "conda-meta")) else ""
    scripts = sysconfig.get_path("scripts") if conda or sys.prefix != sys.base_prefix else ""
    return InstalledEnvironment(folders, editables, scripts, conda, key=_environment_key(folders, editables, conda))


def _find_editable_packages(folders: Iterable[str]) -> Iterator[EditablePackage]:
    """Yield packages found through import hooks, `.pth` files, and `pip install --target` folders."""
    for name, path in sorted(editable_modules().items()):
        suffix = os.path.splitext(path)[1] if os.path.isfile(path) else ""
        yield EditablePackage(name.replace(".", "/") + suffix, os.path.realpath(path))
    for folder in folders:
        for source in map(os.path.realpath, folders_in_pth_files(folder)):
            if not source.startswith(folder + os.sep):
                yield from _importable_modules(source)
    places = [os.path.abspath(place) for place in sys.path if place]
    first_site = min((places.index(place) for place in site.getsitepackages() if place in places), default=len(places))
    for folder, recorded in folders_installed_by_pip():
        hides_installed_package = folder not in places[first_site:]
        for name in sorted({os.path.relpath(path, folder).partition(os.sep)[0] for path in recorded}):
            yield EditablePackage(name, os.path.realpath(os.path.join(folder, name)), hides_installed_package)


def _importable_modules(folder: str) -> Iterator[EditablePackage]:
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        stem, suffix = os.path.splitext(entry.name)
        if entry.is_dir():
            files = [*glob.glob("*.py", root_dir=entry.path), *glob.glob("*.so", root_dir=entry.path)]
            is_module = bool(files) and stem.isidentifier() and not suffix
        else:
            is_module = suffix in (".py", ".so") and stem != "setup"
        if is_module:
            yield EditablePackage(entry.name, os.path.realpath(entry.path))


def _refuse_unknown_editable_installs(folders: tuple[str, ...], editables: tuple[EditablePackage, ...]) -> None:
    for distribution in importlib.metadata.distributions(path=list(folders)):
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not origin.get("dir_info", {}).get("editable"):
            continue
        source = os.path.realpath(unquote(urlparse(origin.get("url", "")).path))
        names = set((distribution.read_text("top_level.txt") or "").split())
        if not any(one.path.startswith(source + os.sep) or one.name.partition(".")[0] in names for one in editables):
            name = distribution.metadata["Name"]
            raise ConfigError(
                f"the environment cannot be packed: {name} is an editable install of {source} through a hook that"
                f" Stoker does not know; install it without --editable (pip install {source}), or without a build hook",
                key="environment",
            )


def _environment_key(folders: tuple[str, ...], editables: tuple[EditablePackage, ...], conda: str) -> str:
    parts = [_FORMAT, sys.version, str(sysconfig.get_config_var("SOABI"))]
    for place, folder in enumerate(folders):
        parts += [f"{place} {name}" for name in sorted(os.listdir(folder)) if name != "__pycache__"]
    if conda:  # conda-meta has a file for each package and build, so its file names identify the packages
        parts += sorted(os.listdir(os.path.join(conda, "conda-meta")))
    records = []
    for distribution in importlib.metadata.distributions(path=list(folders)):
        record = distribution.read_text("RECORD") or distribution.read_text("SOURCES.txt") or ""
        digest = hashlib.sha256(record.encode(errors="replace")).hexdigest()
        records.append(f"{distribution.metadata['Name']} {distribution.version} {digest}")
    parts += sorted(records)
    parts += [f"{one.name} {digest_of_file_listing(one.path)}" for one in editables]
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:32]


# ---- members

_UNNEEDED_INTERPRETER_FILES = re.compile(
    r"(site-packages|dist-packages|test|idlelib|turtledemo|tkinter|ensurepip|config-[^/]*|lib-dynload/_tkinter[^/]*"
    r"|[^/]+/tests?|turtle\.py|EXTERNALLY-MANAGED)"
)
_LIBC_LIBRARIES = re.compile(
    r"(linux-vdso|ld-linux|ld64|libc|libm|libdl|librt|libpthread|libutil|libresolv|libnsl|libanl)[.-]"
)


_UNNEEDED_CONDA_FILES = re.compile(r"(python\d|cmake|pkgconfig|man|doc|info|locale)(/|\d|$|\.)|.*\.a$")
"""Files in a conda prefix that are documentation, needed only for compiling, or packed separately."""


class MemberKind(enum.Enum):
    PLAIN = "plain"
    LINK = "link"
    SCRIPT = "script"
    """A program whose first line names the Python of this environment."""
    BYTECODE = "bytecode"
    """A `.pyc` file, whose header contains the source's modification time."""


class ArchiveMember(NamedTuple):
    """A file or link in an archive. `path`: the file to pack, or the target of the link."""

    name: str
    path: str
    size_bytes: int
    kind: MemberKind = MemberKind.PLAIN
    executable: bool = False


def list_package_members(installed: InstalledEnvironment) -> list[ArchiveMember]:
    found: dict[str, ArchiveMember] = {}
    packages = f"lib/python{PYTHON}/site-packages/"
    taken: set[str] = set()
    for folder in installed.folders:
        here = set()
        for member in _folder_members(folder, prefix=packages, skip=lambda name: name.startswith("__editable__")):
            top = member.name.removeprefix(packages).partition("/")[0]
            here.add(top)
            if top not in taken:
                found[member.name] = member
        taken |= here
    for one in installed.editables:
        place = packages + one.name
        if one.name in taken:
            if not one.hides_installed_package:
                continue
            found = {name: found[name] for name in found if name != place and not name.startswith(f"{place}/")}
        new = [ArchiveMember(place, one.path, os.path.getsize(one.path))] if os.path.isfile(one.path) else []
        found.update((member.name, member) for member in new or _folder_members(one.path, prefix=f"{place}/"))
    others = list(_list_script_members(installed.scripts)) if installed.scripts else []
    for part in ("lib", "share", "ssl", "etc", "libexec") if installed.conda else ():
        others += _folder_members(
            os.path.join(installed.conda, part), prefix=f"{part}/", skip=_UNNEEDED_CONDA_FILES.match
        )
    found.update((member.name, member) for member in others)
    return sorted(found.values())


def interpreter_file() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def list_interpreter_members() -> list[ArchiveMember]:
    """Return the files of the interpreter and the standard library. Raises ConfigError if they do not exist."""
    executable, library = interpreter_file(), sysconfig.get_path("stdlib")
    if not os.path.isfile(executable) or not os.path.isdir(library):
        raise ConfigError(
            f"the interpreter cannot be packed: {executable} or {library} does not exist; set [environment] python to"
            " the name of the interpreter on compute nodes",
            key="python",
        )
    name = f"python{PYTHON}"
    members = [ArchiveMember(f"base/bin/{name}", executable, os.path.getsize(executable), executable=True)]
    members.append(ArchiveMember("base/bin/python3", name, 0, MemberKind.LINK))
    place = os.path.relpath(library, sys.base_prefix)
    members += _folder_members(library, prefix=f"base/{place}/", skip=_UNNEEDED_INTERPRETER_FILES.fullmatch)
    members += _folder_members(sysconfig.get_path("include"), prefix=f"base/include/{name}/")
    members += _list_shared_library_members(
        [member.path for member in members if ".so" in member.name or member.executable]
    )
    return sorted({member.name: member for member in members}.values())


def _folder_members(folder: str, *, prefix: str, skip: SkipRule = lambda _name: False) -> Iterator[ArchiveMember]:
    for file in walk_files_recursively(folder, skip=skip):
        name = prefix + file.name
        if file.link:
            yield ArchiveMember(name, file.link, 0, MemberKind.LINK)
            continue
        yield ArchiveMember(name, file.path, file.facts.st_size, executable=bool(file.facts.st_mode & 0o100))
        if file.name.endswith(".py") and (compiled := _valid_bytecode_path(file)):
            place = os.path.join(os.path.dirname(name), "__pycache__", os.path.basename(compiled))
            yield ArchiveMember(place, compiled, os.path.getsize(compiled), MemberKind.BYTECODE)


def _valid_bytecode_path(source: FoundFile) -> str | None:
    compiled = importlib.util.cache_from_source(source.path)
    time_s, size = int(source.facts.st_mtime) & 0xFFFFFFFF, source.facts.st_size & 0xFFFFFFFF
    wanted = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, time_s, size)
    with suppress(OSError), open(compiled, "rb") as file:
        if file.read(16) == wanted:
            return compiled
    return None


def _list_script_members(folder: str) -> Iterator[ArchiveMember]:
    for file in walk_files_recursively(folder):
        if file.link or re.match(r"(python|pypy|[Aa]ctivate)", file.name):
            continue
        with open(file.path, "rb") as opened:
            kind = MemberKind.SCRIPT if opened.read(2) == b"#!" else MemberKind.PLAIN
        yield ArchiveMember(f"bin/{file.name}", file.path, file.facts.st_size, kind, executable=True)


def _list_shared_library_members(files: list[str]) -> Iterator[ArchiveMember]:
    ldd = shutil.which("ldd")
    if ldd is None:
        return
    said = subprocess.run([ldd, *files], capture_output=True, text=True, errors="replace", check=False).stdout
    for name, path in sorted(set(re.findall(r"^\s+(\S+) => (/\S+) \(0x", said, re.MULTILINE))):
        if not _LIBC_LIBRARIES.match(name):
            place = f"base/lib/bundled/{name}"
            yield ArchiveMember(place, os.path.realpath(path), os.path.getsize(path), executable=True)
