"""ElasticFlow (Gu et al., ASPLOS 2023) on a fixed cluster: PromptTuner's second baseline (§3.1, §6.1).

`elastic_flow_plan` computes the devices of each job. A job with a deadline is admitted or rejected on arrival. Rejected
jobs get the remaining devices; with `drop_late` they are dropped. ElasticFlow refuses late jobs, and PromptTuner counts
them as late. A new plan is made when jobs arrive or end and when planned sizes change, at most once in `slot_s`. A
running job whose size changes is evicted and resumes from its checkpoint. The job must report progress and allow
several libraries. Each start loads the context on each device (§6.1). A plan counts all items of a job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.baselines import replicas
from benchmarks.baselines.elastic_flow_plan import Job, Share, admits, by_two, elastic_sizes, minimum_shares
from benchmarks.baselines.replicas import ByOrder, InRounds, Place
from stoker.manager.core.nouns import Call, CallState, Device, Gang, Library
from stoker.manager.core.seams import Action, Changes, Drop, Evict, Forecast, Policies, Provisioning, Unload, View


class ElasticFlow(InRounds):
    def __init__(self, residency: ByOrder, *, slot_s: float = 1.0, period_s: float = 0.05) -> None:
        self.residency, self.slot_s, self.period_s = residency, slot_s, period_s
        self._admitted: dict[int, bool] = {}
        self._sizes: dict[int, int] = {}
        self._places: dict[int, list[Place]] = {}
        self._sent: set[int] = set()
        self._evicted: set[int] = set()
        """Evicted calls that have not stopped yet."""
        self._stale, self._planned_at, self._again = True, -math.inf, 0.0

    def on_round(self, view: View, changes: Changes) -> Sequence[Action]:
        if changes.calls or changes.pilots or view.now >= self._again:
            self._stale = True
        elif not changes.libraries:
            return ()
        self._forget(view)
        plan: list[Action] = []
        if self._stale and view.now >= self._planned_at + self.slot_s:
            plan += self._plan(view)
        elif self._stale:
            self._again = min(self._again, self._planned_at + self.slot_s)
        return [*plan, *self._evict(view), *self._clear(view), *self._begin(view)]

    def _forget(self, view: View) -> None:
        for memory in (self._admitted, self._sizes, self._places):
            for id in [id for id in memory if id not in view.calls]:
                del memory[id]
        for id in list(self._sent):
            call = view.calls.get(id)
            if call is None or call.state is CallState.WAITING:
                self._sent.discard(id)
                self._evicted.discard(id)
                self._places.pop(id, None)

    def _plan(self, view: View) -> list[Action]:
        self._stale, self._planned_at = False, view.now
        devices = sum(1 for _ in view.devices())
        calls = sorted(view.calls.values(), key=lambda call: (call.submitted_at, call.id))
        jobs: dict[int, Job] = {call.id: self._job(view, call) for call in calls}
        said = [action for call in calls if call.id not in self._admitted for action in self._admit(view, call, jobs)]
        hopes = [job for id, job in jobs.items() if self._admitted[id] or job.fixed]
        shares = minimum_shares(hopes, devices, now=view.now)
        sizes = elastic_sizes(list(jobs.values()), shares, devices, now=view.now)
        units: dict[int, int] = {call.id: call.group.context.recipe.needs.devices for call in calls}
        self._sizes = {id: size // units[id] for id, size in sizes.items()}
        borders = [at for share in shares.values() for start, end, _ in share.pieces for at in (start, end)]
        self._again = min((at for at in borders if at > view.now), default=math.inf)
        promised = [(id, share) for id, share in shares.items() if self._admitted[id]]
        return [*said, *(self._forecast(view, id, share) for id, share in promised)]

    def _admit(self, view: View, call: Call, jobs: dict[int, Job]) -> list[Action]:
        objective, job = call.group.options.objective, jobs[call.id]
        others = [jobs[id] for id, admitted in self._admitted.items() if admitted and id in jobs]
        devices = sum(1 for _ in view.devices())
        self._admitted[call.id] = admitted = job.deadline_at > 0 and admits(job, others, devices, now=view.now)
        if admitted or not objective.deadline_at or not job.deadline_at:
            return []
        if objective.drop_late:
            return [Drop(call.id, "its deadline cannot be met with the jobs admitted before")]
        soonest_s = min(job.lasts_s(size) for size, _ in job.run_s)
        return [Forecast(call.id, view.now + soonest_s, in_time=False)]

    def _forecast(self, view: View, id: int, share: Share) -> Forecast:
        due = view.calls[id].group.options.objective.deadline_at
        return Forecast(view.calls[id].id, share.ends_at, share.ends_at <= due)

    def _job(self, view: View, call: Call) -> Job:
        context, options = call.group.context, call.group.options
        unit, smallest = context.recipe.needs.devices, max(1, options.gang[0])
        times, left = replicas.item_times_s(call), replicas.share_left(view, call)
        known = {smallest: call.group.cost.run_s or replicas.UNKNOWN_RUN_S} if times is None else times
        due = options.objective.deadline_at if times is not None else 0.0
        runs = call.holder is not None and call.id not in self._evicted
        has = _size(call) if runs else 0
        fixed = runs and not self._can_change(call)
        run_s = [  # `lag_s` contains the remaining start time of a continuing job.
            (size, left * seconds + (0.0 if runs and size == has else replicas.starts_in_s(call, size=size)))
            for size, seconds in known.items()
        ]
        steps = by_two(run_s, smallest=smallest, unit=unit)
        if fixed:
            steps = ((has * unit, left * known.get(has, replicas.UNKNOWN_RUN_S)),)
        if runs:
            lag_s = max(0.0, call.sent_at + replicas.starts_in_s(call, size=has) - view.now)
        else:
            places = self._places.get(call.id, []) if call.id not in self._evicted else []
            has = len(places)
            started = [x.started_at for place in places if (x := replicas.library_at(view, context, place)) is not None]
            lag_s = max(0.0, max(started, default=0.0) + replicas.load_s(context) - view.now)
        return Job(call.id, due, steps, has * unit, replicas.load_s(context), lag_s, fixed)

    def _evict(self, view: View) -> list[Action]:
        plan: list[Action] = []
        for id, wants in self._sizes.items():
            call = view.calls[id]
            if call.state is CallState.WAITING:
                places = self._places.get(id, [])
                self._places[id] = [
                    p for p in places[:wants] if replicas.library_at(view, call.group.context, p) is not None
                ]
            elif id not in self._evicted and self._can_change(call) and _size(call) != wants:
                self._evicted.add(id)
                plan.append(Evict(call.id))
        return plan

    def _can_change(self, call: Call) -> bool:
        return isinstance(call.holder, Gang) and call.group.options.gang[1] > 1

    def _clear(self, view: View) -> list[Action]:
        kept = {place for places in self._places.values() for place in places}
        return [
            Unload(library.id, "its job has ended or goes on with another size, and nothing is kept")
            for library in view.libraries.values()
            if library.is_usable and not library.held and replicas.place_of(library.devices) not in kept
        ]

    def _begin(self, view: View) -> list[Action]:
        plan: list[Action] = []
        taken: set[Device] = set()
        line = [
            call for id, size in self._sizes.items()
            if size and (call := view.calls[id]).state is CallState.WAITING
        ]  # fmt: skip
        due_at = {call.id: call.group.options.objective.deadline_at or math.inf for call in line}
        line.sort(
            key=lambda call: (-call.group.context.recipe.needs.devices, due_at[call.id], call.submitted_at, call.id)
        )
        for call in line:
            context, places, wants = call.group.context, self._places[call.id], self._sizes[call.id]
            lacks = wants - len(places)
            if lacks > 0:
                free = [d for d in self.residency.places(view, context) if not taken & set(d)][:lacks]
                if len(free) < lacks:
                    continue
                taken.update(device for devices in free for device in devices)
                places += [replicas.place_of(devices) for devices in free]
                plan += [replicas.load(context, devices) for devices in free]
                continue
            crew = [replicas.library_at(view, context, place) for place in places]
            members: list[Library] = [x for x in crew if x is not None and replicas.is_free(x)]
            if len(members) == wants:
                self._sent.add(call.id)
                plan.append(replicas.send(call, members))
        return plan


def _size(call: Call) -> int:
    return len(call.holder.members) if isinstance(call.holder, Gang) else 1


def elastic_flow(*, provisioning: Provisioning | None = None, **settings: Any) -> Policies:
    return replicas.policies_by_order(lambda residency: ElasticFlow(residency, **settings), provisioning)
