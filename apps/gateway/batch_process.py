"""The process of an open batch: find or stop it, retry failed steps, and apply the limits of the batch's key.

A step that fails for lack of disk space or file descriptors is retried after a growing pause.

A permit lets the `stoker batch` process start one request. The gateway grants permits up to
`KeyLimits.limits_for_batches`. Under a token limit, as many requests run as the tokens left for this minute cover at
the mean tokens per finished request. While tokens are left, each batch may run one request.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from stoker.apps.common.batch_state import BatchUse, PermitFile
from stoker.apps.common.openai_requests import RequestRefused
from stoker.apps.gateway.failures import log
from stoker.apps.gateway.keys import Caller, Guard, HeldRequest, KeyLimits

PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
_END_CHECK_S = 0.5

T = TypeVar("T")


class MonitoredBatch:
    def __init__(self, id: str) -> None:
        self.id = id
        self.waits = ""
        """Why the last step is retried; empty after a success."""
        self.child: asyncio.subprocess.Process | None = None
        """The process, if this gateway started it."""
        self.process: psutil.Process | None = None
        """The process, if an earlier gateway started it."""
        self.given: dict[str, str] = {}
        """Ids of stored output files, by name."""
        self.pacing: asyncio.Task[None] | None = None
        self.retry_now = asyncio.Event()
        """Set to end the pause before the next retry."""

    async def wait_for_process_end(self) -> int | None:
        """Return the exit code, or None if an earlier gateway started the process."""
        code = await self.child.wait() if self.child is not None else None
        while _is_possibly_running(self.process):
            await asyncio.sleep(_END_CHECK_S)
        self.child = self.process = None
        return code

    async def retry_until_done(self, step: Callable[[], Awaitable[T]]) -> T:
        """Run a step. If the step raises OSError, retry it after a pause."""
        pause_s = PAUSE_S
        while True:
            self.retry_now.clear()
            try:
                done = await step()
            except OSError as error:
                self._note(error)
            else:
                self.waits = ""
                return done
            with suppress(TimeoutError):
                await asyncio.wait_for(self.retry_now.wait(), pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def stop(self) -> None:
        with suppress(psutil.Error, ProcessLookupError):
            if process := self.child or self.process:
                process.terminate()

    def _note(self, error: OSError) -> None:
        why = error.strerror or str(error)
        if why != self.waits:
            log.warning("batch %s waits for a retry: %s", self.id, error)
        self.waits = why


def find_process(run: Path) -> psutil.Process | None:
    """Return this user's oldest `stoker batch` process of a run folder. Later processes are its forks."""
    found = [
        process
        for process in psutil.process_iter(["cmdline", "create_time", "uids"])
        if ("--out", str(run)) in itertools.pairwise(process.info["cmdline"] or [])
        and process.info["uids"].real == os.getuid()
    ]
    return min(found, key=lambda process: process.info["create_time"], default=None)


def _is_possibly_running(process: psutil.Process | None) -> bool:
    """False only if the process has certainly ended. The check may fail for lack of file descriptors."""
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
    except OSError:
        return True


_GRANT_EVERY_S = 0.2
_MOST_AHEAD = 256
"""Maximum number of requests of a batch in flight."""


class BatchPace:
    """Grants permits to one batch. `owner`: name of the API key that submitted the batch."""

    def __init__(self, file: Path, guard: Guard, *, owner: str) -> None:
        self._file = PermitFile(file)
        self._guard = guard
        self._owner = owner
        self._allowed = self._most = 0
        self._use = BatchUse()
        self._held: deque[HeldRequest] = deque()

    def begin(self, *, left: int) -> None:
        self._most = left
        self._file.reset()

    def find(self, *, left: int) -> None:
        """Take over the permits of an earlier gateway. `left`: number of unanswered requests."""
        self._allowed = self._file.allowed(known=0)
        self._use = self._file.use(known=self._use)
        self._most = self._use.ended + left
        if caller := self._guard.caller_by_key_name(self._owner):
            self._held.extend(self._guard.resume(caller) for _ in range(self._allowed - self._use.ended))

    async def keep(self) -> None:
        """Grant permits until this task is cancelled, then count the running requests as ended for their key."""
        try:
            while True:
                with suppress(OSError):  # retry later if the disk is full
                    self.step()
                await asyncio.sleep(_GRANT_EVERY_S)
        finally:
            with suppress(OSError):
                self._release_ended_requests()
            while self._held:  # count each stopped request with the mean number of tokens
                held = self._held.popleft()
                held.tokens = self._mean_tokens
                held.end()

    def step(self) -> None:
        self._release_ended_requests()
        before = self._allowed
        caller = self._guard.caller_by_key_name(self._owner)
        while caller is not None and self._allowed < self._most and self._has_room(caller):
            try:
                self._held.append(self._guard.begin(caller, used=KeyLimits.limits_for_batches))
            except RequestRefused:
                break
            self._allowed += 1
        if self._allowed != before:
            self._file.allow(self._allowed)

    def _release_ended_requests(self) -> None:
        use = self._file.use(known=self._use)
        tokens = max(0, use.tokens - self._use.tokens)
        for _ in range(min(use.ended - self._use.ended, len(self._held))):
            held = self._held.popleft()
            held.tokens, tokens = tokens, 0
            held.end()
        self._use = use

    @property
    def _mean_tokens(self) -> int:
        """Mean tokens per finished request; 0 until a request has finished."""
        return self._use.tokens // self._use.ended if self._use.ended else 0

    def _has_room(self, caller: Caller) -> bool:
        """True if no request is running, or if the tokens left for this minute cover one more request."""
        if not self._held:
            return True
        if len(self._held) >= _MOST_AHEAD:
            return False
        now = time.monotonic()
        for each in caller.owners:
            most = each.limits.limits_for_batches().tokens_per_minute
            if most and not self._use.ended:
                return False
            if most and each.use.running >= (most - each.use.tokens_used(now)) // max(1, self._mean_tokens):
                return False
        return True
