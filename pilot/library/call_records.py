"""Records of running calls and their output, which the agent reads after a library's process dies.

The marker is a small memory-mapped file with one record per slot. A record contains the call id, the start time on
CLOCK_MONOTONIC in ns (0 = idle), and the byte of the log where the call's output begins. A header record contains the
log's length at the end of the last call.

With one slot, a call's output is the text added to the log during the call. With several slots, each slot's thread
prints to a separate file. The file is moved into the log at the end of the call or after the process died.
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

from stoker.pilot.core.infrastructure import is_unwritable_disk_error
from stoker.protocol.calls import OutputRange

# ---- the marker of running calls

_RECORD_LAYOUT = struct.Struct("<Qqq")
_RECORD_BYTES = _RECORD_LAYOUT.size
UNKNOWN_OFFSET = -1  # log offset if the position of a call's output is unknown


class RunningCall(NamedTuple):
    """A running call. With a `slot` that the library does not have: an ended call (see `record_suspects`)."""

    call: int
    start_ns: int
    log_offset: int = UNKNOWN_OFFSET
    slot: int = 0


class CallMarker:
    def __init__(self, path: str | os.PathLike[str], *, slots: int) -> None:
        self._path = os.path.abspath(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = (1 + slots) * _RECORD_BYTES
            os.posix_fallocate(descriptor, 0, size)  # fail here on a full disk: a later write would kill this process
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._pack = _RECORD_LAYOUT.pack_into

    def record_start(self, slot: int, call: int, start_ns: int, log_offset: int) -> None:
        self._pack(self._map, (1 + slot) * _RECORD_BYTES, call, start_ns, log_offset)

    def record_idle(self, slot: int) -> None:
        self._pack(self._map, (1 + slot) * _RECORD_BYTES, 0, 0, UNKNOWN_OFFSET)

    def record_log_length(self, log_bytes: int) -> None:
        self._pack(self._map, 0, 0, 0, log_bytes)

    def record_suspects(self, calls: Iterable[int]) -> None:
        """Record ended calls whose outcomes have not reached the agent. One of them may be why this process dies."""
        with suppress(OSError), open(self._path, "ab") as file:
            file.write(b"".join(_RECORD_LAYOUT.pack(call, time.monotonic_ns(), UNKNOWN_OFFSET) for call in calls))


def read_running_calls(path: Path) -> list[RunningCall]:
    """Return the running calls that a process recorded in its marker file."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    records = list(_RECORD_LAYOUT.iter_unpack(data[: len(data) // _RECORD_BYTES * _RECORD_BYTES]))
    others_to = records[0][2] if records else 0
    return [
        RunningCall(call, start_ns, log_from if log_from == UNKNOWN_OFFSET else max(log_from, others_to), slot)
        for slot, (call, start_ns, log_from) in enumerate(records[1:])
        if start_ns
    ]


# ---- output

_MAX_GAP_S = 0.001  # seconds; if two calls are further apart, output between them belongs to neither call
_clock = time.perf_counter


class LogTail:
    """Finds the output of each call in the log of a library with one slot."""

    def __init__(self, path: str) -> None:
        self._path = path
        facts = os.fstat(1)
        self.start = facts.st_size  # offset in the log where the output of the current or next call begins
        self._last_taken_at = 0.0
        self._file_identity = (facts.st_dev, facts.st_ino)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout = open_log_stream(1)
        if isinstance(sys.stderr, io.TextIOWrapper):
            sys.stderr = open_log_stream(2)

    def begin_call(self) -> int:
        if _clock() - self._last_taken_at > _MAX_GAP_S and not _is_log_length(self.start):
            self.start = max(self.start, self._log_length())
        return self.start

    def take_output(self) -> OutputRange | None:
        _flush_if_possible(sys.stdout)
        _flush_if_possible(sys.stderr)
        self._last_taken_at = _clock()
        start = self.start
        if _is_log_length(start):
            return None
        size = self._log_length()
        if size <= start:
            return None
        self.start = size
        return OutputRange(path=self._path, start=start, end=size)

    def _log_length(self) -> int:
        try:
            facts = os.fstat(1)
        except OSError:
            return 0
        return facts.st_size if (facts.st_dev, facts.st_ino) == self._file_identity else 0


class ThreadTail:
    """Collects the output of one slot in a file, for libraries with several slots."""

    _lock = threading.Lock()

    def __init__(self, path: str, output_file: str, *, on_log_length: Callable[[int], None]) -> None:
        self._path = path
        self._on_log_length = on_log_length
        self._file = os.open(output_file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._stream = open_log_stream(self._file)
        route_output_by_thread()

    def begin_call(self) -> int:
        """Send this thread's Python output to the slot's file. Return the log offset where output of the call's C code
        begins.
        """
        _thread_output.stream = self._stream
        try:
            return os.fstat(1).st_size
        except OSError:  # a call has closed the descriptor
            return 0

    def take_output(self) -> OutputRange | None:
        """Move this thread's output into the log."""
        _thread_output.stream = None
        _flush_if_possible(self._stream)
        with self._lock:
            try:
                printed = _move_output(self._file, 1, self._path)
                self._on_log_length(os.fstat(1).st_size)
            except OSError:  # a closed descriptor or a disk error loses only the output
                return None
        return printed


def call_output_path(folder: str | os.PathLike[str], slot: int) -> str:
    return os.path.join(folder, f"printed-{slot}")


def recover_call_output(log: str, output_file: str) -> None:
    """Append the output that a call of a dead process left in `output_file` to the log."""
    with suppress(OSError), open(output_file, "r+b", buffering=0) as file, open(log, "ab", buffering=0) as target:
        _move_output(file.fileno(), target.fileno(), log)


def _move_output(file: int, log: int, path: str) -> OutputRange | None:
    size = os.fstat(file).st_size
    if not size:
        return None
    start, done = os.fstat(log).st_size, 0
    try:
        while done < size and (block := os.pread(file, min(size - done, 1 << 20), done)):
            done += os.write(log, block)
    except OSError as error:
        if not is_unwritable_disk_error(error):
            raise
    os.ftruncate(file, 0)
    return OutputRange(path=path, start=start, end=start + done) if done else None


def route_output_by_thread() -> None:
    if not isinstance(sys.stdout, _OutputRouter):
        sys.stdout = _OutputRouter(sys.stdout)
        sys.stderr = _OutputRouter(sys.stderr)
        # A forked child may outlive the call, so its output goes to the log directly.
        os.register_at_fork(after_in_child=lambda: setattr(_thread_output, "stream", None))


_thread_output = threading.local()


class _LogFile(io.FileIO):
    """A log file that drops output if the disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not is_unwritable_disk_error(error):
                raise
            return memoryview(data).nbytes


def open_log_stream(descriptor: int) -> io.TextIOWrapper:
    file = io.BufferedWriter(_LogFile(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)


class _OutputRouter:
    """Forwards each access to the current thread's stream if it has one, else to the original one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_thread_output, "stream", None) or self._stream, name)

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self.flush()


def _is_log_length(length: int) -> bool:
    try:
        return os.lseek(1, 0, os.SEEK_END) == length
    except OSError:  # a call has closed the descriptor, or replaced it by a pipe
        return False


def _flush_if_possible(stream: TextIO | None) -> None:
    with suppress(OSError, ValueError, AttributeError):
        stream.flush()  # type: ignore[union-attr]
