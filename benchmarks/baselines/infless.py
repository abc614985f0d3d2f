"""INFless (Yang et al., ASPLOS 2022) for jobs on several devices: a baseline of PromptTuner (§3.2, §6.1).

Each model scales its own *instances* (libraries) with its traffic. In PromptTuner's comparison, a job may run on
several instances. The source of INFless is not public, so the rules come from PromptTuner and public summaries. For a
missing rule, we use the choice that is best for INFless. Tune `order`, `margin` and `hold` before a comparison.

1. *Count*: a job gets the fewest instances that are predicted to meet its deadline, with predictions longer by
`margin`. Missing instances are launched at once; meanwhile the job reserves idle instances.

2. A job never waits for busy instances, and uses no instance of another model.

3. Without enough instances and free devices, the job waits, sorted by `order`. Jobs that fit may start earlier. With
`hold` the job keeps partial allocations (§3.2). Against deadlocks, the job starts with fewer instances after its
deadline has become impossible.

4. A job that cannot meet its deadline runs on its minimum number of instances.

5. *Traffic*: R arrivals per second (over `WINDOW_S`) of T instance-seconds each require R x T instances.

6. *Keep-alive* (INFless' LSTH): the quantile `TAIL` of the times between arrivals. `GAMMA` (0.5 in the paper) mixes the
quantiles of a long and a short period. With too few arrivals: `MOST_S`. The paper starts instances before the next
request; we do not, because a launch takes longer here.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from benchmarks.baselines import replicas
from benchmarks.baselines.replicas import ByOrder, InRounds, Place
from stoker.manager.core.nouns import Call, Context, Device, Library, LibraryState
from stoker.manager.core.seams import Action, Changes, Drop, Forecast, Policies, Provisioning, Unload, View

_ENOUGH = 8
_RECENT = 20
_LOOK_AGAIN_S = 1.0
"""Seconds between rounds while calls wait, because deadlines become impossible and traffic decreases with time."""
WINDOW_S, LONG_S, SHORT_S, LEAST_S, MOST_S = 60.0, 3600.0, 300.0, 10.0, 60.0
"""Seconds: the periods of rules 5 and 6, then the minimum and maximum keep-alive time."""
GAMMA, TAIL = 0.5, 0.99


class Traffic:
    """Arrivals of a model in the last `LONG_S`, and mean instance-seconds of its jobs."""

    def __init__(self) -> None:
        self._arrivals = deque[float]()
        self._instance_s, self._jobs = 0.0, 0

    def add_arrival(self, at: float) -> None:
        self._arrivals.append(at)
        while self._arrivals[0] < at - LONG_S:
            self._arrivals.popleft()

    def set_instance_s(self, instance_s: float) -> None:
        self._jobs += 1
        self._instance_s += (instance_s - self._instance_s) / min(self._jobs, _RECENT)

    def wanted_instances(self, now: float) -> int:
        count = sum(at > now - WINDOW_S for at in self._arrivals)
        return math.ceil(count / WINDOW_S * self._instance_s) if count > 1 else 0

    def keep_s(self, now: float) -> float:
        long_s, short_s = (self._gap_s(now, over_s=seconds) for seconds in (LONG_S, SHORT_S))
        if long_s is None:
            return MOST_S
        seconds = GAMMA * long_s + (1 - GAMMA) * (long_s if short_s is None else short_s)
        return min(MOST_S, max(LEAST_S, seconds))

    def _gap_s(self, now: float, *, over_s: float) -> float | None:
        gaps = sorted(later - at for at, later in pairwise(at for at in self._arrivals if at > now - over_s))
        return gaps[min(len(gaps) - 1, int(TAIL * len(gaps)))] if len(gaps) >= _ENOUGH else None


@dataclass
class _Stock:
    idle: list[Library]
    coming: list[Library]
    free: list[tuple[Device, ...]]

    @property
    def count(self) -> int:
        return len(self.idle) + len(self.coming) + len(self.free)


class Infless(InRounds):
    def __init__(
        self, residency: ByOrder, *, order: Literal["arrival", "deadline"] = "arrival", margin: float = 0.1,
        hold: bool = False, period_s: float = 0.05,
    ) -> None:  # fmt: skip
        self.period_s = period_s
        self.residency, self.order, self.margin, self.hold = residency, order, margin, hold
        self._crews: dict[int, list[Place]] = {}
        """Devices reserved by jobs that wait for launches."""
        self._wanted: dict[int, int] = {}
        """With `hold`, the total instances for which each job waits."""
        self._traffic = defaultdict[str, Traffic](Traffic)
        self._seen: set[int] = set()
        self._taken: set[Device] = set()
        self._again = 0.0

    def on_round(self, view: View, changes: Changes) -> Sequence[Action]:
        if not (changes.calls or changes.libraries or changes.pilots or view.now >= self._again):
            return ()
        self._again = view.now + _LOOK_AGAIN_S if view.waiting_contexts else math.inf
        self._taken.clear()
        self._arrivals(view, changes)
        self._check_crews(view)
        plan: list[Action] = []
        for context in view.waiting_contexts.values():
            plan += self._serve(view, context)
        for context in view.contexts.values():
            if context.libraries or context.recipe.key in self._traffic:
                plan += self._scale(view, context)
        return plan

    def _arrivals(self, view: View, changes: Changes) -> None:
        for id in sorted(changes.calls - self._seen):
            if (call := view.calls.get(id)) is not None:
                self._seen.add(id)
                self._traffic[call.group.context.recipe.key].add_arrival(view.now)
        self._seen &= view.calls.keys()

    def _check_crews(self, view: View) -> None:
        here: dict[int, Context] = {
            x.id: context for context in view.waiting_contexts.values() for x in context.queue if x.id in self._crews
        }
        for id, places in list(self._crews.items()):
            context = here.get(id)
            if context is None or any(replicas.library_at(view, context, place) is None for place in places):
                del self._crews[id]
        self._wanted = {id: count for id, count in self._wanted.items() if id in self._crews}

    def _kept(self) -> set[Place]:
        return {place for places in self._crews.values() for place in places}

    def _serve(self, view: View, context: Context) -> list[Action]:
        kept, plan = self._kept(), list[Action]()
        alive = [x for x in context.libraries.values() if x.is_usable and replicas.place_of(x.devices) not in kept]
        stock = _Stock(
            sorted((x for x in alive if replicas.is_free(x)), key=lambda x: (-x.used_at, x.id)),
            [x for x in alive if x.state is LibraryState.LOADING],
            [devices for devices in self.residency.places(view, context) if not self._taken & set(devices)],
        )
        jobs: list[Call] = list(context.queue)
        if self.order == "deadline":
            jobs.sort(key=lambda call: call.group.options.objective.deadline_at or math.inf)
        for call in jobs:
            if call.id in self._crews:
                plan += self._complete(view, call, stock)
                plan += self._start(view, call)
            elif stock.count:
                plan += self._assign_instances(view, call, stock)
        return plan

    def _start(self, view: View, call: Call) -> list[Action]:
        context, places = call.group.context, self._crews[call.id]
        there = (replicas.library_at(view, context, place) for place in places)
        crew = [library for library in there if library is not None and replicas.is_free(library)]
        if len(crew) < max(len(places), self._wanted.get(call.id, 0)):
            return []
        del self._crews[call.id]
        self._taken.update(device for library in crew for device in library.devices)
        return [replicas.send(call, crew)]

    def _complete(self, view: View, call: Call, stock: _Stock) -> list[Action]:
        places, wanted = self._crews[call.id], self._wanted.get(call.id, 0)
        if len(places) >= wanted:
            return []
        due, lasts = call.group.options.objective.deadline_at, self._lasts_s(view, call)
        if due and view.now + lasts[wanted] > due and len(places) >= min(lasts):
            del self._wanted[call.id]
            return []
        members, orders = self._take_devices(call.group.context, stock, wanted - len(places))
        places += [replicas.place_of(devices) for devices in members]
        return orders

    def _take_devices(
        self, context: Context, stock: _Stock, count: int
    ) -> tuple[list[tuple[Device, ...]], list[Action]]:
        crew = [stock.idle.pop(0) for _ in range(min(count, len(stock.idle)))]
        crew += [stock.coming.pop(0) for _ in range(min(count - len(crew), len(stock.coming)))]
        fresh = [stock.free.pop(0) for _ in range(min(count - len(crew), len(stock.free)))]
        members = [*(library.devices for library in crew), *fresh]
        self._taken.update(device for devices in members for device in devices)
        return members, [replicas.load(context, devices) for devices in fresh]

    def _assign_instances(self, view: View, call: Call, stock: _Stock) -> list[Action]:
        context, objective = call.group.context, call.group.options.objective
        lasts = self._lasts_s(view, call)
        count = self._count(view, call, lasts, stock, most=max(lasts) if self.hold else stock.count)
        in_time = count > 0
        if not in_time:
            hopeful = bool(objective.deadline_at) and view.now + min(lasts.values()) <= objective.deadline_at
            if hopeful and max(lasts) > stock.count and not self.hold:
                return []  # Wait, because the job could meet its deadline with more instances.
            if objective.deadline_at and objective.drop_late:
                return [Drop(call.id, "it would be late on as many devices as it may have")]
            count = min(lasts)
            if count > stock.count:
                return []
        idle = stock.idle[:count]
        members, orders = self._take_devices(context, stock, count)
        if lasts[count] > 0:
            self._traffic[context.recipe.key].set_instance_s(count * lasts[count])
        at_once = len(idle) == count
        plan: list[Action] = []
        if objective.deadline_at:
            ends_at = view.now + lasts[count] + (0.0 if at_once else replicas.load_s(context))
            plan.append(Forecast(call.id, ends_at, in_time))
        if at_once:
            return [*plan, replicas.send(call, idle)]
        self._crews[call.id] = [replicas.place_of(devices) for devices in members]
        if len(members) < count:
            self._wanted[call.id] = count
        return [*plan, *orders]

    def _count(self, view: View, call: Call, lasts: dict[int, float], stock: _Stock, *, most: int) -> int:
        due = call.group.options.objective.deadline_at
        for count, seconds in lasts.items():
            if count > most:
                break
            launch_s = replicas.load_s(call.group.context) if count > len(stock.idle) else 0.0
            if not due or view.now + launch_s + seconds <= due:
                return count
        return 0

    def _lasts_s(self, view: View, call: Call) -> dict[int, float]:
        times, left = replicas.item_times_s(call), replicas.share_left(view, call)
        if times is None:
            return {max(1, call.group.options.gang[0]): call.group.cost.run_s}
        return {
            size: (1 + self.margin) * (left * seconds + replicas.starts_in_s(call, size=size))
            for size, seconds in times.items()
        }

    def _scale(self, view: View, context: Context) -> list[Action]:
        wants = self._traffic[context.recipe.key].wanted_instances(view.now)
        if wants:
            self._again = min(self._again, view.now + _LOOK_AGAIN_S)
        alive = {replicas.place_of(x.devices): x for x in context.libraries.values() if x.is_usable}
        kept, plan = self._kept(), list[Action]()
        crews = [places for id, places in self._crews.items() if view.calls[id].group.context is context]
        lacks = wants - len(alive) - sum(place not in alive for places in crews for place in places)
        for devices in self.residency.places(view, context) if lacks > 0 and not context.load_failures else ():
            if lacks > 0 and not self._taken & set(devices):
                self._taken.update(devices)
                lacks -= 1
                plan.append(replicas.load(context, devices))
        spare, keep_s = len(alive) - wants, self._traffic[context.recipe.key].keep_s(view.now)
        for place, library in sorted(alive.items(), key=lambda entry: (entry[1].used_at, entry[1].id)):
            if place in kept or not replicas.is_free(library) or self._taken & set(library.devices) or spare <= 0:
                continue
            if library.used_at + keep_s <= view.now:
                spare -= 1
                plan.append(Unload(library.id, f"idle for {view.now - library.used_at:.0f} s"))
            else:
                self._again = min(self._again, library.used_at + keep_s)
        return plan


def infless(*, provisioning: Provisioning | None = None, **settings: Any) -> Policies:
    return replicas.policies_by_order(lambda residency: Infless(residency, **settings), provisioning)
