"""A batch whose calls begin as a gateway allows: the limits of a key hold for its batches, too.

The gateway writes how many calls may have begun into a file, the *permits*. The batch writes how many have ended, and
their tokens, into the file next to it, the *use*. Both count from the beginning of the process. Without its gateway a
batch begins no more calls and waits for the next gateway.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.batch_inference.functions import BatchAnswer
from stoker.apps.common.calls import FailedCall
from stoker.sessions import StokerApp

_LOOK_S = 0.1


class Permits:
    """The permits in a file, and the use of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_at = float("-inf")
        self._allowed = self._begun = self._ended = self._tokens = 0

    def take(self) -> bool:
        """Begin a call, if there is a permit for it. Never waits."""
        now = time.monotonic()
        if self._begun >= self._allowed and now >= self._looked_at + _LOOK_S:
            self._looked_at = now
            with suppress(OSError, ValueError):
                self._allowed = int(self._path.read_text())
        if self._begun >= self._allowed:
            return False
        self._begun += 1
        return True

    def end(self, tokens: int) -> None:
        """A call has ended, and has read and written these tokens. Raises OSError where that cannot be written."""
        self._ended += 1
        self._tokens += tokens
        draft = self._path.with_suffix(".use-draft")
        draft.write_bytes(msgspec.json.encode({"ended": self._ended, "tokens": self._tokens}))
        draft.replace(self._path.with_suffix(".use"))


def run_paced(jobs: Sequence[tuple[StokerApp, Iterable[Any]]], permits: Permits) -> Iterator[BatchAnswer | FailedCall]:
    """`run_calls` with `keep_errors`, where each call begins with a permit. The jobs run one after the other."""
    done: queue.SimpleQueue[tuple[int, int, Future[BatchAnswer]]] = queue.SimpleQueue()
    left = ((job, item, app, each) for job, (app, items) in enumerate(jobs) for item, each in enumerate(items))
    following, running = next(left, None), 0
    while following is not None or running:
        while following is not None and permits.take():
            _begin(*following, done)
            following, running = next(left, None), running + 1
        try:
            job, item, future = done.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        running -= 1
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        found = future.result() if error is None else FailedCall(job, item, error)
        permits.end(found.tokens if isinstance(found, BatchAnswer) else 0)
        yield found


def _begin(
    job: int, item: int, app: StokerApp, request: Any, done: queue.SimpleQueue[tuple[int, int, Future[BatchAnswer]]]
) -> None:
    future: Future[BatchAnswer] = app(request)
    future.add_done_callback(lambda ended: done.put((job, item, ended)))
