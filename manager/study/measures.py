"""Curves and sums of a simulated run, computed from its event log in one pass.

A call waits from its arrival to its first start, or to the end of the simulation. If a call ends twice, its second run
is lost work. Work before a checkpoint is not lost. The run time of a gang counts once for each of its devices.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from stoker.manager.sim.log import EventLog, LoggedEvent
from stoker.manager.sim.run import RunOutcome
from stoker.manager.study.statistics import quantile


class StepCurve:
    """A value that changes at certain times. Before the first change the value is 0."""

    __slots__ = ("at_s", "values")

    def __init__(self, steps: Iterable[tuple[float, float]] = ()) -> None:
        self.at_s = array("d")
        self.values = array("d")
        for at_s, value in steps:
            self.set_value(at_s, value)

    def set_value(self, at_s: float, value: float) -> None:
        """Set the value that is valid from `at_s` on. A second call with the same `at_s` replaces the value."""
        if self.at_s and self.at_s[-1] == at_s:
            self.values[-1] = value
        else:
            self.at_s.append(at_s)
            self.values.append(value)

    def value_at(self, at_s: float) -> float:
        place = bisect_right(self.at_s, at_s)
        return self.values[place - 1] if place else 0.0

    def integrate(self, *, until_s: float) -> float:
        total = before = value = 0.0
        for place in range(bisect_right(self.at_s, until_s)):
            total += value * (self.at_s[place] - before)
            before, value = self.at_s[place], self.values[place]
        return total + value * (until_s - before)


class Measures(msgspec.Struct, frozen=True):
    """The measured numbers and curves of a run.

    `completed`: number of completed items. `queue`: number of calls that have arrived and do not run. `ended_at`: last
    end of a call, or end of the log if calls are `unfinished`. `waits_s`, `turnarounds_s` (sorted): seconds of each
    call from its arrival to its first start, and to its end. `held_s`: device-seconds of pilots, of which completed
    calls used `useful_s`, interrupted calls `lost_s`, loads `loading_s`. `late`: calls that missed their deadlines.
    """

    began_at: float
    ended_at: float
    calls: int
    failed: int
    unfinished: int
    items: float
    completed: StepCurve
    devices: StepCurve
    queue: StepCurve
    waits_s: array[float]
    turnarounds_s: array[float]
    held_s: float
    useful_s: float
    lost_s: float
    loading_s: float
    shared_bytes: float
    peer_bytes: float
    deadlines: int = 0
    late: tuple[int, ...] = ()

    @property
    def violation_share(self) -> float | None:
        return len(self.late) / self.deadlines if self.deadlines else None


def measure_run(log: EventLog, *, until_s: float | None = None) -> Measures:
    """Compute a run's measures from its log. `until_s`: time at which the run was stopped."""
    return _MeasuringPass(log).compute_measures(until_s)


class _MeasuringPass:
    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.completed, self.devices, self.queue = StepCurve(), StepCurve(), StepCurve()
        self.waits_s, self.turnarounds_s = array("d"), array("d")
        self.calls = self.failed = self.waiting = 0
        self.left = 0  # Number of calls that have not ended, if the log only counts calls
        self.began_at = self.ended_at = self.items = self.useful_s = self.lost_s = self.loading_s = 0.0
        self.shared_bytes = self.peer_bytes = 0.0
        self.open_calls: dict[int, float] = {}
        self.begun_calls: set[int] = set()
        self.running: dict[int, tuple[float, int]] = {}  # Start time and library of each running call
        self.parts: dict[tuple[int, int], float] = {}
        """Time at which a gang member began its part of a call, by library and call."""
        self.rerun_calls: set[int] = set()
        self.devices_of: dict[int, float] = {}  # Number of devices of each library that uses several devices
        self.due: dict[int, float] = {}
        self.late: dict[int, bool] = {}  # For each call with a known outcome: True if the deadline was missed
        self.loading: dict[int, float] = {}
        self.devices_of_pilot: dict[int, float] = {}  # Number of devices of each connected pilot

    def compute_measures(self, until_s: float | None) -> Measures:
        log = self.log
        for row in zip(log.what, log.at_s, log.call, log.library, log.pilot, log.value, strict=True):
            self._handle_event(*row)
        if until_s is not None:
            self.ended_at = until_s
        elif self.open_calls or self.left:
            self.ended_at = log.at_s[-1]
        self.waits_s.extend(
            self.ended_at - at_s for call, at_s in self.open_calls.items() if call not in self.begun_calls
        )
        self.late.update((call, True) for call, due_at in self.due.items() if due_at <= self.ended_at)
        return Measures(
            self.began_at, self.ended_at, self.calls, self.failed, len(self.open_calls) + self.left, self.items,
            self.completed, self.devices, self.queue, array("d", sorted(self.waits_s)),
            array("d", sorted(self.turnarounds_s)), self.devices.integrate(until_s=self.ended_at), self.useful_s,
            self.lost_s, self.loading_s, self.shared_bytes, self.peer_bytes,
            len(self.late), tuple(sorted(call for call, is_late in self.late.items() if is_late)),
        )  # fmt: skip

    def _handle_event(self, what: int, at_s: float, call: int, library: int, pilot: int, value: float) -> None:
        devices = self.devices_of.get(library, 1.0)
        match what:
            case LoggedEvent.CALL_CAME:
                self._count_arrivals(at_s, 1)
                self.open_calls[call] = at_s
            case LoggedEvent.CALL_BEGAN:
                self._begin_call(at_s, call, library)
            case LoggedEvent.CALL_ENDED:
                self._end_call(at_s, call, devices, value)
            case LoggedEvent.CALL_LEFT if self.running.get(call, (0.0, -1))[1] == library:
                self._count_interrupted_work(at_s - self.running.pop(call)[0], devices, kept_s=value)
                if call in self.open_calls:
                    self._change_queue_length(at_s, more=1)
            case LoggedEvent.CALL_FAILED if call in self.open_calls:
                self._fail_call(at_s, call)
            case LoggedEvent.CALL_DUE:
                self.due[call] = value
            case LoggedEvent.PART_BEGAN:
                self.parts[library, call] = at_s
            case LoggedEvent.PART_ENDED:
                ran_s = (at_s - self.parts.pop((library, call), at_s)) * devices
                if call in self.rerun_calls:
                    self.lost_s += ran_s
                else:
                    self.useful_s += ran_s
            case LoggedEvent.PART_LEFT:
                self._count_interrupted_work(at_s - self.parts.pop((library, call), at_s), devices, kept_s=value)
            case LoggedEvent.LIBRARY_STARTED:
                self.loading[library] = at_s
                if value > 1:
                    self.devices_of[library] = value
            case LoggedEvent.LIBRARY_READY | LoggedEvent.LIBRARY_ENDED:
                self.loading_s += (at_s - self.loading.pop(library, at_s)) * devices
            case LoggedEvent.PILOT_CAME:
                self.devices_of_pilot[pilot] = value
                self.devices.set_value(at_s, sum(self.devices_of_pilot.values()))
            # A pilot that never connected has no entry in `devices_of_pilot`.
            case LoggedEvent.PILOT_WENT if self.devices_of_pilot.pop(pilot, None) is not None:
                self.devices.set_value(at_s, sum(self.devices_of_pilot.values()))
            case LoggedEvent.BYTES_SHARED:
                self.shared_bytes += value
            case LoggedEvent.BYTES_PEER:
                self.peer_bytes += value
            case _:
                self._handle_counted_calls(what, at_s, call, value)

    def _handle_counted_calls(self, what: int, at_s: float, calls: int, value: float) -> None:
        match what:
            case LoggedEvent.CALLS_CAME:
                self._count_arrivals(at_s, int(value))
                self.left += int(value)
            case LoggedEvent.CALLS_BEGAN:
                self._change_queue_length(at_s, more=-int(value))
            case LoggedEvent.CALLS_BACK:
                self._change_queue_length(at_s, more=int(value))
            case LoggedEvent.CALLS_ENDED:
                self.left -= calls
                self._count_items(at_s, value)
            case LoggedEvent.CALLS_FAILED:
                self.left -= int(value)
                self.failed += int(value)
                self.ended_at = at_s
            case LoggedEvent.SECONDS_USED:
                self.useful_s += value
            case LoggedEvent.SECONDS_LOST:
                self.lost_s += value
            case LoggedEvent.WAITED:
                self.waits_s.extend([value] * calls)
            case LoggedEvent.TOOK:
                self.turnarounds_s.extend([value] * calls)

    def _begin_call(self, at_s: float, call: int, library: int) -> None:
        came_at = self.open_calls.get(call)
        if came_at is not None and call not in self.running:
            self._change_queue_length(at_s, more=-1)
        if came_at is not None and call not in self.begun_calls:
            self.begun_calls.add(call)
            self.waits_s.append(at_s - came_at)
        self.running[call] = at_s, library

    def _end_call(self, at_s: float, call: int, devices: float, items: float) -> None:
        came_at, (began_at, _) = self.open_calls.pop(call, None), self.running.pop(call, (at_s, -1))
        ran_s = (at_s - began_at) * devices
        if came_at is None:
            self.rerun_calls.add(call)
            self.lost_s += ran_s
            return
        if call in self.due:
            self.late[call] = at_s > self.due.pop(call)
        self.begun_calls.discard(call)
        self.useful_s += ran_s
        self._count_items(at_s, items)
        self.turnarounds_s.append(at_s - came_at)

    def _fail_call(self, at_s: float, call: int) -> None:
        del self.open_calls[call]
        if call in self.running:
            began_at, library = self.running.pop(call)
            self.lost_s += (at_s - began_at) * self.devices_of.get(library, 1.0)
        else:
            self._change_queue_length(at_s, more=-1)
        if self.due.pop(call, None) is not None:
            self.late[call] = True
        self.failed += 1
        self.ended_at = at_s

    def _count_arrivals(self, at_s: float, count: int) -> None:
        if not self.calls:
            self.began_at = at_s
        self.calls += count
        self._change_queue_length(at_s, more=count)

    def _change_queue_length(self, at_s: float, *, more: int) -> None:
        self.waiting += more
        self.queue.set_value(at_s, self.waiting)

    def _count_interrupted_work(self, ran_s: float, devices: float, *, kept_s: float) -> None:
        kept_s = min(kept_s, ran_s)
        self.useful_s += kept_s * devices
        self.lost_s += (ran_s - kept_s) * devices

    def _count_items(self, at_s: float, items: float) -> None:
        self.items += items
        self.completed.set_value(at_s, self.items)
        self.ended_at = at_s


class TokenFigures(msgspec.Struct, frozen=True):
    """Quantiles of token times in seconds, over ended calls to engines. `met`: number of calls whose tokens were all in
    time (SLINFER eq. 1).
    """

    objectives: int
    met: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    gap_p99_s: float

    @property
    def met_objective_share(self) -> float | None:
        return self.met / self.objectives if self.objectives else None


def compute_token_figures(log: EventLog) -> TokenFigures | None:
    """Return the quantiles of token times, or None if no call to an engine ended."""
    # If the log only counts calls, a token row stands for several calls, and `call` is their number.
    counted = LoggedEvent.CALLS_CAME in log.what
    kinds = (LoggedEvent.TOKEN_FIRST, LoggedEvent.TOKEN_MEAN, LoggedEvent.TOKEN_GAP, LoggedEvent.TOKEN_LATE)
    found = {what: array("d") for what in kinds}
    for what, call, value in zip(log.what, log.call, log.value, strict=True):
        if what in found:
            found[LoggedEvent(what)].extend([value] * (call if counted else 1))
    first, mean, gap, late = (array("d", sorted(found[what])) for what in kinds)
    if not first:
        return None
    return TokenFigures(
        objectives=len(late), met=sum(each <= 0 for each in late),
        ttft_p50_s=quantile(first, 0.5), ttft_p99_s=quantile(first, 0.99),
        tpot_p50_s=quantile(mean or array("d", [0.0]), 0.5), tpot_p99_s=quantile(mean or array("d", [0.0]), 0.99),
        gap_p99_s=quantile(gap or array("d", [0.0]), 0.99),
    )  # fmt: skip


class RunFigures(msgspec.Struct, frozen=True):
    """The numbers of a run that tables show. Units: seconds, device-seconds, shares from 0 to 1.

    `busy`: share of the pilots' device time during which a call ran. `bound_s`: lower bound for the end of the run;
    None if unknown or infinite. `in_time`: share of met deadlines; None without deadlines or for counted calls.
    """

    items_per_s: float
    held_s: float
    busy: float
    lost_s: float
    loads: int
    wait_p50_s: float
    wait_p95_s: float
    shared_bytes: float
    peer_bytes: float
    bound_s: float | None = None
    in_time: float | None = None
    warm_s: float = 0.0
    tokens: TokenFigures | None = None

    @property
    def violation_share(self) -> float | None:
        return None if self.in_time is None else 1.0 - self.in_time


def compute_run_figures(
    log: EventLog, outcome: RunOutcome, measured: Measures, *, bound_s: float | None = None
) -> RunFigures:
    violations = measured.violation_share
    waits = measured.waits_s or [0.0]
    return RunFigures(
        items_per_s=outcome.items / outcome.ended_at if outcome.ended_at else 0.0, held_s=measured.held_s,
        busy=min(1.0, outcome.busy_s / measured.held_s) if measured.held_s else 0.0,  # rounding may give more than 1
        lost_s=measured.lost_s, loads=log.what.count(LoggedEvent.LIBRARY_READY),
        wait_p50_s=quantile(waits, 0.5), wait_p95_s=quantile(waits, 0.95), shared_bytes=measured.shared_bytes,
        peer_bytes=measured.peer_bytes, bound_s=bound_s, in_time=None if violations is None else 1.0 - violations,
        warm_s=outcome.warm_s, tokens=compute_token_figures(log),
    )  # fmt: skip
