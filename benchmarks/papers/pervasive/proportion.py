"""How far completed inferences are from being proportional to the capacity that there was: what Figure 9 is to show.

Capacity is GPUs, each with what it can do, inferences a second on its kind. Three integrals of it over time, with less
and less left to explain:

- *connected*: GPUs count from when their worker has connected, as the paper's figure draws them, to the end of the run;
  inferences count when their call ends.
- *hot*: GPUs count from when they hold the context, so loads are left out; and until the last call is handed out, since
  from then on GPUs have nothing to do, however many there are.
- *evenly*: as before, and a call's inferences count evenly from its beginning to its end. A call of a hundred that runs
  says nothing until it ends: with 186 GPUs thousands of inferences are done and not yet told.

The line goes through nothing done at no capacity, and through the last point; the distance from it is given as a part
of all inferences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from stoker.manager.sim.log import EventLog, Happened


class Distance(msgspec.Struct, frozen=True):
    """The farthest that completed inferences ever are from the line, as a part of all."""

    connected: float
    hot: float
    evenly: float


def distance(log: EventLog, rates: Mapping[int, float]) -> Distance:
    """`rates`: inferences a second of the GPU of each pilot, by the pilot's number. Of a run in which no pilot ends."""
    connected: list[tuple[float, float]] = []
    hot: list[tuple[float, float]] = []
    ends: list[tuple[float, float]] = []
    paces: list[tuple[float, float]] = []
    begun: dict[int, float] = {}
    handed_out_s = 0.0
    for at_s, what, call, pilot, items in zip(log.at_s, log.what, log.call, log.pilot, log.value, strict=True):
        if what == Happened.PILOT_CAME:
            connected.append((at_s, rates[pilot]))
        elif what == Happened.LIBRARY_READY:
            hot.append((at_s, rates[pilot]))
        elif what == Happened.CALL_BEGAN:
            begun[call] = handed_out_s = at_s
        elif what == Happened.CALL_ENDED:
            ends.append((at_s, items))
            pace = items / (at_s - begun[call])
            paces += [(begun[call], pace), (at_s, -pace)]
    end_s = log.at_s[-1] if len(log) else 0.0
    return Distance(
        connected=_farthest(connected, jumps=ends, until_s=end_s),
        hot=_farthest(hot, jumps=ends, until_s=handed_out_s),
        evenly=_farthest(hot, paces=paces, until_s=handed_out_s),
    )


def _farthest(
    capacity: Iterable[tuple[float, float]],
    *,
    jumps: Iterable[tuple[float, float]] = (),
    paces: Iterable[tuple[float, float]] = (),
    until_s: float,
) -> float:
    changes = sorted([
        *((at_s, 0, change) for at_s, change in capacity),
        *((at_s, 1, change) for at_s, change in paces),
        *((at_s, 2, change) for at_s, change in jumps),
    ])  # fmt: skip
    points: list[tuple[float, float]] = []
    rate = pace = integral = done = before_s = 0.0
    for at_s, kind, change in [*changes, (until_s, 3, 0.0)]:
        until = min(at_s, until_s)
        integral += rate * max(0.0, until - before_s)
        done += pace * max(0.0, until - before_s)
        before_s = max(before_s, until)
        if at_s > until_s:
            break
        points.append((integral, done))
        if kind == 0:
            rate += change
        elif kind == 1:
            pace += change
        elif kind == 2:
            done += change
            points.append((integral, done))
    last_integral, last_done = points[-1]
    if not last_integral or not last_done:
        return 0.0
    slope = last_done / last_integral
    return max(abs(done - slope * integral) for integral, done in points) / last_done
