"""The warm pools (PromptTuner §4.4), and dispatch from the pools (§4.4.1).

Dispatch and residency share the pools. A context gets a pool when one of its calls has a deadline or is a gang. While
such calls wait, rounds decide about all waiting calls of the context. Otherwise the default policy decides.

Every 50 ms, a round chooses the jobs (waiting calls) that start and the number of replicas (libraries) of each job. A
gang is sent to all its libraries together. Without `together` (an ablation, §6.3) each replica of a job takes an idle
device and waits for the others. If all devices are held and none is loading, the late job with the nearest deadline
starts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from stoker.manager.core.deadlines import RUN_TIME_SAFETY_FACTOR, has_time_for_run
from stoker.manager.core.nouns import Call, CallState, Context, Gang, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.per_context import amount_of_work
from stoker.manager.core.seams import Action, Changes, Drop, Forecast, Send, SendGang, View
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.prompt_tuner.scheduling import (
    BEFORE_ALL_JOBS,
    HOPEFUL,
    LATE,
    JobQueue,
    Pool,
    PoolJob,
    Promise,
    allot,
)
from stoker.manager.policies.residency import UNKNOWN_LOAD_S
from stoker.protocol.calls import Features
from stoker.protocol.ids import CallId, LibraryId, PilotId
from stoker.units import show_seconds

ROUND_S = 0.05  # §5.3
REFRESH_S = 0.25  # Seconds after which the algorithms run again even if nothing changed

MOST_REPLICAS = 128  # Maximum replicas for which run times are predicted
_MOST_REMEMBERED = 10_000
_CUT_S = 3.0  # Seconds after which replicas on a disconnected pilot count as lost
_RATE_TOLERANCE = 0.01
_JOBS_PER_S = 10_000  # After new measurements, run times of at most this many jobs per second are predicted again


def is_decided_in_rounds(call: Call) -> bool:
    options = call.group.options
    return options.gang[1] > 1 or options.objective.deadline_at > 0


class PoolState:
    """The pool of a context: its waiting jobs, the replicas ordered for them, and their predicted run times."""

    def __init__(self, context: Context, *, learn: bool) -> None:
        self.context = context
        self._learn = learn
        self.job_queue = JobQueue()
        self.round_job_count = 0  # Number of queued jobs that Algorithm 1 schedules
        self.default_calls: set[int] = set()  # Queued calls that the default policy schedules if no job is queued
        self.promises: dict[int, Promise] = {}
        self.held: dict[int, int] = {}  # By job: idle replicas that it holds until it has enough (only in an ablation)
        self.wanted: dict[int, int] = {}  # Replicas that each job needed while it could meet its deadline
        self.idle_since: dict[LibraryId, float] = {}
        self.allot_due = self.walk_due = True  # True if calls or replicas changed since the algorithm last ran
        self.has_leftover_calls = False  # True if the last job has started, and calls in `default_calls` may still wait
        self.lacks_devices = False  # True if a job could meet its deadline, but gets no devices in time
        # Time since which a job has too few replicas to run, and the job's id. Among pools that lack replicas, the pool
        # with the smallest pair gets devices first.
        self.starvation_rank: tuple[float, int] = (math.inf, 0)
        self.last_round_at = -math.inf
        self._rates: list[tuple[float, float]] = []  # By gang size, from 1: seconds per unit of work, and fixed seconds
        self._times: dict[tuple[Features | None, int, int], tuple[float, ...]] = {}  # Predicted run times of new jobs
        self._is_monotone = True  # True if no run on 2 or more replicas gets slower with another replica
        self._known: tuple[object, ...] = ()  # Measurements that `_rates` were computed from
        self._rated_at = -math.inf
        self._ends: dict[int, tuple[object, float, Call]] = {}  # By running call: last report and expected end

    @property
    def is_active(self) -> bool:
        return self.round_job_count > 0

    @property
    def reserved_count(self) -> int:
        return sum(promise.reserved_count for promise in self.promises.values()) + sum(self.held.values())

    def mark_changed(self) -> None:
        self.allot_due = self.walk_due = True

    @property
    def load_s(self) -> float:
        return self.context.load_s or UNKNOWN_LOAD_S

    def update_rates(self, now: float) -> bool:
        """If measurements changed, compute seconds per unit of work again. Return True if the new values differ."""
        paces = self.context.paces
        parts = tuple(paces.largest_shares.items()) if self._learn else ()
        known = (parts, paces.meet_s, *paces.measured.items())
        if known == self._known or now - self._rated_at < len(self.job_queue) / _JOBS_PER_S:
            return False
        same, self._known = parts == (self._known[0] if self._known else ()), known
        fresh = [self._rate(size) for size in range(1, len(self._rates) + 1)]
        if same and all(
            a == b or (abs(a[0] - b[0]) <= _RATE_TOLERANCE * b[0] < math.inf and a[1] == b[1])
            for a, b in zip(fresh, self._rates, strict=True)
        ):
            return False
        self._rates, self._rated_at, self._is_monotone = fresh, now, _never_slows_with_replicas(fresh)
        self._ends.clear()
        self._times.clear()
        return True

    def make_job(self, view: View, call: Call) -> PoolJob:
        options, features = call.group.options, call.spec.features
        deadline_at, (least, most) = options.objective.deadline_at, options.gang
        most = max(least, min(most, MOST_REPLICAS))
        if len(self._rates) < most:
            self._rates += [self._rate(size) for size in range(len(self._rates) + 1, most + 1)]
            self._is_monotone = _never_slows_with_replicas(self._rates)
        usual_s, is_measured = call.group.cost.run_s or self.context.run_s, self._rates[0][0] < math.inf
        measures = not is_measured and not (most == 1 and usual_s)
        if is_measured and call.spec.progress:
            report = view.reports.get(call.id)
            done = report.done / features.items if report is not None and features and features.items else 0.0
            run_s = self._run_times_s(features, least, most, done=done)
        elif is_measured:
            known = features, least, most
            if known not in self._times:
                if len(self._times) >= _MOST_REMEMBERED:
                    self._times.clear()
                self._times[known] = self._run_times_s(*known)
            run_s = self._times[known]
        elif measures:
            run_s = (math.inf,) * (least - 1) + (0.0,) * (most - least + 1)
        else:
            run_s = (RUN_TIME_SAFETY_FACTOR * usual_s,)
        return PoolJob(call.id, deadline_at, run_s, least, measures, options.priority)

    def _run_times_s(
        self, features: Features | None, least: int, most: int, *, done: float | None = None
    ) -> tuple[float, ...]:
        """Return the run times in seconds of a job on 1, 2, ... replicas. `done`: finished share of a started job."""
        work = amount_of_work(features) * self.context.paces.max_share_left(
            features, done or 0.0, uses_ended_calls=self._learn
        )
        times = [none_s + unit_s * work for unit_s, none_s in self._rates[:most]]
        if done is None and features is not None and features.seconds_before_first_item(1):
            times = [seconds + features.seconds_before_first_item(size) for size, seconds in enumerate(times, start=1)]
        if least > 1:
            times[: least - 1] = [math.inf] * (least - 1)
        if not self._is_monotone or (most > 1 and times[0] < times[1]):
            times = list(accumulate(times, min))
        return tuple(times)

    def _rate(self, size: int) -> tuple[float, float]:
        paces = self.context.paces
        unit_s, none_s = paces.max_seconds(size, 1.0), paces.max_seconds(size, 0.0)
        return (math.inf, math.inf) if unit_s is None or none_s is None else (unit_s - none_s, none_s)

    def idle_replicas(self, *, reuse: bool = True) -> list[Library]:
        """Return idle replicas, last used first. `reuse`: include libraries that have served a call."""
        idle = reversed(self.context.idle.values())
        return [x for x in idle if not x.held and not x.withdrawn_calls and (reuse or not x.served)]

    def take_snapshot(self, *, now: float, idle: int) -> Pool:
        return Pool(idle, tuple(self._busy(now)), tuple(self.promises.values()), self.load_s, self.held)

    def _busy(self, now: float) -> list[float]:
        promised = {id for promise in self.promises.values() for id in promise.loading}
        before, self._ends, busy = self._ends, {}, []
        for id, library in self.context.libraries.items():
            if library.pilot.state is not PilotState.HERE:
                continue
            if library.state is LibraryState.LOADING:
                if id not in promised:
                    busy.append(max(now, library.started_at + self.load_s))
            elif library.state is LibraryState.READY and library.held:
                call = next(iter(library.held.values()))
                if call.id not in self._ends:
                    report, known = call.holder.report if type(call.holder) is Gang else None, before.get(call.id)
                    is_new = known is None or known[0] is not report
                    self._ends[call.id] = (report, self._ends_at(call), call) if known is None or is_new else known
                busy.append(self._ends[call.id][1])
        return busy

    def running_calls(self) -> list[tuple[Call, float]]:
        return [(call, ends_at) for _, ends_at, call in self._ends.values()]

    def _ends_at(self, call: Call) -> float:
        features, holder, paces = call.spec.features, call.holder, self.context.paces
        if call.group.options.gang[1] <= 1:
            usual_s = call.group.cost.run_s or self.context.run_s
            return call.sent_at + usual_s if usual_s else math.inf
        size = len(holder.members) if type(holder) is Gang else 1
        items = features.items if features is not None else 1
        at, done = call.sent_at, 0.0
        before_s = features.seconds_before_first_item(size) if features is not None else 0.0
        if type(holder) is Gang and holder.report is not None:
            at, done = holder.report
            before_s = -paces.meet_s if size > 1 else 0.0  # do not count the ranks' connection time again
        left = paces.max_share_left(features, done / max(1, items), uses_ended_calls=self._learn)
        seconds = paces.max_seconds(size, amount_of_work(features) * left)
        return at + before_s + seconds if seconds is not None else math.inf


def _never_slows_with_replicas(rates: list[tuple[float, float]]) -> bool:
    return all(a[0] >= b[0] and a[1] >= b[1] for a, b in pairwise(rates[1:]))


class PoolStates:
    def __init__(self, *, learn: bool) -> None:
        self.pools: dict[str, PoolState] = {}
        self._learn = learn
        self._pool_of_job: dict[int, PoolState] = {}
        self._cut_since: dict[PilotId, float] = {}
        self._is_first_round = True

    def pool_of(self, context: Context) -> PoolState | None:
        return self.pools.get(context.recipe.key)

    def update(self, view: View, changes: Changes) -> None:
        if self._is_first_round:
            self._is_first_round = False
            for context in view.waiting_contexts.values():
                self._create_pool(view, context)
        fresh: dict[PoolState, list[PoolJob]] = {}
        for id in changes.calls:
            call, state = view.calls.get(id), self._pool_of_job.get(id)
            if call is None or call.state is not CallState.WAITING:
                if state is not None:
                    self.forget_job(id)
            elif state is None:
                self._add_job(view, call, fresh)
        for state, jobs in fresh.items():
            state.job_queue.put(jobs, now=view.now)
            state.mark_changed()
        changed = [view.libraries.get(LibraryId(id)) for id in changes.libraries]
        contexts = {library.context for library in changed if library is not None}
        if changes.libraries or changes.pilots:
            for state in self.pools.values():
                state.walk_due = True  # devices may have become free
                if changes.pilots or None in changed or state.context in contexts:
                    state.mark_changed()
        for state in self.pools.values():
            if state.job_queue and state.update_rates(view.now):
                calls = [call for id in state.job_queue.jobs if (call := view.calls.get(id)) is not None]
                state.job_queue.put([state.make_job(view, call) for call in calls], now=view.now)
                state.mark_changed()
        self._refresh_promises(view)

    def forget_job(self, id: int) -> None:
        state = self._pool_of_job.pop(id, None)
        if state is None:
            return
        state.job_queue.remove(id)
        for by_job in (state.promises, state.held, state.wanted):
            by_job.pop(id, None)
        state.mark_changed()
        if id in state.default_calls:
            state.default_calls.remove(id)
            return
        state.round_job_count -= 1
        if not state.round_job_count:
            state.has_leftover_calls = bool(state.default_calls)
            for other in sorted(state.default_calls):
                del self._pool_of_job[other]
                state.job_queue.remove(other)
            state.default_calls.clear()

    def _create_pool(self, view: View, context: Context) -> None:
        calls = list(context.queue)
        others: set[int] = {call.id for call in calls if not is_decided_in_rounds(call)}
        if len(others) == len(calls):
            return
        state = self.pools.get(context.recipe.key)
        if state is None:
            state = self.pools[context.recipe.key] = PoolState(context, learn=self._learn)
        state.round_job_count, state.default_calls = len(calls) - len(others), others
        self._pool_of_job.update(dict.fromkeys((call.id for call in calls), state))
        state.job_queue.put([state.make_job(view, call) for call in calls], now=view.now)
        state.mark_changed()

    def _add_job(self, view: View, call: Call, fresh: dict[PoolState, list[PoolJob]]) -> None:
        state = self.pool_of(call.group.context)
        if state is None or not state.round_job_count:
            if is_decided_in_rounds(call):
                self._create_pool(view, call.group.context)
            return
        if is_decided_in_rounds(call):
            state.round_job_count += 1
        else:
            state.default_calls.add(call.id)
        self._pool_of_job[call.id] = state
        fresh.setdefault(state, []).append(state.make_job(view, call))

    def _refresh_promises(self, view: View) -> None:
        self._cut_since = {
            id: self._cut_since.get(id, view.now) for id, pilot in view.pilots.items() if pilot.state is PilotState.CUT
        }
        for state in self.pools.values():
            if state.job_queue.update_needs(view.now):
                state.mark_changed()
            if not state.walk_due and not self._cut_since:
                continue
            for id, promise in tuple(state.promises.items()):
                if not state.job_queue.can_meet_deadline(id):
                    del state.promises[id]
                    state.mark_changed()
                else:
                    self._update_promise(view, state, promise)

    def may_reconnect(self, pilot: Pilot, now: float) -> bool:
        return now - self._cut_since.get(pilot.id, now) <= _CUT_S

    def _update_promise(self, view: View, state: PoolState, promise: Promise) -> None:
        here, promise.lost, promise.loading = 0, [], set()
        for place in promise.places:
            pilot = view.pilots.get(place[0])
            device = pilot.devices.get(place[1][0]) if pilot is not None else None
            there = device.libraries.values() if device is not None else ()
            library = next((x for x in there if x.context is state.context), None)
            if library is None or pilot is None or library.state not in (LibraryState.LOADING, LibraryState.READY):
                promise.lost.append(place)
            elif pilot.state is PilotState.CUT and self.may_reconnect(pilot, view.now):
                promise.loading.add(library.id)
            elif pilot.state is not PilotState.HERE:
                promise.lost.append(place)
            elif library.state is LibraryState.READY:
                here += 1
            else:
                promise.loading.add(library.id)
        if here != promise.loaded:
            promise.loaded = here
            state.mark_changed()


class AllotInRounds(HottestFirst):
    """Dispatch policy: Algorithm 1 for contexts with queued jobs, the default policy for other contexts."""

    period_s = ROUND_S
    by_deadline = False

    def __init__(self, states: PoolStates, *, together: bool, reuse: bool) -> None:
        super().__init__()
        self.states = states
        self.together = together
        self.reuse = reuse

    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        state = self.states.pool_of(call.group.context)
        if is_decided_in_rounds(call) or (state is not None and state.is_active):
            return None
        return super().place(view, call)

    def pull(self, view: View, library: Library) -> int | Iterable[Action]:
        state, head = self.states.pool_of(library.context), library.context.queue.head()
        if state is not None:
            state.mark_changed()
        if head is None or is_decided_in_rounds(head) or (state is not None and state.is_active):
            return 0
        return super().pull(view, library)

    def on_out_of_calls(self, view: View, library: Library) -> Iterable[Action]:
        state = self.states.pool_of(library.context)
        if state is not None:
            state.mark_changed()
        return super().on_out_of_calls(view, library)

    def on_round(self, view: View, changes: Changes) -> Sequence[Action]:
        self.states.update(view, changes)
        plan: list[Action] = []
        for state in self.states.pools.values():
            if state.has_leftover_calls and not state.is_active:  # Algorithm 1 starts all calls of active pools
                plan += _send_calls_outside_rounds(state)
            state.has_leftover_calls = False
            if state.is_active and (state.allot_due or view.now >= state.last_round_at + REFRESH_S):
                state.allot_due, state.last_round_at = False, view.now
                plan += self._start_waiting_jobs(view, state)
        return plan

    def may_skip_rounds(self, view: View) -> bool:  # noqa: ARG002
        return not any(state.is_active or state.has_leftover_calls for state in self.states.pools.values())

    def _start_waiting_jobs(self, view: View, state: PoolState) -> list[Action]:
        free = state.idle_replicas(reuse=self.reuse)
        if not free:
            return []
        starts: list[tuple[PoolJob, list[Library]]] = []

        def take(job: PoolJob, count: int) -> bool:
            if any(job is other for other, _ in starts):
                return False
            members = _choose_libraries_for_call(
                view, view.calls[CallId(job.id)], free, count=count, run_s=job.run_s[count - 1]
            )
            if len(members) < count:
                return False
            starts.append((job, members))
            for library in members:
                free.remove(library)
            return True

        if not self.together:
            _hold_idle_replicas(state, idle=len(free), now=view.now)
            for job, count in _late_jobs_ready_to_start(state, idle=len(free), now=view.now):
                if take(job, count):
                    del state.held[job.id]
        allot(state.job_queue, state.take_snapshot(now=view.now, idle=len(free)), now=view.now, take=take)
        plan: list[Action] = []
        for job, members in starts:
            self.states.forget_job(job.id)
            plan += _send_or_drop(view, job, members)
        for id, promise in tuple(state.promises.items()):
            # If all ordered replicas are loaded and the job still waits, it needs more, so plan it again.
            if promise.loaded >= promise.replicas:
                del state.promises[id]
                state.mark_changed()
        return plan


def _send_or_drop(view: View, job: PoolJob, members: list[Library]) -> list[Action]:
    id, ids = CallId(job.id), tuple(library.id for library in members)
    options = view.calls[id].group.options
    if job.deadline_at and options.objective.drop_late and not job.measures and job.will_miss_deadline(view.now):
        takes, left = show_seconds(job.run_s[-1]), show_seconds(max(0.0, job.deadline_at - view.now))
        return [Drop(id, f"even on all its possible devices it takes {takes}, but its deadline is in {left}")]
    gang = options.gang[1] > 1
    plan: list[Action] = [SendGang(id, ids) if gang else Send(id, ids[0])]
    ends_at = view.now + job.run_s[len(ids) - 1]
    if not job.measures and (gang or job.deadline_at):
        plan.append(Forecast(id, ends_at, not job.deadline_at or ends_at <= job.deadline_at))
    return plan


def _choose_libraries_for_call(
    view: View, call: Call, free: list[Library], *, count: int, run_s: float
) -> list[Library]:
    able = [x for x in free if x.admits(call) and has_time_for_run(view, x.pilot, run_s)]
    if 1 < count < len(able):
        many = Counter(library.pilot.id for library in able)
        able.sort(key=lambda library: (-min(count, many[library.pilot.id]), library.pilot.id))
    return able[:count]


def _send_calls_outside_rounds(state: PoolState) -> list[Action]:
    free = state.idle_replicas()
    calls = state.context.queue.first_calls(len(free), max_examined=len(free)) if free else []
    pairs = ((call, library) for call, library in zip(calls, free, strict=False) if not is_decided_in_rounds(call))
    return [Send(call.id, library.id) for call, library in pairs if library.admits(call)]


def _hold_idle_replicas(state: PoolState, *, idle: int, now: float) -> None:
    state.job_queue.update_needs(now)
    free = max(0, idle - sum(promise.reserved_count for promise in state.promises.values()))
    waits = [(kind, id) for kind, _, id in state.job_queue.iter_keys_after(BEFORE_ALL_JOBS) if id not in state.promises]
    line = [id for kind, id in waits if kind == HOPEFUL or (kind == LATE and id in state.held)]
    state.wanted = {id: state.job_queue.needed_replicas(id) or state.wanted[id] for id in line}
    before, state.held = state.held, {}
    for wants in (before, state.wanted):  # no job gets a replica that another job already holds
        for id in line:
            has = state.held.get(id, 0)
            more = min(free, min(wants.get(id, 0), state.wanted[id]) - has)
            if more > 0:
                state.held[id] = has + more
                free -= more


def _late_jobs_ready_to_start(state: PoolState, *, idle: int, now: float) -> list[tuple[PoolJob, int]]:
    """Return late jobs that hold enough replicas. If late jobs would block each other forever, return one of them."""
    late = [
        (state.job_queue.jobs[id], count)
        for id, count in state.held.items()
        if not state.job_queue.can_meet_deadline(id)
    ]
    ready = [(job, count) for job, count in late if count >= state.wanted[job.id]]
    if ready or not late or sum(state.held.values()) < idle:
        return ready
    if state.promises or state.take_snapshot(now=now, idle=idle).busy:
        return []
    job, count = late[0]
    if count < job.least <= idle:
        count, state.held = job.least, {job.id: job.least}
    return [(job, count)] if count >= job.least else []
