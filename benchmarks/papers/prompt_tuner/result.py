"""What came of one run: who was late, and how long GPUs were held.

A job is in time when its result is there within its SLO; one that was refused, dropped, or never done is a violation
like one that is late. A GPU is paid for from the order to load a model on it until the end of its process, whether it
loads, waits or works; systems that never give GPUs back pay for all of them, from the beginning to the end of the run.
A run ends with its last job, and not before the 20 minutes in which jobs come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from benchmarks.papers.prompt_tuner import paper
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import EventLog, Happened
from stoker.manager.sim.run import RunOutcome

_ROUNDING_S = 1e-3
"""A message's way to the manager and back is not counted as late."""


class Result(msgspec.Struct, frozen=True):
    """Jobs, device-seconds, seconds. `held_s`: on which models were loaded or being loaded; `busy_s`: on which jobs
    ran; `all_s`: of the whole cluster. `wait_share`: of a job's latency in which it had not begun, the mean over jobs
    that were done, and `wait_most` the most. `start_share`, `start_most`: of that, while a library that it then ran on
    was started and loaded its model. `round_s`, `round_most_s`: what a round of the policy took here."""

    jobs: int
    late: int
    refused: int
    unfinished: int
    banked: int
    loads: int
    held_s: float
    busy_s: float
    all_s: float
    ended_at: float
    wait_share: float
    wait_most: float
    start_share: float = 0.0
    start_most: float = 0.0
    round_s: float = 0.0
    round_most_s: float = 0.0

    @property
    def violations(self) -> float:
        """Percent of the jobs."""
        return 100.0 * (self.late + self.refused + self.unfinished) / self.jobs

    @property
    def utilisation(self) -> float:
        """Device-seconds that models were loaded on, loads included, of all."""
        return self.held_s / self.all_s

    def cost(self, *, static: bool, device_price_s: float) -> float:
        """Dollars. `static`: all GPUs are paid for all the time."""
        return (self.all_s if static else self.held_s) * device_price_s


def result_of(log: EventLog, arrivals: Sequence[Arrival], outcome: RunOutcome, *, gpus: int) -> Result:
    """Read a run's log and outcome. `arrivals` are its calls as they came."""
    calls = _Calls(arrivals)
    for at_s, what, call, library, value in zip(log.at_s, log.what, log.call, log.library, log.value, strict=True):
        calls.hear(at_s, what, call, library, value)
    done_s, waits, starts = calls.latencies_s(), calls.waits(), calls.starts()
    late = sum(took_s > arrivals[job].deadline_s + _ROUNDING_S for job, took_s in done_s.items())
    return Result(
        jobs=len(arrivals),
        late=late,
        refused=len(calls.failed),
        unfinished=len(arrivals) - len(done_s) - len(calls.failed),
        banked=sum(arrival.shared_s > 0.0 for arrival in arrivals),
        loads=sum(what == Happened.LIBRARY_STARTED for what in log.what),
        held_s=outcome.warm_s,
        busy_s=outcome.busy_s,
        all_s=max(outcome.ended_at, paper.MINUTES * 60.0) * gpus,
        ended_at=outcome.ended_at,
        wait_share=fmean(waits) if waits else 0.0,
        wait_most=max(waits, default=0.0),
        start_share=fmean(starts) if starts else 0.0,
        start_most=max(starts, default=0.0),
    )


class _Calls:
    """When each job began and ended, and on which libraries. Jobs go by their number in order of coming."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals
        self._jobs: dict[int, int] = {}
        self._began: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._ran_on: dict[int, set[int]] = {}
        self._loads: dict[int, tuple[float, float]] = {}
        self.failed: set[int] = set()

    def hear(self, at_s: float, what: int, call: int, library: int, value: float) -> None:
        """A row of the log."""
        if what == Happened.CALL_CAME:
            self._jobs[call] = len(self._jobs)
        elif what == Happened.LIBRARY_READY:
            self._loads[library] = (at_s - value, at_s)
        elif what in (Happened.CALL_BEGAN, Happened.PART_BEGAN):
            job = self._jobs[call]
            if what == Happened.CALL_BEGAN:
                self._began.setdefault(job, at_s)
            if at_s <= self._began.get(job, at_s):  # not those of a later run
                self._ran_on.setdefault(job, set()).add(library)
        elif what == Happened.CALL_ENDED:
            self._ended[self._jobs[call]] = at_s
        elif what == Happened.CALL_FAILED:
            self.failed.add(self._jobs[call])

    def latencies_s(self) -> dict[int, float]:
        """From when a job came until it was done."""
        came = self._arrivals
        return {job: at_s - came[job].at_s for job, at_s in self._ended.items() if job not in self.failed}

    def waits(self) -> list[float]:
        """The share of each job's latency in which it had not begun."""
        latencies = self.latencies_s().items()
        return [(self._began[job] - self._arrivals[job].at_s) / max(took_s, _ROUNDING_S) for job, took_s in latencies]

    def starts(self) -> list[float]:
        """The share of each job's latency in which it had not begun and a library that it ran on was not loaded."""
        found = []
        for job, took_s in self.latencies_s().items():
            loads = [self._loads[library] for library in self._ran_on[job] if library in self._loads]
            found.append(_covered_s(loads, self._arrivals[job].at_s, self._began[job]) / max(took_s, _ROUNDING_S))
        return found


def _covered_s(spans: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """Seconds between two times that lie in at least one span."""
    covered = 0.0
    for begins, ends in sorted(spans):
        since = max(since, begins)
        covered += max(0.0, min(ends, until) - since)
        since = max(since, min(ends, until))
    return covered
