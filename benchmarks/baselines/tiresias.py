"""Tiresias (Gu et al., NSDI '19): least attained service first, in discrete queues, with preemption.

The *attained service* of a call is its number of libraries times the seconds of use. A call moves from the first queue
to the next when its service exceeds a threshold. Calls of a queue run in order of arrival; a call that needs more
libraries than are left is skipped. A running call without libraries in the new plan is checkpointed and waits.

Settings come from Lucid's published simulator (`simulation/policy/tiresias.py`). Two differences favour Tiresias: plans
are made at each change, not every 60 s, and a call moves exactly at the threshold.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence

from benchmarks.baselines.shortest_first import EveryDevice, OneLine, start, waiting_among
from stoker.manager.core.nouns import Call, CallState, Context, LibraryState
from stoker.manager.core.seams import Action, Changes, Evict, Policies, Provisioning, Timer, View
from stoker.manager.policies.provisioning import KeepBlocks

WIDE_FROM = 9
"""Minimum GPUs of a wide call."""
_ROUNDING_S = 1e-3


class Job:
    """A call. `since`: time of the last start; None = the call waits. `holds_until`: time when the checkpoint is
    restored.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.gpus = max(1, call.group.options.gang[0])
        self.place = (-call.group.options.priority, call.submitted_at, call.id)
        self.level, self.had_gpu_s = 0, 0.0
        self.since: float | None = None
        self.holds_until: float | None = None
        self.leaving = self.preempted = False

    def __lt__(self, other: Job) -> bool:
        return self.place < other.place

    def service_gpu_s(self, now: float) -> float:
        return self.had_gpu_s + (self.gpus * (now - self.since) if self.since is not None else 0.0)


class Tiresias(OneLine):
    """`restart_s`: extra seconds of a preempted call on fewer than `WIDE_FROM` GPUs, and on more."""

    def __init__(
        self, *, thresholds_gpu_s: Sequence[float] = (18_000.0,), restart_s: tuple[float, float] = (40.0, 60.0)
    ) -> None:
        self.thresholds_gpu_s, self.restart_s = tuple(thresholds_gpu_s), restart_s
        self.jobs: dict[int, Job] = {}
        self._queues: dict[Context, list[list[Job]]] = {}
        self._active: dict[Context, dict[int, Job]] = {}

    def on_round(self, view: View, changes: Changes) -> Iterator[Action]:
        self._note_changes(view, changes)
        yield from self._plan(view)

    def on_timer(self, view: View, key: str) -> Iterator[Action]:  # noqa: ARG002
        yield from self._plan(view)

    def _note_changes(self, view: View, changes: Changes) -> None:
        for id in changes.calls:
            job = self.jobs.get(id)
            if job is not None and id not in view.calls:
                del self.jobs[id]
                self._queues[job.call.group.context][job.level].remove(job)
                self._active[job.call.group.context].pop(id, None)
        for call in waiting_among(view, changes):
            job = self.jobs.get(call.id)
            context = call.group.context
            if job is None:
                job = self.jobs[call.id] = Job(call)
                queues = self._queues.setdefault(context, [[] for _ in range(len(self.thresholds_gpu_s) + 1)])
                insort(queues[0], job)
                self._active.setdefault(context, {})
            elif job.since is not None and job.holds_until is None:  # The call was preempted, or lost its libraries.
                self._stops(view, job)

    def _stops(self, view: View, job: Job) -> None:
        job.had_gpu_s = job.service_gpu_s(view.now)
        job.since = job.holds_until = None
        job.leaving, job.preempted = False, True
        del self._active[job.call.group.context][job.call.id]

    def _plan(self, view: View) -> Iterator[Action]:
        for context, queues in self._queues.items():
            active = self._active[context]
            for job in list(active.values()):
                self._demote(view, job, queues)
            chosen = _chosen(queues, sum(library.state is LibraryState.READY for library in context.libraries.values()))
            for job in list(active.values()):
                if job.call.id not in chosen and job.holds_until is not None:  # The call has not resumed yet.
                    self._stops(view, job)
                elif job.call.id not in chosen and not job.leaving:
                    job.leaving = True
                    yield Evict(job.call.id)
            for job in chosen.values():
                if job.since is None and job.call.state is CallState.WAITING:
                    yield from self._begin(view, job, active)
                elif job.holds_until is None or view.now < job.holds_until - _ROUNDING_S:
                    continue
                elif (order := start(job.call)) is not None:
                    job.holds_until = None
                    yield order
        jobs = (job for active in self._active.values() for job in active.values())
        due = min((self._due_at(view, job) for job in jobs), default=math.inf)
        if due < math.inf:
            yield Timer(due, "due")

    def _demote(self, view: View, job: Job, queues: list[list[Job]]) -> None:
        service = job.service_gpu_s(view.now) + _ROUNDING_S
        level = sum(service >= threshold for threshold in self.thresholds_gpu_s)
        if level != job.level:
            queues[job.level].remove(job)
            job.level = level
            insort(queues[level], job)

    def _begin(self, view: View, job: Job, active: dict[int, Job]) -> Iterator[Action]:
        context = job.call.group.context
        kept = sum(other.gpus for other in active.values() if other.holds_until is not None)
        if len(context.idle) - kept < job.gpus:
            return  # The preempted calls have not ended yet.
        restart_s = self.restart_s[job.gpus >= WIDE_FROM] if job.preempted else 0.0
        if restart_s:
            job.holds_until = view.now + restart_s
        elif (order := start(job.call)) is not None:
            yield order
        else:
            return
        job.since = view.now
        active[job.call.id] = job

    def _due_at(self, view: View, job: Job) -> float:
        due = math.inf
        if job.holds_until is not None:
            due = job.holds_until if job.holds_until > view.now else view.now + self.period_s
        if job.level < len(self.thresholds_gpu_s):
            left_gpu_s = self.thresholds_gpu_s[job.level] - job.service_gpu_s(view.now)
            due = min(due, view.now + max(left_gpu_s / job.gpus, _ROUNDING_S))
        return due


def _chosen(queues: list[list[Job]], libraries: int) -> dict[int, Job]:
    chosen: dict[int, Job] = {}
    for queue in queues:
        for job in queue:
            if not libraries:
                return chosen
            if job.gpus <= libraries:
                libraries -= job.gpus
                chosen[job.call.id] = job
    return chosen


def tiresias(*, provisioning: Provisioning | None = None, **settings: Sequence[float] | float) -> Policies:
    asked = provisioning or KeepBlocks()
    return Policies(Tiresias(**settings), EveryDevice(provisioning=asked), asked)  # type: ignore[arg-type]
