"""Libraries are fed: who has room, who gets what from the queue, and what happens when calls end.

The hot path. What is done here a call is done a million times, so calls are handled in batches: the ends of one frame
together, the calls that a library pulls together, and what is counted is counted a batch.

A call that may have killed its library (`kills`) runs by itself until it is known to be good or bad: a library that
holds such a suspect is given nothing else. One that may have killed its pilot has a whole pilot to itself (`suspects`).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core import calls, deadlines, gangs, repair, stuck, suspects
from stoker.manager.core.commands import DiscardObject
from stoker.manager.core.phases import CallState, LibraryState, PilotState
from stoker.manager.core.state import Call, Context, Filling, Gang, Group, Library
from stoker.manager.protocol import recent
from stoker.manager.protocol.calls import CallEnd
from stoker.manager.protocol.to_pilot import FunctionBlob

if TYPE_CHECKING:
    from stoker.manager.core.core import Core

ASK_PAUSE_S = 0.05
"""A library that falls idle is news for contexts without any; they are not asked about more often than this."""

SATED = 4
"""When so many libraries in a row take nothing of a backlog, nobody else is asked."""

_LOOKED_AT = 16
_NEW_WEIGHT = 0.2
"""A mean run time follows the last runs with at least this weight."""


def takes(core: Core, library: Library, call: Call) -> bool:
    """Whether a library may be given one more call of this kind just now."""
    group = call.group
    return (
        library.state is LibraryState.READY
        and library.pilot.state is PilotState.HERE
        and (library.context is group.context or library.context.recipe.key in group.options.variants)
        and library.load < stuck.room(core, library)
        and library.admits(call)
    )


def reclass(core: Core, library: Library) -> None:
    """Put a library into those of its context's sets that it belongs to now, as the last there."""
    context, id = library.context, library.id
    context.idle.pop(id, None)
    context.roomy.pop(id, None)
    context.backlogged.pop(id, None)
    if library.suspect is not None and library.suspect.id not in library.held:
        library.suspect = None
    pilot = library.pilot
    usable = library.state is LibraryState.READY and pilot.state is PilotState.HERE and pilot.reserved is None
    if not usable or library.suspect:
        if context.filling is not None and context.filling.library is library:
            context.filling = None
        return
    load = len(library.held) + len(library.zombies)
    if load < library.slots:
        library.stuck = False
        context.idle[id] = library
        return
    has_room = not library.stuck and load < core.policies.dispatch.window(core.state, library)
    if load > library.slots:
        context.backlogged[id] = library
    if has_room:
        context.roomy[id] = library
    if (has_room or load > library.slots) and stuck.TIMER not in core.state.timers:
        stuck.look_soon(core)


def pull(core: Core, library: Library) -> None:
    """A library has room: give it calls from its context's queue, else see whether others hold too many."""
    state, context = core.state, library.context
    dispatch, queue = core.policies.dispatch, library.context.queue
    if library.state is not LibraryState.READY or library.pilot.state is not PilotState.HERE:
        return
    reclass(core, library)
    if queue.timed:
        deadlines.settle(core, context)
    if queue.apart and library.id in context.idle:
        suspects.offer(core, library)
    while queue.count and library.suspect is None and library.pilot.reserved is None:
        answer = dispatch.pull(state, library)
        if not isinstance(answer, int):
            core.apply(answer, seam="dispatch")
            break
        head = queue.single()
        if library.stuck:
            answer = min(answer, library.slots - library.load)
        if answer <= 0 or head is None or not _give(core, library, head, answer):
            break
        reclass(core, library)
        if library.id not in context.roomy and library.id not in context.idle:
            break
    calls.fed(core, context)
    if library.held or library.zombies or queue.single() is not None:
        return
    library.used_at = state.now
    core.apply(dispatch.dry(state, library), seam="dispatch")
    for hungry in state.hungry.values():
        if hungry.starved_since is not None and state.now - hungry.asked_at >= ASK_PAUSE_S:
            core.dirty[hungry] = None


def _give(core: Core, library: Library, head: Call, count: int) -> bool:
    """Give a library up to `count` calls of the group that is next in the queue. False if it may have none of them."""
    group = head.group
    now, queue = core.state.now, library.context.queue
    if head.by_itself:
        if library.load:
            return False
        count = 1
    taken = queue.take(group, count)
    barred = [call for call in taken if call.by_itself and call is not head]
    if library.zombies:
        barred += [call for call in taken if call.id in library.zombies and call not in barred]
    for call in barred:
        taken.remove(call)
        queue.put_back(call)
    is_held = CallState.HELD
    for call in taken:
        call.state = is_held
        call.holder = library
        call.sent_at = now
    if taken:
        core.hold(library, taken)
        fills(library, len(taken), now)
    return bool(taken)


def fills(library: Library, count: int, now: float) -> None:
    """A library is given so many calls."""
    filling = library.context.filling
    if filling is not None and filling.library is library and filling.at == now:
        filling.calls += count
    else:
        library.context.filling = Filling(library, now, count)


def serve(core: Core, context: Context) -> None:
    """Calls came to the queue: give them to libraries that have room, the one that is being filled first, then the
    hottest that are free. Those that work already take their share of a backlog; when some in a row have had it, so
    have the others."""
    queue, filling = context.queue, context.filling
    if filling is not None and filling.at == core.state.now:
        pull(core, filling.library)
    for some in (_LOOKED_AT, len(context.idle)):  # nearly always the first few take it all
        for library in tuple(islice(reversed(context.idle.values()), some)) if queue.count else ():
            if not queue.count:
                return
            pull(core, library)
            if queue.single() is None:  # gangs may still wait: what the first library did for them, others would too
                return
    sated = 0
    for library in tuple(islice(context.roomy.values(), queue.count)):
        before = queue.count
        pull(core, library)
        sated = sated + 1 if queue.count == before else 0
        if not queue.count or sated >= SATED:
            return


def serve_after(core: Core, context: Context) -> None:
    """Serve a context's queue at the end of the event, where a gang that libraries were kept for may be none any more:
    it left, or too few libraries are left for it."""
    if context.queue.count and (context.idle or context.roomy):
        core.returned[context] = None


def unsend(core: Core, library: Library, *, why: str) -> None:
    """What a library was given in this very event, and was not sent yet, goes back."""
    unsent = core.sends.pop(library, None)
    if unsent:
        for call in unsent:
            del library.held[call.id]
        calls.requeue(core, unsent, why=why)


def blob_for(library: Library, group: Group) -> FunctionBlob | None:
    """The function of these calls, if the library has not been sent it."""
    function = group.function
    if function.key in library.functions:
        return None
    library.functions.add(function.key)
    return function


# ---- ends


def ended(core: Core, library: Library, ends: list[CallEnd]) -> None:
    """Calls of a library have ended."""
    held, open_calls = library.held, core.state.calls
    plain = not core.watch and not core.tracked
    first = not library.context.runs
    group: Group | None = None
    good: list[CallEnd] = []
    others, seconds, total = 0, 0.0, 0
    has_ended = CallState.ENDED
    for outcome in ends:  # the hot path
        id = outcome.call
        call = held.pop(id, None)
        if call is None or call.holder is not library:
            total += _odd_end(core, library, call, outcome)
            continue
        if call.group is not group:
            if group is not None:
                total += account(core, library, group, good, others=others, seconds=seconds)
            group, good, others, seconds = call.group, [], 0, 0.0
        seconds += outcome.run_s
        if plain and outcome.ok:
            call.state = has_ended
            call.holder = None
            del open_calls[id]
            good.append(outcome)
            continue
        others += 1
        if not outcome.ok:
            total += account(core, library, group, good, others=others, seconds=seconds)
            good, others, seconds = [], 0, 0.0
        calls.end(core, call, outcome)  # watched: what it cost is counted as for any other, or a replay would differ
    if group is not None:
        total += account(core, library, group, good, others=others, seconds=seconds)
        if first and library.context.queue.count:
            core.dirty[library.context] = None
    for kept in (core.state.reports, core.state.forecasts):
        if kept:
            for outcome in ends:
                if outcome.call not in open_calls:
                    kept.pop(outcome.call, None)
    if core.state.trials:
        for outcome in ends:
            if outcome.call not in open_calls:
                suspects.ended(core, outcome.call)
    library.stuck = False
    library.ended_at = core.state.now
    library.served += total
    library.context.served += total
    library.pilot.ended += total
    if total:
        now = core.state.now
        second = int(now)
        for counts in (core.state.rate, library.context.rate, library.pilot.rate):
            if counts and counts[-1][0] == second:  # `recent.add`, without the call
                counts[-1][1] += total
            else:
                recent.add(counts, total, now=now)
    pull(core, library)


def _odd_end(core: Core, library: Library, call: Call | None, outcome: CallEnd) -> int:
    """The end of a call that this library does not hold alone. Returns how many calls it ran for that: 0 or 1."""
    if call is not None and type(call.holder) is Gang:
        gangs.ended(core, call, library, outcome)
        return 1
    if library.zombies.pop(outcome.call, None) is None:
        core.state.refuse("late or repeated end of a call")
        return 0
    still_open = core.state.calls.get(outcome.call)
    if still_open is not None and _may_count(still_open, library):
        calls.finished_elsewhere(core, still_open, library, outcome)
        return 1
    if repair.end_orphan(core.state, outcome) or outcome.call in core.state.forgotten:
        return 1
    if isinstance(outcome.payload, ObjectRef):
        core.out.append(DiscardObject(outcome.payload.source))
    return 1


def _may_count(call: Call, library: Library) -> bool:
    """Whether an end counts that comes from a pilot which had been given up: its call is still open."""
    return call.group.options.gang[1] == 1 and not any(device.fault for device in library.devices)


def account(core: Core, library: Library, group: Group, good: list[CallEnd], *, others: int, seconds: float) -> int:
    """Count runs of a group and deliver the ends in `good`. `others`: runs whose ends the caller delivers. Returns the
    number of runs."""
    count = len(good) + others
    if good:
        calls.closed(core, group, len(good))
        core.results_of(group.client).extend(good)
    if not count:
        return 0
    context, cost, mean = library.context, group.cost, seconds / count
    cost.run_s += (mean - cost.run_s) * max(_NEW_WEIGHT, count / (cost.runs + count))
    cost.runs += count
    if mean < cost.least_s:
        cost.least_s = mean
    context.run_s += (mean - context.run_s) * max(_NEW_WEIGHT, count / (context.runs + count))
    context.runs += count
    context.run_total_s += seconds
    kind = cost.by_kind.setdefault(library.devices[0].facts.kind, [0.0, 0.0, 0.0])
    kind[0] += count
    kind[1] += seconds
    kind[2] += count * max(1, group.options.batch)
    core.state.unrecorded[cost] = None
    return count
