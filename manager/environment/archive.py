"""Writing an archive: a gzipped tar whose bytes depend on its members alone, compressed on several cores.

A gzip file may consist of several compressed streams, one after the other; every reader takes them for one. So blocks
are compressed side by side (zlib releases the interpreter's lock) and written in order. Level 1: half the size at
a hundred megabytes a second a core, and the archive is unpacked more often than it is made.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from stoker.manager.environment.members import ArchiveMember, MemberKind

TIME_S = 315_532_800
"""Every file's time of change: the first day of 1980, before which some tools cannot count."""
_BLOCK_BYTES = 4 * 1024 * 1024
_MOST_WORKERS = 8

Progress = Callable[[int, int], None]
"""Is told the bytes done and the bytes in all."""


def write_archive(path: Path, members: Iterable[ArchiveMember], *, on_progress: Progress | None = None) -> None:
    """Write these members, in their order. Raises OSError."""
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
    """A script that runs with the Python beside it, wherever that is; one for another interpreter stays as it is.

    The lines are a comment to Python (a string in three quotes), and a program to the shell.
    """
    first, _, rest = script.partition(b"\n")
    if b"python" not in first:
        return script
    return b'#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(readlink -f -- "$0")")/python" "$0" "$@"\n\' \'\'\'\n' + rest


class _Compressor(io.RawIOBase):
    """Compresses what is written to it, block by block."""

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
        """Always."""
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # what tarfile gives
        """Take data; a full block is compressed in another thread."""
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
