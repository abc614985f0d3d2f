"""Place runtimes on devices: Arlo's Runtime Scheduler (§3.3, §4).

Every `period_s` (120 s, §5) `allocation` assigns the devices of a family to its runtimes, by the lengths of recent
calls. A free device gets a missing runtime, or the longest runtime (§4). Surplus libraries are replaced one by one,
least busy first, while at most a tenth of the devices is out of service. A device runs one runtime of a family, because
co-located runtimes interfere (§3.3).

A family is *new* during its first period. At the first call, its devices are assigned as if all lengths were equally
likely and all devices busy. The devices are assigned again when a call adds a runtime, after 1 s, and then at intervals
that double up to 10 s. Arrived calls count once, and waiting calls twice. The number of replacements is not limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from stoker.manager.core.libraries import has_too_many_failed_loads
from stoker.manager.core.nouns import Context, Device, Library
from stoker.manager.core.seams import Action, Changes, FailWaiting, Provisioning, Unload, View
from stoker.manager.policies.arlo.allocation import (
    ArrivalCounts,
    NotEnoughDevicesError,
    RuntimeDemand,
    RuntimeTimes,
    allocate,
    family_runtimes_shortest_first,
    is_runtime_variant,
    uniform_length_call_shares,
)
from stoker.manager.policies.residency import LoadWhereWanted
from stoker.manager.policies.where_to_load import has_failed_loads, make_load, probe_load_count, required_bytes_if_known
from stoker.protocol.ids import RecipeKey

_STEP_S = 1.0
_FIRST_PERIOD_S = 1.0
_NEW_SHARE = 1 / 12  # Maximum time between two plans of a new family, as a share of the period (10 s of 120 s)
_ASSUMED_CALLS = 8  # Assumed calls, spread evenly over all lengths, that are added to the first arrivals of a family


class RuntimePlan(msgspec.Struct, frozen=True):
    """Planned number of libraries by recipe key. `new_until`: time at which the first period of the family ends."""

    wanted: dict[str, int]
    devices: int
    made_at: float
    due_at: float
    new_until: float


class AllocateRuntimes(LoadWhereWanted):
    """Arlo's residency policy. `out_of_service`: maximum share of a family's devices that change runtimes at a time."""

    period_s = _STEP_S
    lets_sleep = False
    honours = frozenset()  # Limits of programs are ignored: the allocation sets each runtime's number of libraries

    def __init__(
        self, times: RuntimeTimes, arrivals: ArrivalCounts, *, period_s: float, out_of_service: float,
        provisioning: Provisioning,
    ) -> None:  # fmt: skip
        super().__init__(provisioning=provisioning)
        self._times = times
        self._arrivals = arrivals
        self._plan_every_s = period_s
        self._out_of_service_share = out_of_service
        self._plans: dict[str, RuntimePlan] = {}

    def on_waiting_calls(self, view: View, context: Context) -> Sequence[Action]:
        if not is_runtime_variant(context):
            return super().on_waiting_calls(view, context)
        family = family_runtimes_shortest_first(context)
        longest = family[-1]
        servers = context, *context.variants.values()
        steps = tuple(self._plan_loads_and_replacements(view, family))
        if steps or any(each.usable_libraries for each in servers):
            return steps
        if all(map(has_too_many_failed_loads, servers)) and context.last_failure is not None:
            return (FailWaiting(RecipeKey(context.recipe.key), context.last_failure),)
        nowhere = self.why_nowhere(view, longest)
        if nowhere is not None:
            return (FailWaiting(RecipeKey(context.recipe.key), nowhere),)
        return self.make_room(view, longest)

    def minimum(self, context: Context, device: Device) -> int:
        is_known = required_bytes_if_known(context, device.facts)
        largest = 0 if is_known else self._largest_runtime_bytes(context, device)
        return largest or super().minimum(context, device)

    def reservation(self, context: Context, devices: tuple[Device, ...]) -> int:
        is_known = any(required_bytes_if_known(context, device.facts) for device in devices)
        largest = 0 if is_known else max(self._largest_runtime_bytes(context, device) for device in devices)
        return largest or super().reservation(context, devices)

    def _largest_runtime_bytes(self, context: Context, device: Device) -> int:
        family = family_runtimes_shortest_first(context) if is_runtime_variant(context) else ()
        return max((required_bytes_if_known(each, device.facts) for each in family), default=0)

    def on_round(self, view: View, changes: Changes) -> Iterable[Action]:  # noqa: ARG002
        for family in _families(view):
            yield from self._plan_loads_and_replacements(view, family)

    def may_skip_rounds(self, view: View) -> bool:
        for family in _families(view):
            plan = self._plans.get(family[-1].recipe.key)
            if plan is None or self._arrivals.has_arrivals_since(family, plan.made_at):
                return False
            for context in family:
                if context.queue.count or len(context.usable_libraries) != plan.wanted.get(context.recipe.key, 0):
                    return False
        return True

    def _current_plan(self, view: View, family: Sequence[Context], devices: int) -> RuntimePlan | None:
        key = family[-1].recipe.key
        plan = self._plans.get(key)
        if plan is not None and not self._is_plan_outdated(view, family, plan, devices):
            return plan
        if not devices or not self._arrivals.has_arrivals_since(family, -1.0):
            return None
        able = [context for context in family if not has_too_many_failed_loads(context)]
        if not able:
            return None
        since, new_until = (plan.made_at, plan.new_until) if plan else (view.now, view.now + self._plan_every_s)
        is_new = view.now < new_until
        most_s = self._plan_every_s * (_NEW_SHARE if is_new else 1.0)
        next_s = min(most_s, max(_FIRST_PERIOD_S, 2 * (view.now - since)))
        demands = self._runtime_demands(able, family, view.now, devices=devices, is_new=is_new)
        counts = zip(able, _allocate_scaled_requests(devices, demands), strict=True)
        wanted = {context.recipe.key: 0 for context in family} | {each.recipe.key: count for each, count in counts}
        self._plans[key] = RuntimePlan(wanted, devices, view.now, view.now + next_s, new_until)
        return self._plans[key]

    def _runtime_demands(
        self, able: Sequence[Context], family: Sequence[Context], now: float, *, devices: int, is_new: bool
    ) -> list[RuntimeDemand]:  # fmt: skip
        calls = {context: float(self._count_calls(context, family, now, waiting=is_new)) for context in able}
        seconds = self._arrivals.observed_s(family, now)
        per_s = 1 / max(seconds, self._times.objective_s(family[-1]))
        if is_new:
            for context, share in zip(able, uniform_length_call_shares(able), strict=True):
                calls[context] += _ASSUMED_CALLS * share
        if seconds < _FIRST_PERIOD_S:
            # The call rate is not known yet. Assume full load, because all allocations seem equally good at a low rate.
            per_s = max(per_s, devices / sum(count * self._times.request_s(each) for each, count in calls.items()))
        return [self._times.make_demand(context, count * per_s) for context, count in calls.items()]

    def _is_plan_outdated(self, view: View, family: Sequence[Context], plan: RuntimePlan, devices: int) -> bool:
        """Return True if the plan is old, or runtimes or devices changed. New devices get the longest runtime (§4)."""
        vain = any(has_too_many_failed_loads(context) and plan.wanted.get(context.recipe.key, 0) for context in family)
        grown = devices > plan.devices or any(context.recipe.key not in plan.wanted for context in family)
        if vain or 0 < devices < plan.devices or (grown and view.now < plan.new_until):
            return True
        return view.now >= plan.due_at and self._arrivals.has_arrivals_since(family, plan.made_at)

    def _count_calls(self, context: Context, family: Sequence[Context], now: float, *, waiting: bool) -> int:
        """Count recent calls of a runtime, and of the shorter runtimes that cannot be loaded.

        `waiting`: also count waiting calls."""
        count, at = 0, family.index(context)
        for each in reversed(family[: at + 1]):
            if each is not context and not has_too_many_failed_loads(each):
                break
            count += self._arrivals.count_recent(each, now) + (each.queue.count if waiting else 0)
        return count

    def _plan_loads_and_replacements(self, view: View, family: Sequence[Context]) -> Iterator[Action]:
        longest, mine = family[-1], {context.recipe.key for context in family}
        held = [d for d in view.devices() if any(x.context.recipe.key in mine for x in d.libraries.values())]
        free = [d for d in view.devices() if d not in held and self.fits(longest, d)]
        plan = self._current_plan(view, family, len(held) + len(free))
        if plan is None:
            return
        missing = _list_missing_runtimes(view, family, plan)
        for device in free:
            loads = (each for each in reversed(family) if each.last_failure is None)
            context = missing.pop() if missing else next(loads, None)
            if context is None:
                return
            yield make_load(context, (device,), self.reservation(context, (device,)))
        serving = {d for context in family for x in context.libraries.values() if x.is_serving for d in x.devices}
        out = sum(device not in serving for device in held) + len(free)
        share = self._out_of_service_share if view.now >= plan.new_until else 1.0
        most = max(1, int(share * (len(held) + len(free))))
        for victim in self._surplus_libraries(family, plan)[: max(0, most - out)]:
            if not missing:
                return
            load = self.replacement_load(missing[-1], [victim])
            if load:
                yield Unload(victim.id, f"{missing.pop().recipe.name} gets its device because of call lengths")
                yield from load

    def _surplus_libraries(self, family: Sequence[Context], plan: RuntimePlan) -> list[Library]:
        found: list[Library] = []
        for context in family:
            wanted = max(plan.wanted.get(context.recipe.key, 0), context is family[-1])
            serving = [library for library in context.libraries.values() if library.is_serving]
            serving.sort(key=lambda library: (library.load, library.id))
            found += serving[: max(0, len(context.usable_libraries) - wanted)]
        return sorted(found, key=lambda library: (library.load, library.id))


def _allocate_scaled_requests(devices: int, demands: Sequence[RuntimeDemand]) -> tuple[int, ...]:
    while True:
        try:
            return allocate(devices, demands).instances
        except NotEnoughDevicesError as error:
            share = min(0.99, (devices - 0.5) / error.needed)
            demands = [msgspec.structs.replace(each, requests=each.requests * share) for each in demands]


def _list_missing_runtimes(view: View, family: Sequence[Context], plan: RuntimePlan) -> list[Context]:
    """Return the runtime of each missing library. The last runtime, the longest, is loaded first.

    If loads of a runtime keep failing, the runtime is tried once per plan, and for each waiting call.
    """
    found: list[Context] = []
    for context in family:
        usable = context.usable_libraries
        lacks = max(0, plan.wanted.get(context.recipe.key, 0) - len(usable))
        if has_failed_loads(context):
            lacks = 0 if has_too_many_failed_loads(context) else min(lacks, probe_load_count(usable))
        elif context.last_failure is not None and not any(
            x.queue.count for x in (context, *context.variant_of.values())
        ):
            lacks = min(lacks, 1) if view.now == plan.made_at else 0
        found += [context] * lacks
    return found


def _families(view: View) -> list[tuple[Context, ...]]:
    families = map(family_runtimes_shortest_first, filter(is_runtime_variant, view.contexts.values()))
    return list({family[-1].recipe.key: family for family in families}.values())
