"""Log files of bounded size. Standard library only, as the pilot's starter requires.

A full `BoundedLog` renames its file to `NAME.1` and copies the last lines to a new file. `free_file_middle` frees the
disk space of a log's middle, which then reads as zeros. Byte offsets stay valid.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Callable
from logging.handlers import WatchedFileHandler
from pathlib import Path

from stoker.whole_files import draft_file

LOG_BYTES = 16_000_000
"""Size in bytes at which a log file is renamed."""
_COPIED_BYTES = 65_536
_CHECK_SIZE_EVERY_LINES = 64
"""Number of lines between two checks of the log's size."""

OUTPUT_BYTES = 64_000_000
"""Bytes on disk above which the disk space of the middle of a library's log is freed."""
_HEAD_BYTES, _TAIL_BYTES = 1 << 20, 16 << 20
"""Number of bytes that `free_file_middle` keeps at the start and at the end of a log."""
_BLOCK_BYTES = 1 << 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class BoundedLog(WatchedFileHandler):
    """A log file of limited size that several processes write. A full disk raises no error."""

    def __init__(self, path: str | Path, *, most_bytes: int = LOG_BYTES, delay: bool = False) -> None:
        super().__init__(path, encoding="utf-8", delay=delay, errors="replace")
        self._most_bytes = most_bytes
        self._lines = 0
        self._redirect_output()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._lines % _CHECK_SIZE_EVERY_LINES == 0 and self._is_full():
                self._rotate()
            self._lines += 1
            super().emit(record)
        except OSError:
            self.handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error."""

    def reopenIfNeeded(self) -> None:
        """If the log was renamed, open a new log file, and redirect the process's output to it."""
        replaced_file = _file_identity(self.stream.fileno()) if self.stream is not None else None
        super().reopenIfNeeded()
        if replaced_file is not None:
            self._redirect_output(replaced_file)

    def _redirect_output(self, replaced_file: tuple[int, int] | None = None) -> None:
        """Redirect stdout and stderr to this log if they write to `replaced_file` or to an earlier log file."""
        if self.stream is None:
            return
        log, now = Path(self.baseFilename), _file_identity(self.stream.fileno())
        name = str(log.parent.resolve() / log.name)
        former = (f"{name}.1", f"{name}.1 (deleted)", f"{name} (deleted)")
        for output in (1, 2):
            with contextlib.suppress(OSError):
                printed = _file_identity(output)
                if printed != now and (printed == replaced_file or os.readlink(f"/proc/self/fd/{output}") in former):
                    os.dup2(self.stream.fileno(), output)

    def _is_full(self) -> bool:
        self.reopenIfNeeded()
        return self.stream is not None and os.fstat(self.stream.fileno()).st_size > self._most_bytes

    def _rotate(self) -> None:
        path = Path(self.baseFilename)
        with path.open("rb") as full:
            before = os.fstat(full.fileno())
            full.seek(-min(_COPIED_BYTES, before.st_size), os.SEEK_END)
            last = full.read().partition(b"\n")[2]
        with draft_file(path) as draft:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, before.st_mode & 0o777), "wb") as fresh:
                fresh.write(last)
            path.replace(path.with_name(f"{path.name}.1"))
        self.reopenIfNeeded()


def _file_identity(descriptor: int) -> tuple[int, int]:
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino


def log_to_file(path: Path) -> None:
    handler = BoundedLog(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)


def read_last_lines(path: str | Path, *, start: int = 0, lines: int = 20, most_bytes: int = 16_384) -> str:
    """Return the last lines after byte `start`. If the file is shorter, it is a new log: then ignore `start`."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(start if start <= size else 0, size - most_bytes))
            data = file.read(most_bytes)
    except OSError:
        return ""
    return "\n".join(data.decode("utf-8", "replace").splitlines()[-lines:])


def free_file_middle(path: Path, *, most_bytes: int = OUTPUT_BYTES) -> bool:
    """If a file uses more than `most_bytes` on disk, free its middle. Return False if nothing was freed."""
    facts = path.stat()
    if facts.st_blocks * 512 <= most_bytes:
        return False
    start = _HEAD_BYTES
    length = (facts.st_size - _TAIL_BYTES - start) // _BLOCK_BYTES * _BLOCK_BYTES
    if length <= 0:
        return False
    descriptor = os.open(path, os.O_RDWR)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, start, length):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(descriptor)
    return True


_MAX_SUBJECTS = 256


class RateLimitedLog:
    """Limits warnings: within `every_s` seconds, log one per subject and at most `most` in total. Thread-safe."""

    def __init__(
        self, log: logging.Logger, *, every_s: float = 10.0, most: int = 20, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._every_s = every_s
        self._most = most
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}
        """Time of the last warning, and number of warnings omitted since then, by subject."""
        self._window_began = -every_s
        self._written = 0

    def warning(self, subject: str, text: str) -> bool:
        now = self._clock()
        if now - self._window_began >= self._every_s:
            self._window_began, self._written = now, 0
        last, left_out = self._seen.get(subject, (-self._every_s, 0))
        says = now - last >= self._every_s and self._written < self._most
        if says:
            self._written += 1
            # Insert the subject again at the end, because the first subject is deleted if there are too many.
            self._seen.pop(subject, None)
            self._log.warning("%s%s", text, f" (and {left_out} more such lines)" if left_out else "")
        self._seen[subject] = (now, 0) if says else (last, left_out + 1)
        if len(self._seen) > _MAX_SUBJECTS:
            del self._seen[next(iter(self._seen))]
        return says
