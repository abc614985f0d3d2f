"""The parts of `to_manager.AskCalls` and `to_client.Calls`: which calls there are, for `stoker calls`."""

from __future__ import annotations

import enum

import msgspec


class ListedState(enum.Enum):
    """Where a call is that is listed."""

    RUNNING = "running"
    """A library has it: runs it, or will after those that are before it there."""
    WAITING = "waiting"
    """In its context's queue."""
    FAILED = "failed"
    """Ended without a result. Those that were cancelled are not counted."""


class ListedCall(msgspec.Struct, frozen=True):
    """One call. `call` is its id as people write it; `since_s` the time that it has been in its state.

    `where` is `pilot/library` of a running one (of each member of a gang), with `ahead` calls before it there; `error`
    the first line of what a failed one failed with, as far as the manager knows it. `done` of `total` steps and the
    `metric` are what it said last of itself. `due_in_s`: until its deadline (negative: that is over; None: it has
    none); `ends_in_s`: until it is expected to end (None: nobody says).
    """

    call: str
    function: str
    context: str
    state: ListedState
    since_s: float
    where: tuple[str, ...] = ()
    ahead: int = 0
    error: str = ""
    done: float = 0.0
    total: float = 0.0
    metric: float = 0.0
    due_in_s: float | None = None
    ends_in_s: float | None = None


class FailureGroup(msgspec.Struct, frozen=True):
    """Calls of one function that failed alike. `error` is the exception's class, or how the call was ended; `place` the
    innermost line of the user's code (`FILE:LINE in NAME`; empty: none is known). `example` is the last of these
    calls, as people write it, and `message` what it said; `first_s`, `last_s`: seconds since the first and the last."""

    function: str
    error: str
    place: str
    count: int
    example: str
    message: str
    first_s: float
    last_s: float
