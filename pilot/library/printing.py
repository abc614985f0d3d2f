"""What a call prints, told by where it lies in the library's log file.

With one slot, standard output and error are the log file itself, so that output of child processes and of C code is in
it too, and a call's part is what the file grew by. With several slots the calls of all threads would mix: Python's own
streams are then kept a thread and written in one piece when the call ends (output of child processes and C code still
lands in the log, but belongs to no call).

A log whose disk is full loses what is printed. It costs no call.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from typing import Any, TextIO

from stoker.manager.protocol.calls import Printed
from stoker.pilot.core.disk import takes_no_writes


class LogTail:
    """One slot: what the log file grew by."""

    def __init__(self, path: str) -> None:
        self._path = path
        facts = os.fstat(1)
        self._end = facts.st_size
        self._is = (facts.st_dev, facts.st_ino)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout = stream_to(1)
        if isinstance(sys.stderr, io.TextIOWrapper):
            sys.stderr = stream_to(2)

    def begin(self) -> None:
        """A call begins."""

    def take(self) -> Printed | None:
        """What was printed since the last time."""
        _flush(sys.stdout)
        _flush(sys.stderr)
        try:
            facts = os.fstat(1)
        except OSError:  # a call has closed it
            return None
        size = facts.st_size
        if size == self._end or (facts.st_dev, facts.st_ino) != self._is:
            return None
        start, self._end = self._end, size
        return Printed(path=self._path, start=start, end=size) if size > start else None


class ThreadTail:
    """Several slots: Python's streams, a thread at a time."""

    _lock = threading.Lock()

    def __init__(self, path: str) -> None:
        self._path = path
        if not isinstance(sys.stdout, _Router):
            sys.stdout = _Router(sys.stdout)
            sys.stderr = _Router(sys.stderr)

    def begin(self) -> None:
        """A call begins in this thread."""
        _local.text = io.StringIO()

    def take(self) -> Printed | None:
        """Write what this thread has printed, and say where."""
        text: io.StringIO | None = getattr(_local, "text", None)
        _local.text = None
        data = text.getvalue().encode("utf-8", "backslashreplace") if text is not None else b""
        if not data:
            return None
        with self._lock:
            rest = memoryview(data)
            try:
                start = os.fstat(1).st_size
                while rest:
                    rest = rest[os.write(1, rest) :]
            except OSError as error:
                if error.errno == errno.EBADF:  # a call has closed it
                    return None  # a log that fails costs no result
        written = len(data) - len(rest)
        return Printed(path=self._path, start=start, end=start + written) if written else None


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
    """A text stream that keeps what a call's thread writes, and passes on the rest."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Keep it if a call runs in this thread."""
        kept: io.StringIO | None = getattr(_local, "text", None)
        return (kept if kept is not None else self._stream).write(text)

    def flush(self) -> None:
        """Flush what is not kept."""
        self._stream.flush()

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


def _flush(stream: TextIO | None) -> None:
    """Flush, whatever a user has put in the stream's place."""
    if stream is not None:
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
