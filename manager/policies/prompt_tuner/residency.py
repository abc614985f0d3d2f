"""PromptTuner's residency (§4.4.2): every 50 ms, warm devices for jobs and release unused devices.

A walk through all queues (Algorithm 2) finds the jobs that need more replicas than their pools will have in time. These
replicas are loaded on *cold* (empty) devices and reserved for their job until it starts. A lost replica is ordered
again while its job can meet its deadline. A replica that is unused for `window_s` is unloaded, unless a job of its
context waits.

Additions to the paper: late jobs get idle replicas, or the smallest number on which they can run. Jobs without
deadlines come last, by the default rules. The context that has lacked replicas longest gets devices first; otherwise
two gangs would block each other. After `patience_s` seconds, this context may take idle replicas of other pools, and
share a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

from stoker.manager.core import seams
from stoker.manager.core.deadlines import has_forecast_changed, is_in_time
from stoker.manager.core.nouns import Context, Device, Library, LibraryState, PilotState
from stoker.manager.core.seams import Action, Changes, Provisioning, View
from stoker.manager.policies import where_to_load
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.making_room import StopChoice, libraries_to_stop_on_one_pilot
from stoker.manager.policies.prompt_tuner.pools import REFRESH_S, ROUND_S, PoolState, PoolStates, is_decided_in_rounds
from stoker.manager.policies.prompt_tuner.scheduling import DevicePlanner, PlannedJob, PoolJob
from stoker.manager.policies.residency import LoadWhereWanted, is_ready_or_loading
from stoker.manager.policies.sleeping import is_idle
from stoker.protocol.ids import CallId, LibraryId, RecipeKey
from stoker.units import show_seconds

Replica = tuple[Device, ...]  # The devices of one replica, all in one pilot

_Fits = Callable[[Context, Device], bool]


def cold_devices(view: View) -> list[Device]:
    return [device for device in view.devices() if not any(map(makes_device_warm, device.libraries.values()))]


class ColdDevices:
    """Assigns each cold (empty) device at most once per round. `fits`: returns True if a context fits on a device."""

    def __init__(self, view: View, cold: list[Device], *, fits: _Fits) -> None:
        self._view = view
        self._fits = fits
        self._cold = cold
        self.gone: set[Device] = set()
        self._found: dict[str, tuple[list[Replica], Iterator[Replica]]] = {}
        self.taken: dict[int, list[Replica]] = {}

    def count_loadable(self, model: str, *, most: int) -> int:
        """Return how many replicas of a model cold devices could load, up to `most`; 0 after failed loads."""
        return (
            0
            if where_to_load.has_failed_loads(self._view.contexts[model])
            else len(self.find_replicas(model, most=most))
        )

    def reserve_devices(self, model: str, count: int, *, job: int) -> None:
        self.taken.setdefault(job, []).extend(self.assign_devices(model, count))

    def assign_devices(self, model: str, count: int) -> list[Replica]:
        picked = self.find_replicas(model, most=count)
        self.gone.update(*picked)
        return picked

    def find_replicas(self, model: str, *, most: int) -> list[Replica]:
        if most <= 0:
            return []
        if model not in self._found:
            self._found[model] = [], self._replicas(self._view.contexts[model])
        found, more = self._found[model]
        if self.gone:
            found[:] = [devices for devices in found if self.gone.isdisjoint(devices)]
        found += islice(more, max(0, most - len(found)))
        return found[:most]

    def _replicas(self, context: Context) -> Iterator[Replica]:
        for rank in where_to_load.distinct_failure_counts(context):
            able = (
                device
                for device in self._cold
                if device not in self.gone
                and where_to_load.count_failed_loads(context, device.pilot) == rank
                and self._fits(context, device)
                and where_to_load.may_load(self._view, context, device, ignores_failed_loads=True)
            )
            sets = where_to_load.iter_device_sets(able, context.recipe.needs.devices)
            yield from (devices for devices in sets if self.gone.isdisjoint(devices))


def makes_device_warm(library: Library) -> bool:
    return bool(library.context.recipe.loader)


def make_forecast(view: View, id: int, ends_at: float, due_at: float) -> list[Action]:
    if ends_at == math.inf:
        return []
    ends_at = max(ends_at, view.now)
    in_time = is_in_time(ends_at, due_at=due_at, now=view.now)
    changed = has_forecast_changed(view.forecasts.get(id), ends_at, in_time=in_time, now=view.now)
    return [seams.Forecast(CallId(id), ends_at, in_time)] if changed else []


def explain_drop(view: View, fate: PlannedJob) -> str:
    left_s = fate.job.deadline_at - view.now
    if left_s <= 0:
        return f"dropped: {show_seconds(-left_s)} past its deadline"
    due = f"dropped: its deadline is in {show_seconds(left_s)}"
    if fate.ends_at == math.inf:
        return f"{due}, and it has not started"
    soonest = show_seconds(fate.ends_at - view.now)
    return f"{due}, and it cannot end sooner than in {soonest}: set a later deadline, or allow the call to be late"


WINDOW_S = 60.0  # §6.3

JOBS_PER_ROUND = 128  # Maximum jobs that a scheduling round plans; later rounds plan the other jobs


class WarmPools(Quiet):
    """Residency policy: Algorithm 2 for contexts with queued jobs, the default policy for other contexts."""

    period_s = ROUND_S

    def __init__(
        self, states: PoolStates, *, window_s: float, delay: bool, reuse: bool, early: bool, provisioning: Provisioning
    ) -> None:
        self.states = states
        self.default = LoadWhereWanted(keeper=self, provisioning=provisioning)
        """Policy that decides about contexts without a pool, and how contexts are loaded."""
        self.window_s = window_s
        self.reuse = reuse
        self.early = early
        self._planner = DevicePlanner(delay=delay)
        self._again_at = math.inf
        self._reclaim_at = math.inf
        self._cold: list[Device] | None = None  # Cold devices; None after libraries or pilots changed
        self._first_unserved: dict[str, PoolJob] = {}  # By pool: first job of this round that found no devices

    @property
    def provisioning(self) -> Provisioning:
        return self.default.provisioning

    def on_waiting_calls(self, view: View, context: Context) -> Sequence[Action]:
        """Return the default plan. If Algorithms 1 and 2 schedule the context, return only unloads or a failure."""
        state, head = self.states.pool_of(context), context.queue.head()
        ask_again = seams.Timer(view.now + self.default.ask_again_s, context.recipe.key)
        if hopeless := self.default.hopeless_gangs(view, context):
            return (*hopeless, ask_again)
        if state is None or not state.is_active:
            if head is None or not is_decided_in_rounds(head):
                return self.default.on_waiting_calls(view, context)
            return (ask_again,)  # the next scheduling step creates the context's pool
        state.walk_due = True
        plan: list[Action] = [ask_again]
        alive = any(
            is_ready_or_loading(view, library, cut_s=self.default.cut_s) for library in context.libraries.values()
        )
        cold = ColdDevices(view, cold_devices(view), fits=self.default.fits)
        if cold.find_replicas(context.recipe.key, most=1) or (alive and context.starvation_order is None):
            return plan
        if not alive and not state.promises:
            impossible = self.default.why_nowhere(view, context)
            if impossible is not None:
                return (seams.FailWaiting(RecipeKey(context.recipe.key), impossible),)
        return plan + self.default.make_room(view, context)

    def on_timer(self, view: View, key: str) -> Sequence[Action]:
        context = view.contexts.get(key)
        return self.on_waiting_calls(view, context) if context is not None and context.queue.count else ()

    def reservation_after_load(self, view: View, library: Library) -> int:
        return self.default.reservation_after_load(view, library)

    def on_round(self, view: View, changes: Changes) -> Sequence[Action]:
        self.states.update(view, changes)
        if changes.libraries or changes.pilots:
            self._cold = None
        plan: list[Action] = []
        due = any(state.walk_due for state in self.states.pools.values())
        if self._planner.is_unfinished or due or view.now >= self._again_at:
            if self._cold is None:
                self._cold = cold_devices(view)
            cold = ColdDevices(view, self._cold, fits=self.default.fits)
            if not self._planner.is_unfinished:
                plan += self._start_planning_round(view, cold)
            if self._planner.is_unfinished:
                plan += self._plan_next_jobs(view, cold)
        if due or view.now >= self._reclaim_at:
            plan += self._unload_unused_replicas(view)
        return plan

    def may_skip_rounds(self, view: View) -> bool:  # noqa: ARG002
        return (
            min(self._again_at, self._reclaim_at) == math.inf
            and not self._planner.is_unfinished
            and not any(state.is_active or state.walk_due for state in self.states.pools.values())
        )

    def _start_planning_round(self, view: View, cold: ColdDevices) -> list[Action]:
        plan: list[Action] = []
        pools, looks, self._first_unserved = {}, False, {}
        for key, state in self.states.pools.items():
            state.walk_due = state.lacks_devices = False
            plan += self._replace_lost_replicas(view, state, cold)
            pool = state.take_snapshot(now=view.now, idle=len(state.idle_replicas(reuse=self.reuse)))
            running = [(call, ends_at) for call, ends_at in state.running_calls() if is_decided_in_rounds(call)]
            for call, ends_at in running:
                plan += make_forecast(view, call.id, ends_at, call.group.options.objective.deadline_at)
            if state.is_active:
                pools[key] = pool
            looks |= state.is_active or bool(running)
        self._again_at = view.now + REFRESH_S if looks else math.inf
        if pools:
            self._planner.start_round(pools, now=view.now)
        return plan

    def _plan_next_jobs(self, view: View, cold: ColdDevices) -> list[Action]:
        plan: list[Action] = []
        lines = {key: state.job_queue for key, state in self.states.pools.items()}
        for fate in self._planner.plan_next_jobs(lines, cold, most_jobs=JOBS_PER_ROUND):
            state = self.states.pools[fate.model]
            if fate.promise is not None:
                loads = self._make_loads(state.context, cold.taken.pop(fate.job.id))
                fate.promise.places = [(load.pilot, load.devices) for load in loads]
                state.promises[fate.job.id] = fate.promise
                state.allot_due = True
                plan += loads
            elif not fate.has_devices_in_time:
                self._first_unserved.setdefault(fate.model, fate.job)
                state.lacks_devices = state.lacks_devices or state.job_queue.can_meet_deadline(fate.job.id)
            plan += self._forecast_or_drop(view, state, fate)
        return plan if self._planner.is_unfinished else plan + self._load_for_unserved_jobs(view, cold)

    def _make_loads(self, context: Context, sets: list[Replica]) -> list[seams.Load]:
        return [where_to_load.make_load(context, each, self.default.reservation(context, each)) for each in sets]

    def _replace_lost_replicas(self, view: View, state: PoolState, cold: ColdDevices) -> list[Action]:
        """Order lost replicas again if their job can still meet its deadline, else drop the job's promise."""
        plan: list[Action] = []
        for id, promise in tuple(state.promises.items()):
            missing = len(promise.lost)
            if not missing:
                continue
            key, job = state.context.recipe.key, state.job_queue.jobs[id]
            free_at = view.now + state.load_s + job.run_s[promise.replicas + promise.reserved_idle - 1]
            if free_at > job.deadline_at or cold.count_loadable(key, most=missing) < missing:
                del state.promises[id]
                state.allot_due = True
                continue
            cold.reserve_devices(key, missing, job=id)
            loads = self._make_loads(state.context, cold.taken.pop(id))
            promise.places = [place for place in promise.places if place not in promise.lost]
            promise.places += [(load.pilot, load.devices) for load in loads]
            promise.free_at, promise.lost, promise.loading = free_at, [], set()
            plan += loads
        return plan

    def _load_for_unserved_jobs(self, view: View, cold: ColdDevices) -> list[Action]:
        for key, state in self.states.pools.items():
            if state.starvation_rank[1] not in state.job_queue.jobs:
                job = self._first_unserved.get(key)
                too_few = job is not None and self._count_alive(view, state, most=job.least) < job.least
                state.starvation_rank = (view.now, job.id) if job is not None and too_few else (math.inf, 0)
        plan: list[Action] = []
        for lacks, id, key in sorted(
            (self.states.pools[key].starvation_rank, job.id, key) for key, job in self._first_unserved.items()
        ):
            state = self.states.pools[key]
            job = state.job_queue.jobs.get(id)
            if job is None:  # the job has started or ended since it was planned
                continue
            wants, alive = self._wanted_replicas(view, state, job), self._count_alive(view, state, most=job.least)
            found = cold.assign_devices(key, wants)
            found += self._take_shared_devices(view, state, wants - len(found), cold)
            plan += self._make_loads(state.context, found)
            if state.lacks_devices or len(found) < wants:
                plan += self._evict_idle_libraries(view, state)
            if state.lacks_devices and self.early:
                plan += self._unload_idle_for_late_job(view, state, job, cold)
            if lacks[1] and alive + len(found) < job.least:
                break
        return plan

    def _wanted_replicas(self, view: View, state: PoolState, job: PoolJob) -> int:
        context, line = state.context, state.job_queue
        failed = where_to_load.has_failed_loads(context)
        if not failed and (line.late_keys or line.has_hopeful_jobs):
            return max(0, job.least - self._count_alive(view, state, most=job.least))
        alive = [
            library
            for library in context.libraries.values()
            if is_ready_or_loading(view, library, cut_s=self.default.cut_s)
        ]
        return where_to_load.probe_load_count(alive) if failed else self.default.worth_loading(context, alive)

    def _count_alive(self, view: View, state: PoolState, *, most: int) -> int:
        alive = (
            library
            for library in state.context.libraries.values()
            if is_ready_or_loading(view, library, cut_s=self.default.cut_s)
            and (library.pilot.state is PilotState.HERE or self.states.may_reconnect(library.pilot, view.now))
        )
        return sum(1 for _ in islice(alive, most))

    def _take_shared_devices(self, view: View, state: PoolState, count: int, cold: ColdDevices) -> list[Replica]:
        if count <= 0 or view.now - state.starvation_rank[0] < self.default.patience_s:
            return []
        places = self.default.open_places(view, state.context, ignores_failed_loads=True)
        found = list(islice((devices for devices in places if cold.gone.isdisjoint(devices)), count))
        cold.gone.update(*found)
        return found

    def _evict_idle_libraries(self, view: View, state: PoolState) -> list[Action]:
        context, lacks_since = state.context, state.starvation_rank[0]
        others = any(self.states.pool_of(other) is None and other.idle for other in view.contexts.values())
        if not others and view.now - lacks_since < self.default.patience_s:
            return []
        choose_stops = partial(self._libraries_to_unload, view, context)
        chosen = libraries_to_stop_on_one_pilot(view, context, choose_stops, ignores_failed_loads=True)
        return [seams.Unload(library.id, f"idle, and room is needed for {context.recipe.name}") for library in chosen]

    def _libraries_to_unload(self, view: View, context: Context, device: Device) -> StopChoice | None:
        """Return the libraries to unload from a device, after the time of its last use; None if one must stay."""
        if not self._has_memory(context, device):
            return None
        there = [x for x in device.libraries.values() if makes_device_warm(x) and x.state is not LibraryState.STOPPING]
        if not all(is_idle(library) and self.may_stop_for(view, library, context) for library in there):
            return None
        return (max((library.used_at for library in there), default=-math.inf),), there

    def _forecast_or_drop(self, view: View, state: PoolState, fate: PlannedJob) -> list[Action]:
        job = fate.job
        if not fate.has_devices_in_time and job.deadline_at:
            begins_at = view.now if state.context.libraries else view.now + state.load_s
            call = view.calls.get(CallId(job.id)) if job.will_miss_deadline(begins_at) else None
            if call is not None and call.group.options.objective.drop_late:
                return [seams.Drop(call.id, explain_drop(view, fate))]
        return [] if job.id in state.default_calls else make_forecast(view, job.id, fate.ends_at, job.deadline_at)

    def _unload_unused_replicas(self, view: View) -> list[Action]:
        plan: list[Action] = []
        self._reclaim_at = math.inf
        for state in self.states.pools.values():
            free = {library.id: library for library in state.idle_replicas()}
            since = state.idle_since = {id: state.idle_since.get(id, view.now) for id in free}
            if not self.reuse:
                used = [id for id, library in free.items() if library.served]
                plan += [seams.Unload(id, "it has served a call") for id in used]
                since = {id: at for id, at in since.items() if id not in used}
            if state.job_queue:  # keep idle replicas, because the waiting jobs need them and more
                continue
            for id, at in since.items():
                if at + self.window_s <= view.now:
                    plan.append(seams.Unload(id, f"it has not been used for {self.window_s:g} s"))
                else:
                    self._reclaim_at = min(self._reclaim_at, at + self.window_s)
        return plan

    def _unload_idle_for_late_job(self, view: View, state: PoolState, job: PoolJob, cold: ColdDevices) -> list[Action]:
        context = state.context
        wants = job.fewest_replicas(begins_at=view.now + state.load_s, most=len(job.run_s))
        freed = 0  # devices that will soon be empty, because all their libraries stop
        for device in view.devices():
            there = [library for library in device.libraries.values() if makes_device_warm(library)]
            freed += bool(there) and all(library.state is LibraryState.STOPPING for library in there)
        wants -= cold.count_loadable(context.recipe.key, most=wants) + freed // context.recipe.needs.devices
        found: list[tuple[float, LibraryId]] = []
        for other in self.states.pools.values():
            if other is not state and not other.job_queue.has_hopeful_jobs:
                since = sorted((at, id) for id, at in other.idle_since.items() if self._could_load(view, context, id))
                found += since[: max(0, len(other.idle_since) - other.reserved_count)]
        reason = f"idle, and a job of {context.recipe.name} would be late"
        return [seams.Unload(id, reason) for _, id in sorted(found)[: max(0, wants)]]

    def _could_load(self, view: View, context: Context, id: LibraryId) -> bool:
        library = view.libraries.get(id)
        return library is not None and all(
            self._has_memory(context, device)
            and where_to_load.may_load(view, context, device, ignores_failed_loads=True)
            for device in library.devices
        )

    def _has_memory(self, context: Context, device: Device) -> bool:
        is_large = self.default.minimum(context, device) <= device.facts.memory_bytes
        return where_to_load.can_use_device(context, device) and is_large

    def may_stop_for(self, view: View, library: Library, context: Context) -> bool:
        """Return True if a library may be unloaded for a context.

        Idle replicas that the jobs of their pool need stay. Other replicas may be unloaded for the default policy, or
        for a context that has lacked replicas longer than theirs.
        """
        other, asks = self.states.pool_of(library.context), self.states.pool_of(context)
        if other is None:
            return True
        if not library.held and (
            other.job_queue.has_hopeful_jobs or len(other.idle_replicas()) <= other.reserved_count
        ):
            return False
        if asks is None or not asks.is_active:
            return True
        return (
            asks.starvation_rank < other.starvation_rank
            and view.now - asks.starvation_rank[0] >= self.default.patience_s
        )
