"""Whose turn is it? The calls that a library holds, and which of them runs next.

The default execution policy is first come, first served, one call a slot: calls run in the order in which they came,
and those that were not begun can be given back, newest first, so that what was waiting longest stays first in line.
The library process runs this very code on its hot path, so every operation is O(1) a call; `take` is
written for one consumer, `next` and `begin` for several, with any number of givers-back under CPython's GIL, where a
deque's operations are atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Execution(Protocol[T]):
    """Decides whose turn it is in a library. Order is the policy; it never loses or repeats a call."""

    def add(self, call: int, work: T) -> None:
        """A call has come."""

    def take(self) -> tuple[int, T] | None:
        """The call whose turn it is; it has begun. None when nothing waits."""

    def next(self) -> tuple[int, T] | None:
        """The call whose turn it is; it still waits. None when nothing does."""

    def begin(self, entry: tuple[int, T]) -> bool:
        """This entry of `next` has begun; False if it does not wait any more."""

    def give_back(self, count: int) -> list[int]:
        """Take out up to `count` calls that have not begun, those that would run last first."""

    def drop(self, calls: Iterable[int]) -> list[int]:
        """Take out those of `calls` that have not begun; returns them."""

    def __len__(self) -> int:
        """How many have not begun."""


class FirstCome(Generic[T]):
    """First come, first served (see the module's text)."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, T]] = deque()

    def add(self, call: int, work: T) -> None:
        """A call has come."""
        self._waiting.append((call, work))

    def take(self) -> tuple[int, T] | None:
        """The oldest call; it has begun. None when nothing waits."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def next(self) -> tuple[int, T] | None:
        """The oldest call, which may still be given back. None when nothing waits."""
        try:
            return self._waiting[0]
        except IndexError:
            return None

    def begin(self, entry: tuple[int, T]) -> bool:
        """Take out this entry of `next`; False if it was given back, or another consumer took it."""
        try:
            self._waiting.remove(entry)  # as in `drop`
        except ValueError:
            return False
        return True

    def give_back(self, count: int) -> list[int]:
        """Take out up to `count` calls, newest first."""
        out: list[int] = []
        while len(out) < count:
            try:
                out.append(self._waiting.pop()[0])
            except IndexError:
                break
        return out

    def drop(self, calls: Iterable[int]) -> list[int]:
        """Take out those of `calls` that have not begun; returns them."""
        wanted = set(calls)
        out: list[int] = []
        for entry in [entry for entry in tuple(self._waiting) if entry[0] in wanted]:
            try:
                self._waiting.remove(entry)  # compares ids first, all in C: nobody can take it half way
            except ValueError:
                continue  # its turn came meanwhile
            out.append(entry[0])
        return out

    def __len__(self) -> int:
        """How many have not begun."""
        return len(self._waiting)
