"""What a call prints, told by where it lies in the library's log file.

With one slot, standard output and error are the log file itself, so that output of child processes and of C code is in
it too, and a call's part is what the file grew by while it ran. With several slots the calls of all threads would mix:
what a thread writes to Python's own streams goes to a file of its slot, and from there into the log in one piece when
the call ends, or when the process died (`recover`). Output of child processes and C code still lands in the log, but
belongs to no call, unless one ran alone.

A log whose disk is full loses what is printed. It costs no call.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from stoker.pilot.core.infrastructure import takes_no_writes
from stoker.protocol.calls import Printed

_GAP_S = 0.001
"""What is printed after a call ended, and so long before the next one begins, belongs to neither."""
_clock = time.perf_counter


class LogTail:
    """One slot: what the log file grew by."""

    def __init__(self, path: str) -> None:
        self._path = path
        facts = os.fstat(1)
        self.start = facts.st_size
        """Where in the log the output of the call that runs, or of the next one, begins."""
        self._taken_at = 0.0
        self._is = (facts.st_dev, facts.st_ino)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout = stream_to(1)
        if isinstance(sys.stderr, io.TextIOWrapper):
            sys.stderr = stream_to(2)

    def begin(self) -> int:
        """A call begins. Returns where in the log its output begins."""
        if _clock() - self._taken_at > _GAP_S:
            self.start = max(self.start, self._size())
        return self.start

    def take(self) -> Printed | None:
        """What was printed since the call began."""
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
        """How long the log is; 0 if a call has closed it, or has put another file in its place."""
        try:
            facts = os.fstat(1)
        except OSError:
            return 0
        return facts.st_size if (facts.st_dev, facts.st_ino) == self._is else 0


class ThreadTail:
    """Several slots: Python's streams, a thread at a time. `kept`: the path of this slot's file. `ended` is told how
    long the log is when a call has ended."""

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
    """Write into the log what a call of a dead process has printed. A disk that takes no writes loses it."""
    try:
        with open(kept, "r+b", buffering=0) as file, open(log, "ab", buffering=0) as target:
            _move(file.fileno(), target.fileno(), log)
    except OSError:
        return


def _move(file: int, log: int, path: str) -> Printed | None:
    """Move what a slot's file holds to the end of the log."""
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
    """From now on Python's streams are those that the calls of several threads print to."""
    if not isinstance(sys.stdout, _Router):
        sys.stdout = _Router(sys.stdout)
        sys.stderr = _Router(sys.stderr)
        os.register_at_fork(after_in_child=lambda: setattr(_local, "stream", None))  # its lines may come after the call


_local = threading.local()


class _LogFile(io.FileIO):
    """The log file as Python's streams write to it: what a disk does not take is lost."""

    def write(self, data: Any) -> int:
        """Write it, if the disk takes it."""
        try:
            return super().write(data)
        except OSError as error:
            if not takes_no_writes(error):
                raise
            return memoryview(data).nbytes


def stream_to(descriptor: int) -> io.TextIOWrapper:
    """A stream to the log. A library that is killed leaves its last lines; odd characters never fail a call."""
    file = io.BufferedWriter(_LogFile(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)


class _Router(io.TextIOBase):
    """A text stream that writes to the file of a call's slot, or else to the log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write it to the slot's file if a call runs in this thread."""
        kept: TextIO | None = getattr(_local, "stream", None)
        return (kept if kept is not None else self._stream).write(text)

    def flush(self) -> None:
        """Flush the stream that this thread writes to."""
        (getattr(_local, "stream", None) or self._stream).flush()

    def fileno(self) -> int:
        """The log file's."""
        return self._stream.fileno()

    def close(self) -> None:
        """Stay open: other threads print to it."""
        self.flush()

    def writable(self) -> bool:
        """Always."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only here
        """As the stream beneath."""
        return self._stream.encoding


def _has_length(file: int, length: int) -> bool:
    """True if an open file has this length. A seek costs a quarter of an `fstat`, and moves nothing in a log, to whose
    end all writes go."""
    try:
        return os.lseek(file, 0, os.SEEK_END) == length
    except OSError:  # a call has closed it, or has put a pipe in its place
        return False


def _flush(stream: TextIO | None) -> None:
    """Flush, whatever a user has put in the stream's place."""
    if stream is not None:
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
