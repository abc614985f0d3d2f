"""Apply the limits of a key to its batches: each request of a batch counts as if its client had sent it.

A batch runs in a `stoker batch`, which gets permits from here (batch_inference/pacing.py). It leaves a part of each
limit to other requests of the key (`KeyLimits.for_batches`). With a token limit, the number of running requests is the
tokens left in this minute over the mean tokens of the ended requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.apps.gateway.guard import Caller, Guard, HeldRequest

_LOOK_S = 0.2
_MOST_AHEAD = 256
"""Requests of one batch that may run or wait at once."""


class BatchUse(msgspec.Struct, frozen=True):
    """Calls of a `stoker batch` that have ended, and their tokens."""

    ended: int = 0
    tokens: int = 0


class BatchPace:
    """Grants permits to one batch. `file` holds the permits; `owner` is the name of the batch's key."""

    def __init__(self, file: Path, guard: Guard, *, owner: str) -> None:
        self._file = file
        self._guard = guard
        self._owner = owner
        self._allowed = self._most = 0
        self._use = BatchUse()
        self._held: deque[HeldRequest] = deque()

    def begin(self, *, left: int) -> None:
        """Start from 0 for a new process of the batch, which sends the `left` requests."""
        self._most = left
        self._file.with_suffix(".use").unlink(missing_ok=True)
        self._write(0)

    def find(self, *, left: int) -> None:
        """Count the permits of a process that an earlier gateway started, and that has `left` requests to send."""
        with suppress(OSError, ValueError):
            self._allowed = int(self._file.read_text())
        self._use = self._used()
        self._most = self._use.ended + left
        if caller := self._guard.caller_named(self._owner):
            self._held.extend(self._guard.resume(caller) for _ in range(self._allowed - self._use.ended))

    async def keep(self) -> None:
        """Grant permits until this task is cancelled, then release the running requests."""
        try:
            while True:
                with suppress(OSError):  # a disk without room: it is tried again
                    self.step()
                await asyncio.sleep(_LOOK_S)
        finally:
            while self._held:
                self._held.popleft().end()

    def step(self) -> None:
        """Count ended requests and grant new permits. Raises OSError."""
        use = self._used()
        tokens = max(0, use.tokens - self._use.tokens)
        for _ in range(min(use.ended - self._use.ended, len(self._held))):
            held = self._held.popleft()
            held.tokens, tokens = tokens, 0
            held.end()
        self._use = use
        before = self._allowed
        caller = self._guard.caller_named(self._owner)
        while caller is not None and self._allowed < self._most and len(self._held) < self._ahead(caller):
            following = self._guard.begin_if(caller, limits=caller.limits.for_batches)
            if following is None:
                break
            self._held.append(following)
            self._allowed += 1
        if self._allowed != before:
            self._write(self._allowed)

    def _ahead(self, caller: Caller) -> int:
        """Requests that may run at once."""
        most = caller.limits.for_batches.tokens_per_minute
        if not most:
            return _MOST_AHEAD
        if not self._use.ended:
            return 1
        mean = max(1, self._use.tokens // self._use.ended)
        left = most - self._guard.tokens_of(caller)
        return max(1, min(_MOST_AHEAD, left // mean))

    def _used(self) -> BatchUse:
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self._file.with_suffix(".use").read_bytes(), type=BatchUse)
        return self._use

    def _write(self, allowed: int) -> None:
        draft = self._file.with_suffix(".draft")
        draft.write_text(str(allowed))
        draft.replace(self._file)
