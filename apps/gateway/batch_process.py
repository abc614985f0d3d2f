"""The process of an open batch: find or stop it, retry failed steps, and apply the limits of the batch's key.

A step that fails for lack of disk space or file descriptors is retried after a growing pause.

A permit lets the `stoker batch` process start one request. The gateway grants permits up to the limits of
`KeyLimits.reduce_for_batches`. With a token limit, the number of running requests is at most the tokens left in this
minute, divided by the mean tokens of a finished request. While tokens are left, each batch may run one request.
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
from stoker.apps.gateway.keys import Caller, CountedRequest, KeyGuard, KeyLimits

PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
_END_CHECK_S = 0.5

T = TypeVar("T")


class MonitoredBatch:
    def __init__(self, id: str) -> None:
        self.id = id
        self.retry_reason = ""
        """Why the last step is retried; empty after a success."""
        self.child: asyncio.subprocess.Process | None = None
        """The `stoker batch` process, if this gateway started it."""
        self.process: psutil.Process | None = None
        """The `stoker batch` process, if an earlier gateway started it."""
        self.stored_file_ids: dict[str, str] = {}
        """Ids of stored output files, by name."""
        self.permit_task: asyncio.Task[None] | None = None
        self.retry_now = asyncio.Event()
        """Event that ends the pause before the next retry."""

    async def wait_for_process_end(self) -> int | None:
        """Return the exit code, or None if an earlier gateway started the process."""
        code = await self.child.wait() if self.child is not None else None
        while _is_possibly_running(self.process):
            await asyncio.sleep(_END_CHECK_S)
        self.child = self.process = None
        return code

    async def retry_until_done(self, step: Callable[[], Awaitable[T]]) -> T:
        """Run a step. As long as the step raises OSError, repeat it after a pause."""
        pause_s = PAUSE_S
        while True:
            self.retry_now.clear()
            try:
                done = await step()
            except OSError as error:
                self._record_retry_reason(error)
            else:
                self.retry_reason = ""
                return done
            with suppress(TimeoutError):
                await asyncio.wait_for(self.retry_now.wait(), pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def stop_process(self) -> None:
        with suppress(psutil.Error, ProcessLookupError):
            if process := self.child or self.process:
                process.terminate()

    def _record_retry_reason(self, error: OSError) -> None:
        why = error.strerror or str(error)
        if why != self.retry_reason:
            log.warning("batch %s waits for a retry: %s", self.id, error)
        self.retry_reason = why


def find_batch_process(run: Path) -> psutil.Process | None:
    """Return the oldest `stoker batch` process of this user for a run folder. Younger processes are its forks."""
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
"""Maximum number of a batch's requests that run at the same time."""


class BatchPermitGranter:
    """Grants permits to one batch. `owner`: name of the API key that submitted the batch."""

    def __init__(self, file: Path, guard: KeyGuard, *, owner: str) -> None:
        self._file = PermitFile(file)
        self._guard = guard
        self._owner = owner
        self._allowed = self._most = 0
        self._use = BatchUse()
        self._held: deque[CountedRequest] = deque()

    def start_granting(self, *, unanswered: int) -> None:
        self._most = unanswered
        self._file.reset_counts()

    def take_over_permits(self, *, unanswered: int) -> None:
        """Take over the permits that an earlier gateway granted. `unanswered`: number of unanswered requests."""
        self._allowed = self._file.read_permits(default=0)
        self._use = self._file.read_batch_use(default=self._use)
        self._most = self._use.ended + unanswered
        if caller := self._guard.find_caller_by_key_name(self._owner):
            self._held.extend(self._guard.resume_request(caller) for _ in range(self._allowed - self._use.ended))

    async def grant_until_cancelled(self) -> None:
        """Grant permits until this task is cancelled, then count the running requests as ended for their key."""
        try:
            while True:
                with suppress(OSError):  # the disk may be full; retry in the next step
                    self.grant_due_permits()
                await asyncio.sleep(_GRANT_EVERY_S)
        finally:
            with suppress(OSError):
                self._release_ended_requests()
            while self._held:  # count each stopped request with the mean number of tokens
                held = self._held.popleft()
                held.tokens = self._mean_tokens
                held.end_request()

    def grant_due_permits(self) -> None:
        self._release_ended_requests()
        before = self._allowed
        caller = self._guard.find_caller_by_key_name(self._owner)
        while caller is not None and self._allowed < self._most and self._may_grant_permit(caller):
            try:
                self._held.append(self._guard.begin_request(caller, used=KeyLimits.reduce_for_batches))
            except RequestRefused:
                break
            self._allowed += 1
        if self._allowed != before:
            self._file.write_permits(self._allowed)

    def _release_ended_requests(self) -> None:
        use = self._file.read_batch_use(default=self._use)
        tokens = max(0, use.tokens - self._use.tokens)
        for _ in range(min(use.ended - self._use.ended, len(self._held))):
            held = self._held.popleft()
            held.tokens, tokens = tokens, 0
            held.end_request()
        self._use = use

    @property
    def _mean_tokens(self) -> int:
        """Mean tokens per finished request; 0 until a request has finished."""
        return self._use.tokens // self._use.ended if self._use.ended else 0

    def _may_grant_permit(self, caller: Caller) -> bool:
        """True if no request is running, or if the tokens left for this minute cover one more request."""
        if not self._held:
            return True
        if len(self._held) >= _MOST_AHEAD:
            return False
        now = time.monotonic()
        for each in caller.limit_owners:
            most = each.limits.reduce_for_batches().tokens_per_minute
            if most and not self._use.ended:
                return False
            if most and each.use.running >= (most - each.use.count_recent_tokens(now)) // max(1, self._mean_tokens):
                return False
        return True
