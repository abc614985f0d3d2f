"""Pack this environment into archives in the state folder, once for each of its states (`pack_environment`).

There are two archives. A pilot gets the packages from the session or from another pilot. The interpreter is small and
travels with the job, so that a node without Python can start with it. A site that names the interpreter of its compute
nodes needs the packages only.

An archive is a gzipped tar whose bytes depend on its members alone. A gzip file may consist of several compressed
streams, which every reader joins. So blocks are compressed in parallel (zlib releases the interpreter's lock) and
written in order. The level is 1: half the size at a hundred megabytes per second and core, and an archive is unpacked
more often than it is made.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from stoker import locks
from stoker.contexts.folders import state_folder
from stoker.contexts.objects import object_of
from stoker.contexts.recipe import ObjectRef
from stoker.decoding import UNREADABLE
from stoker.errors import SessionError
from stoker.manager.environment.installed import this_environment
from stoker.manager.environment.members import ArchiveMember, MemberKind, interpreter_members, package_members
from stoker.protocol.session import PYTHON
from stoker.units import show_bytes
from stoker.whole_files import draft_of, write_whole

# ---- the tar file


TIME_S = 315_532_800
"""The modification time of every file: start of 1980, the earliest time that some tools support."""
_BLOCK_BYTES = 4 * 1024 * 1024
_MOST_WORKERS = 8

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total."""


def write_archive(path: Path, members: Iterable[ArchiveMember], *, on_progress: Progress | None = None) -> None:
    """Write these members in order. Raises OSError."""
    known = list(members)
    total, done = sum(member.size_bytes for member in known), 0
    with path.open("xb") as file, _Compressor(file) as packed, _tar(packed) as tar:
        for member in known:
            _add(tar, member)
            done += member.size_bytes
            if on_progress is not None:
                on_progress(done, total)


def _tar(packed: _Compressor) -> tarfile.TarFile:
    return tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20)


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
        data = _movable(data) if member.kind is MemberKind.SCRIPT else _with_time(data)
        facts.size = len(data)
        tar.addfile(facts, io.BytesIO(data))


def _with_time(bytecode: bytes) -> bytes:
    return bytecode[:8] + TIME_S.to_bytes(4, "little") + bytecode[12:]


def _movable(script: bytes) -> bytes:
    """Return a script that runs with the Python next to it; a script for another interpreter stays unchanged. Python
    sees the added lines as a string, the shell as a program."""
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
"""Archives unused for this long are removed, except the newest ones: a running session may still pass one on."""


class Archive(msgspec.Struct, frozen=True):
    """An archive on this machine, as an object, and its unpacked size."""

    object: ObjectRef
    unpacked_bytes: int


class Packed(msgspec.Struct, frozen=True):
    """A packed environment; as JSON a starting pilot reads it. `packages`: the archive of the packages. `python`: its
    version. `interpreter`: its name on compute nodes; if empty, the archive `base` brings it."""

    packages: ObjectRef
    unpacked_bytes: int
    python: str
    interpreter: str = ""
    base: str = ""


def pack_environment(*, python: str = "", on_progress: Progress | None = None) -> Packed:
    """Pack this environment, or return the archives packed before. `python`: the name of the interpreter on compute
    nodes; if empty, it is packed too. Raises ConfigError for what cannot be packed, SessionError without disk space."""
    installed = this_environment()
    place = state_folder() / "environments"
    packages = _archive(place, f"packages-{installed.key}", lambda: package_members(installed), on_progress)
    base = None if python else _archive(place, f"interpreter-{_interpreter_key()}", interpreter_members, None)
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
    """Return the archive of that name, made now if it is missing. Other processes wait for the one that makes it."""
    known = []
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (place / f"{name}.lock").open("ab") as turn:
            locks.wait(turn.fileno())
            facts, path = place / f"{name}.json", place / f"{name}.tar.gz"
            found = _read(facts)
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


def _read(facts: Path) -> Archive | None:
    try:
        return msgspec.json.decode(facts.read_bytes(), type=Archive)
    except (OSError, *UNREADABLE):
        return None


def _forget_old(place: Path) -> None:
    here = sorted(place.glob("*.json"), key=lambda facts: facts.stat().st_mtime, reverse=True)
    for facts in here[_KEPT:]:
        if time.time() - facts.stat().st_mtime > _KEPT_S:
            for kind in (".tar.gz", ".json"):
                facts.with_suffix(kind).unlink(missing_ok=True)


def _interpreter_key() -> str:
    executable = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    facts = os.stat(executable)
    parts = "\0".join((sys.version, executable, str(facts.st_size), str(facts.st_mtime_ns)))
    return hashlib.sha256(parts.encode(errors="replace")).hexdigest()[:32]
