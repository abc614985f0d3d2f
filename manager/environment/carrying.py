"""The archives of this environment, and the folder that goes to nodes without it, perhaps without its file system.

There are 2 archives. A pilot gets the packages from the session or from another pilot. The interpreter is small and
travels with the job, so that a node without Python can start with it. A site that names the interpreter of its compute
nodes needs only the packages. They are packed once for each state of the environment, into the state folder.

An archive is a gzipped tar whose bytes depend only on its members. A gzip file may have several compressed streams, so
blocks are compressed in parallel (zlib releases the interpreter's lock) and written in order. The level is 1: half the
size at 100 MB/s per core, and an archive is unpacked more often than packed.

    <session>/carried/<site>/session/
        start.sh             the job's program: finds a Python, or takes the one from base.tar.gz
        start.pyz            `stoker.pilot.starter`: gets the packages and becomes the pilot
        environment.json     the archives (`Packed`)
        python               the name of the interpreter on compute nodes; empty: it travels
        base.tar.gz          the interpreter, where it travels

    where nodes do not see this machine's files, so that a pilot takes this folder for the session's:
        session.json         the address of the manager
        seed.address         the address of the seed, which sends the packages
        keys/transfer.json   the key of peer transfers; closed to other users
        copied               marks a copy

A job without a shared file system has the folder copied into its sandbox, as `session`, and next to it the key of its
block.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import shutil
import sys
import tarfile
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from stoker import locks, startup
from stoker.contexts.folders import state_folder
from stoker.contexts.objects import object_of, publish
from stoker.contexts.recipe import ObjectRef
from stoker.decoding import UNREADABLE
from stoker.errors import SessionError
from stoker.manager.environment.members import (
    ArchiveMember,
    MemberKind,
    interpreter_members,
    package_members,
    this_environment,
)
from stoker.pilot.transfer.fetch import SEED_FILE
from stoker.protocol.session import PYTHON, SessionFolder
from stoker.site import EnvironmentKind, Site
from stoker.units import show_bytes
from stoker.whole_files import draft_of, write_whole

# ---- archive


# ---- the tar file


TIME_S = 315_532_800
"""Of every file: 1980, the earliest that some tools support."""
_BLOCK_BYTES = 4 * 1024 * 1024
_MOST_WORKERS = 8

Progress = Callable[[int, int], None]
"""Called with the bytes done and in total."""


def write_archive(path: Path, members: Iterable[ArchiveMember], *, on_progress: Progress | None = None) -> None:
    """Raises OSError."""
    known = list(members)
    total, done = sum(member.size_bytes for member in known), 0
    with (
        path.open("xb") as file,
        _Compressor(file) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar,
    ):
        for member in known:
            _add(tar, member)
            done += member.size_bytes
            if on_progress is not None:
                on_progress(done, total)


def _add(tar: tarfile.TarFile, member: ArchiveMember) -> None:
    facts = tarfile.TarInfo(member.name)
    facts.mtime = TIME_S
    facts.mode = 0o700 if member.executable else 0o600
    if member.kind is MemberKind.LINK:
        facts.type, facts.linkname = tarfile.SYMTYPE, member.path
        tar.addfile(facts)
    elif member.kind is MemberKind.PLAIN:
        with open(member.path, "rb") as file:
            facts.size = os.fstat(file.fileno()).st_size
            tar.addfile(facts, file)
    else:
        data = Path(member.path).read_bytes()
        if member.kind is MemberKind.SCRIPT:
            data = _movable(data)
        else:  # bytecode, with the new time of its source
            data = data[:8] + TIME_S.to_bytes(4, "little") + data[12:]
        facts.size = len(data)
        tar.addfile(facts, io.BytesIO(data))


def _movable(script: bytes) -> bytes:
    """Return a script that runs with the Python next to it. Python sees the added lines as a string, the shell as a
    program."""
    first, _, rest = script.partition(b"\n")
    if b"python" not in first:
        return script
    return b'#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(readlink -f -- "$0")")/python" "$0" "$@"\n\' \'\'\'\n' + rest


class _Compressor(io.RawIOBase):
    def __init__(self, target: BinaryIO) -> None:
        self._target = target
        self._workers = max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0))))
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="stoker-pack")
        self._block = bytearray()
        self._under_way: deque[Future[bytes]] = deque()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._begin()
                self._finish(most_left=0)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # what tarfile gives
        self._block += data
        if len(self._block) >= _BLOCK_BYTES:
            self._begin()
            self._finish(most_left=2 * self._workers)
        return len(data)

    def _begin(self) -> None:
        if self._block:
            self._under_way.append(self._pool.submit(gzip.compress, bytes(self._block), 1, mtime=0))
            self._block = bytearray()

    def _finish(self, *, most_left: int) -> None:
        while len(self._under_way) > most_left:
            self._target.write(self._under_way.popleft().result())


# ---- the environment's archives


_KEPT = 4
_KEPT_S = 7 * 86400.0
"""Older unused archives are removed, except the newest ones."""


class Archive(msgspec.Struct, frozen=True):
    object: ObjectRef
    unpacked_bytes: int


class Packed(msgspec.Struct, frozen=True):
    """A starting pilot reads it as JSON. `interpreter`: its name on compute nodes, or empty: the archive `base` brings
    it."""

    packages: ObjectRef
    unpacked_bytes: int
    python: str
    interpreter: str = ""
    base: str = ""


def pack_environment(*, python: str = "", on_progress: Progress | None = None) -> Packed:
    """Pack this environment, or return the earlier archives. `python`: the interpreter on compute nodes; if empty, it
    is packed too. Raises ConfigError for what cannot be packed, SessionError without disk space."""
    installed = this_environment()
    place = state_folder() / "environments"
    packages = _archive(place, f"packages-{installed.key}", lambda: package_members(installed), on_progress)
    base = None
    if not python:
        executable = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
        facts = os.stat(executable)
        parts = "\0".join((sys.version, executable, str(facts.st_size), str(facts.st_mtime_ns)))
        key = hashlib.sha256(parts.encode(errors="replace")).hexdigest()[:32]
        base = _archive(place, f"interpreter-{key}", interpreter_members, None)
    return Packed(
        packages=packages.object,
        unpacked_bytes=packages.unpacked_bytes,
        python=PYTHON,
        interpreter=python,
        base=base.object.source if base is not None else "",
    )


def _archive(
    place: Path, name: str, members: Callable[[], list[ArchiveMember]], on_progress: Progress | None
) -> Archive:
    """Return the archive of that name, made if it is missing. Other processes wait for the one that makes it."""
    known = []
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (place / f"{name}.lock").open("ab") as turn:
            locks.wait(turn.fileno())
            facts, path = place / f"{name}.json", place / f"{name}.tar.gz"
            found = None
            with suppress(OSError, *UNREADABLE):
                found = msgspec.json.decode(facts.read_bytes(), type=Archive)
            if found is not None and path.exists():
                os.utime(facts)
                return found
            _forget_old(place)
            known = members()
            with draft_of(path, draft=place / f"{name}.draft") as draft:  # large: a killed writer leaves one at most
                draft.unlink(missing_ok=True)
                write_archive(draft, known, on_progress=on_progress)
            made = Archive(object_of(path), sum(member.size_bytes for member in known))
            write_whole(facts, msgspec.json.encode(made))
            return made
    except OSError as error:
        size = show_bytes(sum(member.size_bytes for member in known))
        raise SessionError(
            f"the environment ({size}) could not be packed in {place}: {error}; make room there, or name another place"
            " with STOKER_HOME"
        ) from error


def _forget_old(place: Path) -> None:
    here = sorted(place.glob("*.json"), key=lambda facts: facts.stat().st_mtime, reverse=True)
    for facts in here[_KEPT:]:
        if time.time() - facts.stat().st_mtime > _KEPT_S:
            for kind in (".tar.gz", ".json"):
                facts.with_suffix(kind).unlink(missing_ok=True)


CARRIED_AS = "session"
"""In a job's sandbox."""
_STARTER = (
    "connections.py",
    "errors.py",
    "log_files.py",
    "whole_files.py",
    "contexts/manifest.py",
    "pilot/starter/*.py",
    "pilot/transfer/*.py",
)
"""Parts of this package in `start.pyz`."""


def carried_folder(folder: SessionFolder, site: Site) -> Path:
    return folder.path / "carried" / site.name / CARRIED_AS


def carry(folder: SessionFolder, site: Site, environment: Packed) -> Path:
    """Write the files for nodes of a site. Raises SessionError."""
    place = carried_folder(folder, site)
    root = Path(startup.__file__).parent
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Each file is written whole: a batch system may be copying it just now.
        write_whole(place / "start.sh", (root / "pilot" / "starter" / "start.sh").read_bytes(), mode=0o700)
        _write_starter(place / "start.pyz", root)
        write_whole(place / "environment.json", msgspec.json.format(msgspec.json.encode(environment)))
        write_whole(place / "python", environment.interpreter.encode())
        if environment.base:
            target = place / "base.tar.gz"
            target.unlink(missing_ok=True)
            try:
                os.link(environment.base, target)
            except OSError:
                shutil.copyfile(environment.base, target)
        if not site.provider.shared_files:
            (place / "keys").mkdir(mode=0o700, exist_ok=True)
            write_whole(place / "copied", b"")
        publish(folder.objects, (environment.packages,))
    except OSError as error:
        raise SessionError(f"{place} cannot be made: {error}; make room there") from error
    return place


def starter_files(folder: SessionFolder, site: Site) -> list[Path]:
    """Return the folders that a job must bring to its node. Call it just before each submission: the manager may have
    moved."""
    if site.provider.shared_files:
        return []
    place = carried_folder(folder, site)
    for file in (folder.file, folder.path / SEED_FILE):
        if file.exists():
            write_whole(place / file.name, file.read_bytes())
    with suppress(FileNotFoundError):
        write_whole(place / "keys" / "transfer.json", folder.key_file("transfer").read_bytes())
    return [place]


def starter_command(folder: SessionFolder, site: Site, options: Sequence[str]) -> list[str]:
    """`options`: of `stoker-pilot`, without `--session`."""
    if site.provider.shared_files:
        return ["sh", str(carried_folder(folder, site) / "start.sh"), "--session", str(folder.path), *options]
    return ["sh", f"{CARRIED_AS}/start.sh", "--session", CARRIED_AS, *options]


def _write_starter(target: Path, root: Path) -> None:
    with draft_of(target) as draft, zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", "import sys\nfrom stoker.pilot.starter.main import main\nsys.exit(main())\n")
        for package in ("", "pilot/", "contexts/"):
            archive.writestr(f"stoker/{package}__init__.py", "")
        for pattern in _STARTER:
            for module in sorted(root.glob(pattern)):
                archive.write(module, Path("stoker", *module.parts[len(root.parts) :]))


# ---- for the sites of a session


log = logging.getLogger("stoker")

_EVERY_S = 5.0


def prepare(folder: SessionFolder, sites: Iterable[Site]) -> None:
    """Pack the environment if necessary, and write the files for nodes of these sites. Raises ConfigError for an
    environment that cannot be packed, SessionError without disk space."""
    for site in sites:
        if site.environment.kind is EnvironmentKind.PACKED:
            progress = _report(site.name)
            carry(folder, site, pack_environment(python=site.environment.python, on_progress=progress))


def _report(site: str) -> Progress:
    next_at = time.monotonic() + _EVERY_S / 5

    def tell(done: int, total: int) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + _EVERY_S
            log.warning(f"packing this environment for site {site}, once: {show_bytes(done)} of {show_bytes(total)}")

    return tell
