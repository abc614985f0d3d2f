"""Records of calls that survive the library's process: which call runs, and where its output is.

The marker is a small mapped file with a record per slot: the call's id, its start on CLOCK_MONOTONIC in ns (0 = idle),
and where in the log its output begins. To write it costs no system call. The agent reads it. The first record holds the
log's length when a call last ended.

With one slot, standard output is the log, and a call's output is what the log grew by. With several slots, each
thread's prints go to a file of its slot, and into the log when the call ends or after the process died (`recover`).
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from stoker.pilot.core.infrastructure import takes_no_writes
from stoker.protocol.calls import Printed

# ---- the marker of running calls

_RECORD = struct.Struct("<Qqq")
_SIZE = _RECORD.size
NOWHERE = -1  # stands for the place in the log of a call whose output is not known


class Running(NamedTuple):
    """A running call. `slot`: beyond the library's slots it has ended."""

    call: int
    start_ns: int
    log_from: int = NOWHERE
    slot: int = 0


class Marker:
    """The library's side."""

    def __init__(self, path: str | os.PathLike[str], *, slots: int) -> None:
        self._path = os.path.abspath(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = (1 + slots) * _SIZE
            os.posix_fallocate(descriptor, 0, size)  # a full disk is an error now, not a signal later
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._pack = _RECORD.pack_into

    def begin(self, slot: int, call: int, start_ns: int, log_from: int = NOWHERE) -> None:
        """A slot begins a call, whose output begins at this byte of the log."""
        self._pack(self._map, (1 + slot) * _SIZE, call, start_ns, log_from)

    def idle(self, slot: int) -> None:
        """A slot has nothing to run."""
        self._pack(self._map, (1 + slot) * _SIZE, 0, 0, NOWHERE)

    def ended(self, log_bytes: int) -> None:
        """A call has ended, and the log has this length now."""
        self._pack(self._map, 0, 0, 0, log_bytes)

    def suspect(self, calls: Iterable[int]) -> None:
        """These calls have ended, and one of them may be why this process ends before it could tell that."""
        with suppress(OSError), open(self._path, "ab") as file:
            file.write(b"".join(_RECORD.pack(call, time.monotonic_ns(), NOWHERE) for call in calls))


def running(path: Path) -> list[Running]:
    """Calls that run. None where the library never came to write the file."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    records = list(_RECORD.iter_unpack(data[: len(data) // _SIZE * _SIZE]))
    others_to = records[0][2] if records else 0
    return [
        Running(call, start_ns, log_from if log_from == NOWHERE else max(log_from, others_to), slot)
        for slot, (call, start_ns, log_from) in enumerate(records[1:])
        if start_ns
    ]


# ---- output

_GAP_S = 0.001  # output in the gap between two calls belongs to neither, if the gap is longer
_clock = time.perf_counter


class LogTail:
    """The output of the one slot: the growth of the log file."""

    def __init__(self, path: str) -> None:
        self._path = path
        facts = os.fstat(1)
        self.start = facts.st_size  # where in the log the output of the call that runs, or of the next one, begins
        self._taken_at = 0.0
        self._is = (facts.st_dev, facts.st_ino)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout = stream_to(1)
        if isinstance(sys.stderr, io.TextIOWrapper):
            sys.stderr = stream_to(2)

    def begin(self) -> int:
        """A call begins. Returns where in the log its output begins."""
        if _clock() - self._taken_at > _GAP_S and not _has_length(1, self.start):
            self.start = max(self.start, self._size())
        return self.start

    def take(self) -> Printed | None:
        """Return the output since the call began."""
        _flush(sys.stdout)
        _flush(sys.stderr)
        self._taken_at = _clock()
        start = self.start
        if _has_length(1, start):
            return None
        size = self._size()
        if size <= start:
            return None
        self.start = size
        return Printed(path=self._path, start=start, end=size)

    def _size(self) -> int:
        try:
            facts = os.fstat(1)
        except OSError:
            return 0
        return facts.st_size if (facts.st_dev, facts.st_ino) == self._is else 0


class ThreadTail:
    """Output of one of several slots: Python's streams of its thread, kept in the slot's file."""

    _lock = threading.Lock()

    def __init__(self, path: str, kept: str, *, ended: Callable[[int], None]) -> None:
        self._path = path
        self._ended = ended
        self._file = os.open(kept, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._stream = stream_to(self._file)
        route()

    def begin(self) -> int:
        """A call begins in this thread. Returns where in the log output of its C code can begin."""
        _local.stream = self._stream
        try:
            return os.fstat(1).st_size
        except OSError:  # a call has closed it
            return 0

    def take(self) -> Printed | None:
        """Write what this thread has printed into the log, and say where."""
        _local.stream = None
        _flush(self._stream)
        with self._lock:
            try:
                printed = _move(self._file, 1, self._path)
                self._ended(os.fstat(1).st_size)
            except OSError:  # a call has closed it, or the disk fails: a log costs no result
                return None
        return printed


def kept_of(folder: str | os.PathLike[str], slot: int) -> str:
    """Where the output of the call that runs in a slot lies, in the library's folder."""
    return os.path.join(folder, f"printed-{slot}")


def recover(log: str, kept: str) -> None:
    """Write into the log what a call of a dead process has printed."""
    try:
        with open(kept, "r+b", buffering=0) as file, open(log, "ab", buffering=0) as target:
            _move(file.fileno(), target.fileno(), log)
    except OSError:
        return


def _move(file: int, log: int, path: str) -> Printed | None:
    size = os.fstat(file).st_size
    if not size:
        return None
    start, done = os.fstat(log).st_size, 0
    try:
        while done < size and (block := os.pread(file, min(size - done, 1 << 20), done)):
            done += os.write(log, block)
    except OSError as error:
        if not takes_no_writes(error):
            raise
    os.ftruncate(file, 0)
    return Printed(path=path, start=start, end=start + done) if done else None


def route() -> None:
    """Route Python's streams by thread, for the calls of several slots."""
    if not isinstance(sys.stdout, _Router):
        sys.stdout = _Router(sys.stdout)
        sys.stderr = _Router(sys.stderr)
        os.register_at_fork(after_in_child=lambda: setattr(_local, "stream", None))  # its lines may come after the call


_local = threading.local()


class _LogFile(io.FileIO):
    """The log file under Python's streams: drops what the disk does not take."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not takes_no_writes(error):
                raise
            return memoryview(data).nbytes


def stream_to(descriptor: int) -> io.TextIOWrapper:
    file = io.BufferedWriter(_LogFile(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)


class _Router(io.TextIOBase):
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        kept: TextIO | None = getattr(_local, "stream", None)
        return (kept if kept is not None else self._stream).write(text)

    def flush(self) -> None:
        (getattr(_local, "stream", None) or self._stream).flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self.flush()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only here
        return self._stream.encoding


def _has_length(file: int, length: int) -> bool:
    try:
        return os.lseek(file, 0, os.SEEK_END) == length
    except OSError:  # a call has closed it, or has put a pipe in its place
        return False


def _flush(stream: TextIO | None) -> None:
    if stream is not None:
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
