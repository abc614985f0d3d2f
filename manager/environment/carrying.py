"""Pack this Python environment into archives, and write the folder of files that starts pilots on other nodes.

A pilot fetches the archive of packages from the session or from another pilot. The small archive of the interpreter is
copied with the job, unless the site names an interpreter. The bytes of an archive depend only on its members.

    <session>/carried/<site>/session/
        start.sh             the job's program: finds a Python, or unpacks base.tar.gz
        start.pyz            `stoker.pilot.starter`: fetches the packages and becomes the pilot
        environment.json     the archives (`PackedEnvironment`)
        python               the name of the interpreter on compute nodes, or empty
        base.tar.gz          the interpreter, unless the site names one

    only for nodes that cannot access this machine's files (the job's sandbox gets a copy of the folder):
        session.json         the manager's address
        seed.address         the address of the seed, which sends the packages
        keys/transfer.json   the key of peer transfers; closed to other users
        copied               an empty file that marks a copy
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import sys
import tarfile
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO

import msgspec

from stoker import locks, startup
from stoker.contexts.folders import state_folder
from stoker.contexts.objects import make_object_ref, publish_objects
from stoker.contexts.recipe import ObjectRef
from stoker.decoding import UNREADABLE
from stoker.errors import SessionError
from stoker.manager.environment.members import (
    ArchiveMember,
    MemberKind,
    inspect_environment,
    interpreter_file,
    list_interpreter_members,
    list_package_members,
)
from stoker.pilot.starter.place import link_or_copy
from stoker.pilot.transfer.fetch import SEED_FILE
from stoker.protocol.session import PYTHON, SessionFolder
from stoker.site import EnvironmentKind, Site
from stoker.units import show_bytes
from stoker.whole_files import draft_file, write_whole

# ---- the tar file

FILE_TIME_S = 315_532_800
"""Modification time of every file in an archive: 1980, the earliest year that all tools support."""
_BLOCK_BYTES = 4 * 1024 * 1024
_MAX_COMPRESSION_THREADS = 8

Progress = Callable[[int, int], None]
"""Function that receives the number of packed bytes and the total number of bytes."""


def write_archive(path: Path, members: Sequence[ArchiveMember], *, on_progress: Progress | None = None) -> None:
    """Write the members into a new compressed tar file. Raises OSError."""
    total, done = sum(member.size_bytes for member in members), 0
    with (
        path.open("xb") as file,
        _ParallelGzipWriter(file) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar,
    ):
        for member in members:
            _add_member_to_tar(tar, member)
            done += member.size_bytes
            if on_progress is not None:
                on_progress(done, total)


def _add_member_to_tar(tar: tarfile.TarFile, member: ArchiveMember) -> None:
    facts = tarfile.TarInfo(member.name)
    facts.mtime, facts.mode = FILE_TIME_S, 0o700 if member.executable else 0o600
    if member.kind is MemberKind.LINK:
        facts.type, facts.linkname = tarfile.SYMTYPE, member.path
        tar.addfile(facts)
        return
    with open(member.path, "rb") as opened:
        file: IO[bytes] = opened
        if member.kind is MemberKind.SCRIPT:
            file = io.BytesIO(_make_script_relocatable(opened.read()))
        elif member.kind is MemberKind.BYTECODE:  # write the source's new modification time into the header
            file = io.BytesIO(opened.read(8) + FILE_TIME_S.to_bytes(4, "little") + opened.read()[4:])
        facts.size = file.seek(0, os.SEEK_END)
        file.seek(0)
        tar.addfile(facts, file)


def _make_script_relocatable(script: bytes) -> bytes:
    """Replace a script's first line, so that the Python in its folder runs it. To Python, the lines are a string."""
    first, _, rest = script.partition(b"\n")
    if b"python" not in first:
        return script
    return b'#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(readlink -f -- "$0")")/python" "$0" "$@"\n\' \'\'\'\n' + rest


class _ParallelGzipWriter(io.RawIOBase):
    def __init__(self, target: BinaryIO) -> None:
        self._target = target
        self._workers = max(1, min(_MAX_COMPRESSION_THREADS, len(os.sched_getaffinity(0))))
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="stoker-pack")
        self._block = bytearray()
        self._unfinished_blocks: deque[Future[bytes]] = deque()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._submit_block_and_write_finished(max_unfinished=0)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # tarfile passes bytes
        self._block += data
        if len(self._block) >= _BLOCK_BYTES:
            self._submit_block_and_write_finished(max_unfinished=2 * self._workers)
        return len(data)

    def _submit_block_and_write_finished(self, *, max_unfinished: int) -> None:
        if self._block:
            self._unfinished_blocks.append(self._pool.submit(gzip.compress, bytes(self._block), 1, mtime=0))
            self._block = bytearray()
        while len(self._unfinished_blocks) > max_unfinished:
            self._target.write(self._unfinished_blocks.popleft().result())


# ---- the environment's archives

_MIN_KEPT_ARCHIVES = 4
_MAX_UNUSED_S = 7 * 86400.0
"""Seconds after which an unused archive is removed. The newest `_MIN_KEPT_ARCHIVES` archives stay."""


class PackedArchive(msgspec.Struct, frozen=True):
    object: ObjectRef
    unpacked_bytes: int


class PackedEnvironment(msgspec.Struct, frozen=True):
    """The archives from which a pilot starts, as stored in `environment.json`. `base`: path of the interpreter's
    archive; empty if `interpreter` names an interpreter on compute nodes.
    """

    packages: ObjectRef
    unpacked_bytes: int
    python: str
    interpreter: str = ""
    base: str = ""


def pack_environment(*, python: str = "", on_progress: Progress | None = None) -> PackedEnvironment:
    """Pack this environment, or return its existing archives. Without `python`, the interpreter is packed too.

    Raises ConfigError if packing is impossible, and SessionError if disk space is missing.
    """
    installed = inspect_environment()
    place, base = state_folder() / "environments", ""
    packages = _find_or_pack_archive(
        place, f"packages-{installed.key}", lambda: list_package_members(installed), on_progress
    )
    if not python:
        executable = interpreter_file()
        facts = os.stat(executable)
        parts = "\0".join((sys.version, executable, str(facts.st_size), str(facts.st_mtime_ns)))
        key = hashlib.sha256(parts.encode(errors="replace")).hexdigest()[:32]
        base = _find_or_pack_archive(place, f"interpreter-{key}", list_interpreter_members, None).object.source
    return PackedEnvironment(packages.object, packages.unpacked_bytes, PYTHON, python, base)


def _find_or_pack_archive(
    place: Path, name: str, members: Callable[[], list[ArchiveMember]], on_progress: Progress | None
) -> PackedArchive:
    """Return the archive with this name. If it does not exist, pack it; other processes wait until it is complete."""
    size_bytes = 0
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (place / f"{name}.lock").open("ab") as turn:
            locks.wait_for_lock(turn.fileno())
            facts, path = place / f"{name}.json", place / f"{name}.tar.gz"
            with suppress(OSError, *UNREADABLE):
                found = msgspec.json.decode(facts.read_bytes(), type=PackedArchive)
                if path.exists():
                    os.utime(facts)
                    return found
            _remove_old_archives(place)
            known = members()
            size_bytes = sum(member.size_bytes for member in known)
            # All processes use the same draft name, so killed processes leave at most one large incomplete file.
            with draft_file(path, draft=place / f"{name}.draft") as draft:
                draft.unlink(missing_ok=True)
                write_archive(draft, known, on_progress=on_progress)
            made = PackedArchive(make_object_ref(path), size_bytes)
            write_whole(facts, msgspec.json.encode(made))
            return made
    except OSError as error:
        raise SessionError(
            f"the environment ({show_bytes(size_bytes)}) could not be packed in {place}: {error}; free space there, or"
            " set another folder with STOKER_HOME"
        ) from error


def _remove_old_archives(place: Path) -> None:
    here = sorted(place.glob("*.json"), key=lambda facts: facts.stat().st_mtime, reverse=True)
    for facts in here[_MIN_KEPT_ARCHIVES:]:
        if time.time() - facts.stat().st_mtime > _MAX_UNUSED_S:
            facts.with_suffix(".tar.gz").unlink(missing_ok=True)
            facts.unlink(missing_ok=True)


NODE_FOLDER_NAME = "session"
_STARTER_SOURCES = (
    "connections.py", "errors.py", "log_files.py", "whole_files.py", "contexts/manifest.py", "pilot/starter/*.py",
    "pilot/transfer/*.py",
)  # fmt: skip
"""Files of this package that `start.pyz` contains."""


def pilot_files_folder(folder: SessionFolder, site: Site) -> Path:
    return folder.path / "carried" / site.name / NODE_FOLDER_NAME


def write_pilot_files(folder: SessionFolder, site: Site, environment: PackedEnvironment) -> Path:
    """Write the files with which nodes start pilots, and return their folder. Raises SessionError."""
    place = pilot_files_folder(folder, site)
    root = Path(startup.__file__).parent
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Replace each file atomically, because a batch system may be copying it.
        write_whole(place / "start.sh", (root / "pilot" / "starter" / "start.sh").read_bytes(), mode=0o700)
        _write_starter_zip(place / "start.pyz", root)
        write_whole(place / "environment.json", msgspec.json.format(msgspec.json.encode(environment)))
        write_whole(place / "python", environment.interpreter.encode())
        if environment.base:
            link_or_copy(environment.base, place / "base.tar.gz")
        if not site.provider.shared_files:
            (place / "keys").mkdir(mode=0o700, exist_ok=True)
            write_whole(place / "copied", b"")
        publish_objects(folder.objects, (environment.packages,))
    except OSError as error:
        raise SessionError(f"{place} cannot be created: {error}; free space there") from error
    return place


def refresh_pilot_files(folder: SessionFolder, site: Site) -> list[Path]:
    """Update the manager's address in the pilot files. Return the folders to copy to a job's node."""
    place = pilot_files_folder(folder, site)
    for file in (folder.file, folder.path / SEED_FILE):
        if file.exists():
            write_whole(place / file.name, file.read_bytes())
    with suppress(FileNotFoundError):
        write_whole(place / "keys" / "transfer.json", folder.key_file("transfer").read_bytes())
    return [place]


def pilot_starter_command(folder: SessionFolder, site: Site, options: Sequence[str]) -> list[str]:
    if site.provider.shared_files:
        return ["sh", str(pilot_files_folder(folder, site) / "start.sh"), "--session", str(folder.path), *options]
    return ["sh", f"{NODE_FOLDER_NAME}/start.sh", "--session", NODE_FOLDER_NAME, *options]


def _write_starter_zip(target: Path, root: Path) -> None:
    with draft_file(target) as draft, zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", "import sys\nfrom stoker.pilot.starter.main import main\nsys.exit(main())\n")
        for package in ("", "pilot/", "contexts/"):
            archive.writestr(f"stoker/{package}__init__.py", "")
        for pattern in _STARTER_SOURCES:
            for module in sorted(root.glob(pattern)):
                archive.write(module, Path("stoker", *module.parts[len(root.parts) :]))


# ---- for the sites of a session

log = logging.getLogger("stoker")


def prepare_packed_environments(folder: SessionFolder, sites: Iterable[Site]) -> None:
    """Pack environments and write the files that start pilots, for sites with `kind = "packed"`."""
    for site in sites:
        if site.environment.kind is EnvironmentKind.PACKED:
            write_pilot_files(
                folder, site, pack_environment(python=site.environment.python, on_progress=_progress_logger(site.name))
            )


def _progress_logger(site: str) -> Progress:
    next_at = time.monotonic() + 1.0

    def log_progress(done: int, total: int) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + 5.0
            log.warning(f"packing this environment for site {site} (once): {show_bytes(done)} of {show_bytes(total)}")

    return log_progress
