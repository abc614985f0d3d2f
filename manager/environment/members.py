"""Which files travel: the packages of this environment, and the interpreter that it runs on.

Both archives hold the layout of a virtual environment, because that is what a node makes of them:

    lib/python3.11/site-packages/    every package, editable ones from their sources
    bin/                             programs of the environment; their first line finds the Python beside them
    lib/, share/, ...                of a conda environment: libraries and data that its packages need
    base/bin/python3.11              the interpreter with its standard library, where it travels
    base/lib/python3.11/
    base/lib/bundled/                shared libraries of this system that it needs, for nodes that lack them

Compiled bytecode goes along when it is up to date: without it every new node would compile PyTorch again, for tens of
seconds. It notes when its source was changed, and in the archive every file has the same time, so that one environment
always gives the same bytes. The standard library's tests and its graphical parts stay here.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from typing import NamedTuple

from stoker.errors import ConfigError
from stoker.manager.environment.installed import FoundFile, Installed, files_below
from stoker.protocol.session import PYTHON

_HEAD = importlib.util.MAGIC_NUMBER + bytes(4)
"""The start of bytecode that is checked by the time and size of its source."""
_NOT_NEEDED = re.compile(
    r"(site-packages|dist-packages|test|idlelib|turtledemo|tkinter|ensurepip|config-[^/]*|lib-dynload/_tkinter[^/]*"
    r"|[^/]+/tests?|turtle\.py|EXTERNALLY-MANAGED)"
)
_OF_LIBC = re.compile(
    r"(linux-vdso|ld-linux|ld64|libc|libm|libdl|librt|libpthread|libutil|libresolv|libnsl|libanl)[.-]"
)


_CONDA_NOT_NEEDED = re.compile(r"(python\d|cmake|pkgconfig|man|doc|info|locale)(/|\d|$|\.)|.*\.a$")
"""Parts of `lib` and `share` that are packed separately or serve only compilers and readers."""


class MemberKind(enum.Enum):
    PLAIN = "plain"
    LINK = "link"
    SCRIPT = "script"
    """A program whose first line names this environment's Python."""
    BYTECODE = "bytecode"
    """Compiled Python: the time of its source is rewritten."""


class ArchiveMember(NamedTuple):
    """A file of an archive: its name there, its path (for a link its target), its size."""

    name: str
    path: str
    size_bytes: int
    kind: MemberKind = MemberKind.PLAIN
    executable: bool = False


def package_members(installed: Installed) -> list[ArchiveMember]:
    found: dict[str, ArchiveMember] = {}
    packages = f"lib/python{PYTHON}/site-packages/"
    taken: set[str] = set()
    for folder in installed.folders:
        here = set()
        for member in _members(folder, prefix=packages, skip=lambda name: name.startswith("__editable__")):
            top = member.name.removeprefix(packages).partition("/")[0]
            here.add(top)
            if top not in taken:
                found[member.name] = member
        taken |= here
    for one in installed.editables:
        if one.name in taken:
            if not one.is_first:
                continue
            found = {name: each for name, each in found.items() if not _is_of(name.removeprefix(packages), one.name)}
        if os.path.isdir(one.path):
            new = list(_members(one.path, prefix=f"{packages}{one.name}/"))
        else:
            new = [ArchiveMember(packages + one.name, one.path, os.path.getsize(one.path))]
        found.update((member.name, member) for member in new)
    others = list(_scripts(installed.scripts)) if installed.scripts else []
    if installed.conda:
        others += _conda_libraries(installed.conda)
    found.update((member.name, member) for member in others)
    return sorted(found.values())


def _is_of(name: str, top: str) -> bool:
    return name == top or name.startswith(f"{top}/")


def interpreter_members() -> list[ArchiveMember]:
    """Return the interpreter with its standard library. Raises ConfigError."""
    executable = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    library = sysconfig.get_path("stdlib")
    if not os.path.isfile(executable) or not os.path.isdir(library):
        raise ConfigError(
            f"the interpreter cannot travel: {executable} or {library} is not there; set [environment] python to the"
            " name of the one on compute nodes",
            key="python",
        )
    name = f"python{PYTHON}"
    place = os.path.relpath(library, sys.base_prefix)
    members = [ArchiveMember(f"base/bin/{name}", executable, os.path.getsize(executable), executable=True)]
    members.append(ArchiveMember("base/bin/python3", name, 0, MemberKind.LINK))
    members += _members(library, prefix=f"base/{place}/", skip=_NOT_NEEDED.fullmatch)
    members += _members(sysconfig.get_path("include"), prefix=f"base/include/{name}/")
    members += _bundled([member.path for member in members if ".so" in member.name or member.executable])
    return sorted({member.name: member for member in members}.values())


def _members(
    folder: str, *, prefix: str, skip: Callable[[str], object] = lambda _name: False
) -> Iterator[ArchiveMember]:
    for file in files_below(folder, skip=skip):
        if file.link:
            yield ArchiveMember(prefix + file.name, file.link, 0, MemberKind.LINK)
            continue
        executable = bool(file.facts.st_mode & 0o100)
        yield ArchiveMember(prefix + file.name, file.path, file.facts.st_size, executable=executable)
        compiled = _bytecode(file) if file.name.endswith(".py") else None
        if compiled is not None:
            above, _, _ = file.name.rpartition("/")
            inside = f"{above}/__pycache__/" if above else "__pycache__/"
            name = prefix + inside + os.path.basename(compiled)
            yield ArchiveMember(name, compiled, os.path.getsize(compiled), MemberKind.BYTECODE)


def _bytecode(source: FoundFile) -> str | None:
    compiled = importlib.util.cache_from_source(source.path)
    try:
        with open(compiled, "rb") as file:
            head = file.read(16)
    except OSError:
        return None
    said = int.from_bytes(head[8:12], "little"), int.from_bytes(head[12:16], "little")
    is_now = int(source.facts.st_mtime) & 0xFFFFFFFF, source.facts.st_size & 0xFFFFFFFF
    return compiled if head[:8] == _HEAD and said == is_now else None


def _conda_libraries(prefix: str) -> Iterator[ArchiveMember]:
    for part in ("lib", "share", "ssl", "etc", "libexec"):
        if os.path.isdir(os.path.join(prefix, part)):
            yield from _members(os.path.join(prefix, part), prefix=f"{part}/", skip=_CONDA_NOT_NEEDED.match)


def _scripts(folder: str) -> Iterator[ArchiveMember]:
    for file in files_below(folder):
        if file.link or re.match(r"(python|pypy|[Aa]ctivate)", file.name):
            continue
        with open(file.path, "rb") as opened:
            kind = MemberKind.SCRIPT if opened.read(2) == b"#!" else MemberKind.PLAIN
        yield ArchiveMember(f"bin/{file.name}", file.path, file.facts.st_size, kind, executable=True)


def _bundled(files: list[str]) -> Iterator[ArchiveMember]:
    ldd = shutil.which("ldd")
    if ldd is None:
        return
    said = subprocess.run([ldd, *files], capture_output=True, text=True, errors="replace", check=False).stdout
    for name, path in sorted(set(re.findall(r"^\s+(\S+) => (/\S+) \(0x", said, re.MULTILINE))):
        if not _OF_LIBC.match(name):
            yield ArchiveMember(
                f"base/lib/bundled/{name}", os.path.realpath(path), os.path.getsize(path), executable=True
            )
