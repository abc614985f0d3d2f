"""Compact the journal while the session continues: a forked process writes a snapshot of the manager's core.

The manager begins a new segment of the journal and forks. When the child has written the snapshot, the manager removes
the journal files that the snapshot replaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from stoker.manager.core.reactor import Core
from stoker.manager.live import records, snapshot
from stoker.manager.live.journal import Journal
from stoker.manager.live.records import SegmentHead
from stoker.manager.live.snapshot import UnsaveableStateError, list_policy_modules
from stoker.retries import RetryPause
from stoker.units import show_bytes

log = logging.getLogger("stoker.manager")

LEAST_BYTES = 16 << 20
GROWTH = 2
"""The journal is compacted after it has grown by `LEAST_BYTES` and by `GROWTH` times the size of its last snapshot."""
CHECK_S = 0.1
RETRY_S = (10.0, 3600.0)
LIMIT_S = 1800.0
READ_BACK_BYTES = 64 << 20
"""A snapshot of at most this size is read again as a check."""
_SAVED, _FAILED, _UNSAVEABLE = 0, 1, 2
_PR_SET_PDEATHSIG = 1


class JournalCompaction:
    def __init__(
        self, journal: Journal, *, snapshot_bytes: int, tail_bytes: int, starts_now: bool, tell: Callable[[str], None]
    ):
        self._journal = journal
        self._tell = tell
        self._snapshot_bytes = snapshot_bytes
        self._before = max(0, tail_bytes - journal.size)
        """Bytes written to earlier journal segments since the last snapshot."""
        self._is_requested = starts_now
        self._child = 0
        self._child_pipe = -1
        self._segment = journal.head
        self._started_at = self._check_at = 0.0
        self._retry_at, self._pause = 0.0, RetryPause(*RETRY_S)
        self._is_impossible = False

    @property
    def wait_s(self) -> float:
        return CHECK_S if self._child else math.inf

    @property
    def _path(self) -> Path:
        return records.snapshot_path(self._journal.path, self._segment.number)

    def start_or_check(self, core: Core) -> None:
        """Start a compaction if it is due, or check the running one. The journal must contain all decisions so far."""
        if self._child:
            if time.monotonic() >= self._check_at:
                self._check_at = time.monotonic() + CHECK_S
                self._check_child()
        elif self._is_due and time.monotonic() >= self._retry_at and not self._journal.trouble:
            self._start_child(core)

    @property
    def _is_due(self) -> bool:
        enough = max(LEAST_BYTES, GROWTH * self._snapshot_bytes)
        return not self._is_impossible and (self._is_requested or self._before + self._journal.size >= enough)

    def _start_child(self, core: Core) -> None:
        self._is_requested = False
        before = self._before + self._journal.size
        try:
            self._segment = self._journal.begin_segment()
        except OSError as error:
            self._schedule_retry(f"no new segment can be created: {error}")
            return
        self._before = before
        self._child_pipe, child_says = os.pipe()
        self._started_at = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # forking is safe here: the child only pickles
                self._child = os.fork()
        except OSError as error:
            os.close(self._child_pipe)
            os.close(child_says)
            self._schedule_retry(f"no process can be started for it: {error.strerror}")
            return
        if not self._child:
            _write_and_exit(self._path, core, self._segment, child_says)
        os.close(child_says)

    def _check_child(self) -> None:
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if not pid:
            if time.monotonic() - self._started_at > LIMIT_S:
                os.kill(self._child, signal.SIGKILL)
            return
        self._child = 0
        with os.fdopen(self._child_pipe, "rb") as pipe:
            said = pipe.read().decode(errors="replace")
        code = os.waitstatus_to_exitcode(status)
        if code == _SAVED:
            self._snapshot_bytes, self._before = self._path.stat().st_size, 0
            self._pause.reset()
            for old in records.older_files(self._journal.path, self._segment.number):
                old.unlink(missing_ok=True)
            took_s, size = time.monotonic() - self._started_at, show_bytes(self._snapshot_bytes)
            log.info("the journal was compacted: a snapshot of %s in %.1f s", size, took_s)
        elif code == _UNSAVEABLE:
            self._is_impossible = True
            text = f"the journal is not compacted, and grows with the session: {said}"
            log.warning("%s", text)
            self._tell(text)
        else:
            self._schedule_retry(said or f"the process that wrote the snapshot ended with {code}")

    def _schedule_retry(self, why: str) -> None:
        pause_s = self._pause.next_pause_s()
        self._retry_at = time.monotonic() + pause_s
        log.warning("the journal was not compacted (%s); the next attempt is in %.0f s", why, pause_s)

    def close(self) -> None:
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            os.close(self._child_pipe)
            self._child = 0
            self._path.with_suffix(".snapshot.draft").unlink(missing_ok=True)


def _write_and_exit(path: Path, core: Core, segment: SegmentHead, says: int) -> None:
    """Write the snapshot in the child process, which dies with its parent."""
    code, said = _FAILED, ""
    try:
        gc.disable()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != says:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        modules = list_policy_modules(core.policies)
        size = snapshot.write_snapshot(path, core, segment, modules=modules)
        if size <= READ_BACK_BYTES:
            snapshot.load_core(snapshot.read_snapshot(path), modules=modules)
        code = _SAVED
    except UnsaveableStateError as error:
        code, said = _UNSAVEABLE, str(error)
    except BaseException as error:  # report every error to the parent, which continues without a snapshot
        said = f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(BaseException):
            if code != _SAVED:
                path.unlink(missing_ok=True)
            os.write(says, said.encode()[:4000])
        os._exit(code)
