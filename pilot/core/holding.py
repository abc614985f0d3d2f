"""Which calls a library holds (`held`). This file alone writes that.

Everything that the manager is ever told of a call comes from here: a call enters with `hold`, and leaves exactly once,
by `ended`, `returned` or `depart`. What arrives for a call that has left already changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from stoker.pilot.core.stages import TAKES_CALLS, Stage
from stoker.pilot.core.state import PieceWindow, PilotLibrary
from stoker.protocol.ids import CallId
from stoker.protocol.to_pilot import RunCalls


class Departure(msgspec.Struct, frozen=True):
    """The calls that a library held when it ended: those it was running, and those it had not begun, in order."""

    running: tuple[CallId, ...]
    unstarted: tuple[CallId, ...]


def hold(library: PilotLibrary, calls: Iterable[CallId], *, limit_s: float = 0.0, streams: bool = False) -> None:
    """Calls have come for a library; with `streams` they give their results in pieces. Raises ValueError when it no
    longer takes any."""
    if library.stage is not Stage.READY and library.stage not in TAKES_CALLS:  # to hash a stage takes long
        raise ValueError(f"library {library.number} is {library.stage.value} and takes no calls")
    library.held.update(dict.fromkeys(calls, limit_s))
    library.has_limits |= limit_s > 0
    if streams:
        library.streams.update((call, PieceWindow()) for call in calls)


def ended(library: PilotLibrary, calls: Iterable[CallId]) -> list[CallId]:
    """Calls have ended in a library; returns those of them that it held until now."""
    here = _leave(library, calls)
    library.served += len(here)
    return here


def returned(library: PilotLibrary, calls: Iterable[CallId]) -> list[CallId]:
    """A library has given calls back; returns those of them that it held until now."""
    return _leave(library, calls)


def does_not_react(library: PilotLibrary, calls: Iterable[CallId], *, now: float) -> None:
    """Record calls that still run after the grace of their stop."""
    library.stuck_at = library.stuck_at or now
    library.stuck.update(calls)
    for call in calls:
        library.stopping.pop(call, None)


def depart(library: PilotLibrary, running: Iterable[CallId]) -> Departure:
    """A library's process has ended while `running` ran (calls that it does not hold are ignored)."""
    begun = tuple(call for call in dict.fromkeys(running) if call in library.held)
    left = Departure(running=begun, unstarted=tuple(call for call in library.held if call not in begun))
    library.held.clear()
    library.streams.clear()
    library.stopping.clear()
    library.stuck.clear()
    library.waiting.clear()
    library.orders_waiting_for_arguments.clear()
    return left


def postpone(library: PilotLibrary, order: RunCalls) -> None:
    """An order waits until the library is ready."""
    library.waiting.append(msgspec.structs.replace(order, calls=list(order.calls)))  # some of them may be taken back


def due(library: PilotLibrary) -> list[RunCalls]:
    """The orders that have waited, all at once; none waits from now on."""
    orders, library.waiting = library.waiting, []
    return orders


def take_back_waiting(library: PilotLibrary, count: int) -> list[CallId]:
    """Take out up to `count` calls that were not even sent to the library, newest first."""
    out: list[CallId] = []
    while library.waiting and len(out) < count:
        last = library.waiting[-1]
        out.append(last.calls.pop().call)
        if not last.calls:
            library.waiting.pop()
    return returned(library, out)


def drop_waiting(library: PilotLibrary, calls: Collection[CallId]) -> list[CallId]:
    """Take out those of `calls` that were not even sent to the library."""
    out: list[CallId] = []
    for order in (*library.waiting, *library.orders_waiting_for_arguments.values()):
        out += [spec.call for spec in order.calls if spec.call in calls]
        order.calls[:] = [spec for spec in order.calls if spec.call not in calls]
    library.waiting = [order for order in library.waiting if order.calls]
    return returned(library, out)


def _leave(library: PilotLibrary, calls: Iterable[CallId]) -> list[CallId]:
    held = library.held
    left = [call for call in calls if held.pop(call, None) is not None]
    if library.streams:
        for call in left:
            library.streams.pop(call, None)
    if library.stopping:  # it may come again, and is not told to stop then
        for call in left:
            library.stopping.pop(call, None)
    if library.stuck:
        library.stuck.difference_update(left)
    return left
