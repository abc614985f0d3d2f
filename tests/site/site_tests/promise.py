"""Mark tests of the site suite with title, time limit and remedy."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import msgspec
import pytest

from stoker.units import parse_seconds, show_seconds


class Promise(msgspec.Struct, frozen=True):
    """A promise of Stoker. `queues`: the test waits for a pilot, so its limit includes the queue time."""

    title: str
    limit_s: float
    remedy: str
    queues: bool = False


class BrokenPromiseError(AssertionError):
    """A broken promise; the message is a sentence for the page."""


class TooLongError(BrokenPromiseError):
    """A test exceeded its time limit."""


def promise(title: str, *, limit: str, remedy: str, queues: bool = False) -> pytest.MarkDecorator:
    """Mark a test as the proof of a promise. `limit` has a unit (`"60 s"`); `remedy` is shown if the test fails."""
    return pytest.mark.promise(Promise(title, parse_seconds(limit), remedy, queues))


def promise_of(item: pytest.Item) -> Promise:
    marker = item.get_closest_marker("promise")
    if marker is None:
        raise pytest.UsageError(f"{item.nodeid}: a test of the site suite needs @promise(...)")
    found: Promise = marker.args[0]
    return found


def broken(sentence: str) -> NoReturn:
    raise BrokenPromiseError(sentence)


def not_tried(reason: str) -> NoReturn:
    pytest.skip(reason)


@contextlib.contextmanager
def limit_duration(limit_s: float) -> Iterator[None]:
    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TooLongError(f"it did not end within {show_seconds(limit_s)}")

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, expire)
    outer_s, _ = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if outer_s:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, outer_s - (time.monotonic() - began)))
