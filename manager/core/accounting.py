"""What calls have cost: counted when they end, and handed to the performance history."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.manager.core import ending, queues
from stoker.manager.core.commands import RecordRuns
from stoker.manager.core.cost import Cost
from stoker.manager.core.events import ContextAdvice
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Group, Library
from stoker.protocol.calls import CallEnd

# A mean run time follows the last runs with at least this weight.
_NEW_WEIGHT = 0.2
_CHANGED = 1.5


def account(
    manager: Manager, library: Library, group: Group, good: list[CallEnd], *, others: int, seconds: float
) -> int:
    """Count runs of a group and deliver the ends in `good`. `others`: runs whose ends the caller delivers. Returns the
    number of runs."""
    count = len(good) + others
    if good:
        ending.closed(manager, group, len(good))
        manager.results_of(group.client).extend(good)
    if not count:
        return 0
    context, cost, mean = library.context, group.cost, seconds / count
    cost.runs += count
    weight = count / cost.runs
    cost.run_s += (mean - cost.run_s) * (weight if weight > _NEW_WEIGHT else _NEW_WEIGHT)
    if library.context.queue.is_by_run_time:
        reorder(context, cost)
    if mean < cost.least_s:
        cost.least_s = mean
    context.runs += count
    weight = count / context.runs
    context.run_s += (mean - context.run_s) * (weight if weight > _NEW_WEIGHT else _NEW_WEIGHT)
    context.run_total_s += seconds
    kind = cost.by_kind.setdefault(library.devices[0].facts.kind, [0.0, 0.0, 0.0])
    kind[0] += count
    kind[1] += seconds
    kind[2] += count * max(1, group.options.batch)
    manager.state.unrecorded[cost] = None
    return count


def record_runs(manager: Manager) -> None:
    """Have remembered what calls have cost since this was done last."""
    manager.state.recorded_at = manager.state.now
    unrecorded, manager.state.unrecorded = manager.state.unrecorded, {}
    for cost in unrecorded:
        for kind, (count, seconds, items) in cost.by_kind.items():
            manager.out.append(
                RecordRuns(cost.recipe, cost.function.measured_as, kind, int(count), seconds, int(items))
            )
        cost.by_kind = {}


def advise(context: Context, by_kind: Mapping[str, ContextAdvice]) -> None:
    """Take advice on the times of runs where nothing was measured yet."""
    for advice in by_kind.values():
        if not context.run_s:
            context.run_s = advice.run_s
    sizes = {size for advice in by_kind.values() for size in advice.paces} - set(context.paces.measured)
    if sizes:  # of several kinds the slowest counts: nobody knows where a call will run
        slowest = {size: max(advice.paces.get(size, 0.0) for advice in by_kind.values()) for size in sorted(sizes)}
        meet_s = max(advice.meet_s for advice in by_kind.values()) or context.paces.meet_s
        context.paces.tell(slowest, meet_s=meet_s)


def advise_runs(manager: Manager, context: Context, cost: Cost, by_kind: Mapping[str, ContextAdvice]) -> bool:
    """Take advice on what calls of a function take, where none has run yet: the slowest of the kinds of device that are
    here; the fastest of all where none of these is. True if something is expected now."""
    known = {kind: advice.run_s for kind, advice in by_kind.items() if advice.run_s}
    if cost.runs or not known:
        return False
    wanted = context.recipe.needs.kinds
    here = {device.facts.kind for device in manager.state.devices()}
    meant = [run_s for kind, run_s in known.items() if kind in here and (not wanted or kind in wanted)]
    cost.run_s = max(meant) if meant else min(known.values())
    reorder(context, cost)
    return True


def reorder(context: Context, cost: Cost) -> None:
    """Put a queue into order again if what calls of a function are expected to take is known now, or has changed by
    half."""
    if not cost.ordered_s or not 1 / _CHANGED < cost.run_s / cost.ordered_s < _CHANGED:
        cost.ordered_s = cost.run_s
        queues.reorder(context)


def learn_pace(context: Context, size: int, *, work: float, seconds: float) -> None:
    """So much work has taken a gang of this size so long."""
    context.paces.learn(size, work=work, seconds=seconds)


def did_items(call: Call, done: float) -> None:
    """A gang's call has ended well after `done` of its items."""
    call.group.context.paces.end(call.spec.features, done)
