"""A call's way: it arrives, waits or is held, comes back when its library does, and ends exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stoker.manager.core import deadlines, feeding, repair, suspects
from stoker.manager.core.phases import CallState, LibraryState
from stoker.manager.core.seams import PolicyError
from stoker.manager.core.state import Call, Context, Gang, Group, Library, State
from stoker.manager.protocol.calls import CallEnd, CallSpec, Failure, FailureKind
from stoker.manager.protocol.ids import show_library

if TYPE_CHECKING:
    from stoker.manager.core.core import Core

SIGKILL = 9
CUTS_BESIDE = 2
"""A call whose library was ended so often for the sake of others has the next one for itself."""
POISON_KILLS = 2
"""A call that has killed this many libraries is a poison call: the first death may have been the node's fault."""

ONE_BY_ONE = 4
"""So many calls that arrive together are placed one by one; more are pulled from the queue by libraries with room,
which costs less a call and comes to the same."""

GANG_GRACE_S = 10.0
"""What a member of a gang that is taken apart has to end by itself, before its library is ended for it."""

KEPT_FAILURES = 1000
"""So many failed calls are kept for `stoker explain`."""

KEPT_GROUPS = 1000
"""So many groups are kept although none of their calls is open: more of the kind may come."""


# ---- arriving and waiting


def arrive(core: Core, group: Group, specs: list[CallSpec]) -> None:
    """Accept calls of one group: each goes to a library with room, or waits."""
    state, calls = core.state, core.state.calls
    now = state.now
    fresh: list[Call] = []
    for spec in specs:
        id = spec.call
        if id in calls:
            if group.client.unnamed is None:
                state.refuse("repeated call")
            continue
        calls[id] = call = Call(id, spec, group, now)
        fresh.append(call)
    if not fresh:
        return
    group.open_calls += len(fresh)
    group.client.open_calls += len(fresh)
    group.client.last_call = max(group.client.last_call, fresh[-1].id)
    if core.tracked:
        for changes in core.tracked:
            changes.calls.update(call.id for call in fresh)
    context = group.context
    if state.orphans:
        fresh = repair.claim(core, fresh)
        if not fresh:
            return
    if group.options.objective.deadline_at and core.policies.dispatch.by_deadline:
        fresh = deadlines.came(core, fresh)
        if not fresh:
            return
    _enter(core, context, fresh)
    if context.queue.timed:
        deadlines.watch(core, context)


def _enter(core: Core, context: Context, fresh: list[Call]) -> None:
    """New calls of one group go to libraries with room, or wait."""
    if core.policies.dispatch.asks_every_call:
        for call in fresh:
            place(core, call)
        return
    if len(fresh) <= ONE_BY_ONE and not context.queue.count:
        for call in fresh:
            place(core, call)
        return
    context.queue.extend(fresh)
    if context.idle or context.roomy:
        feeding.serve(core, context)
    if context.queue.count:
        hungry(core, context)


def place(core: Core, call: Call, *, again: bool = False) -> None:
    """Ask where a waiting call that is in no queue should go. `again`: it was sent somewhere before."""
    context = call.group.context
    answer = core.policies.dispatch.place(core.state, call)
    if isinstance(answer, int):
        library = core.state.libraries.get(answer)
        if library is not None and feeding.takes(core, library, call) and call.group.options.gang[0] <= 1:
            give(core, library, call)
            return
        core.illegal(PolicyError(f"call {call.id} cannot be placed in library {answer}"), seam="dispatch")
        answer = None
    if again:
        context.queue.put_back(call)
    else:
        context.queue.push(call)
    if answer is not None:
        core.apply((answer,), seam="dispatch")
    if context.queue.count:
        hungry(core, context)


def hungry(core: Core, context: Context) -> None:
    """A context has waiting calls: ask what to do about it, when its queue has doubled since the last time."""
    if context.recipe.key not in core.state.hungry:
        core.state.hungry[context.recipe.key] = context
        core.demand_changed = True
        starving(core, context)
    if context.queue.count >= context.ask_at:
        context.ask_at = 2 * context.queue.count
        core.dirty[context] = None
        core.demand_changed = True


def fed(core: Core, context: Context) -> None:
    """Calls have left a context's queue: it may be empty now, or so short that its growing again is news."""
    count = context.queue.count
    if not count:
        context.ask_at = 1
        context.starved_since = None
        core.state.hungry.pop(context.recipe.key, None)
    elif 4 * count < context.ask_at:
        context.ask_at = 2 * count


def starving(core: Core, context: Context) -> None:
    """Note since when a context's calls wait without any library of theirs being hot or on its way."""
    if not context.queue.count or any(library.usable for library in context.libraries.values()):
        context.starved_since = None
    elif context.starved_since is None:
        context.starved_since = core.state.now


def give(core: Core, library: Library, call: Call) -> None:
    """A call that is in no queue goes to a library when the event is over."""
    call.state = CallState.HELD
    call.holder = library
    call.sent_at = core.state.now
    core.hold(library, [call])
    feeding.fills(library, 1, core.state.now)
    feeding.reclass(core, library)


# ---- coming back


def let_go(core: Core, call: Call) -> None:
    """A held call is held by nobody any more. A gang's other members are told; one library knows already."""
    if type(call.holder) is Gang:
        withdraw(core, call, running=True)
    call.holder = None
    if core.state.trials:
        suspects.let_go(core, call)


def requeue(core: Core, calls: Iterable[Call], *, why: str) -> None:
    """Held calls go back to where their arrival puts them in their queues, and to free libraries after the event."""
    for call in calls:
        let_go(core, call)
        call.offered = False
        call.state = CallState.WAITING
        call.note(core.state.now, why)
        context = call.group.context
        suspects.put_back(core, call)
        hungry(core, context)
        core.returned[context] = None
        core.dirty[context] = None
        core.changed("calls", call.id)


def retry(core: Core, call: Call, *, why: str) -> None:
    """A held call that its library refused, or was made to give up, is placed anew."""
    let_go(core, call)
    call.offered = False
    call.state = CallState.WAITING
    call.note(core.state.now, why)
    core.changed("calls", call.id)
    if call.id in core.state.trials:
        suspects.put_back(core, call)
        hungry(core, call.group.context)
        core.returned[call.group.context] = None
    else:
        place(core, call, again=True)


def withdraw(core: Core, call: Call, *, running: bool) -> None:
    """Take a held call away from whoever holds it; its slot stays taken until the pilot says that it is free."""
    holder = call.holder
    members = holder.members if isinstance(holder, Gang) else (holder,)
    grace_s = GANG_GRACE_S if isinstance(holder, Gang) else 0.0
    for library in members:
        if library is not None and library.held.pop(call.id, None) is not None:
            batch = core.sends.get(library)
            if batch is not None and call in batch:
                batch.remove(call)
            else:
                library.zombies[call.id] = running
                library.ended_at = core.state.now
                core.drop(library, call.id, running=running, grace_s=grace_s)
            feeding.reclass(core, library)
    call.holder = None


def killed_its_library(core: Core, library: Library, call: Call, failure: Failure, *, alone: bool) -> bool:
    """A library died while it ran this call. True if that makes it a poison call, which ends here. Of several calls
    that ran there nobody knows which did it: each is tried again by itself (see `feeding`). The same holds for a death
    from outside (no memory left, a dead zygote) while other libraries of the pilot were at work (see `suspects`)."""
    text = f"its library died ({failure.message})"
    outside = failure.signal == SIGKILL or failure.kind is FailureKind.CONTEXT
    beside = library.pilot.libraries.values()
    at_work = any(x.held.keys() - {call.id} or x.state is LibraryState.LOADING for x in beside)  # no rank of its own
    if alone:
        suspects.library_killed(core, library, call, failure, certain=not at_work)
        if outside and at_work:
            call.note(core.state.now, f"{text} while other libraries of {library.pilot.id} were at work")
            return False
    call.kills += 1
    call.by_itself = True
    if not alone:
        call.kills = min(call.kills, POISON_KILLS - 1)
        call.note(core.state.now, f"{text} while it ran other calls too; it is tried again by itself")
        return False
    call.note(core.state.now, f"{text}, {call.kills} of {POISON_KILLS} before it is given up")
    if call.kills < POISON_KILLS:
        return False
    kind = FailureKind.MEMORY if failure.kind is FailureKind.MEMORY else FailureKind.POISON
    text = f"it ended its library {call.kills} times; the last time: {failure.message}"
    evidence = Failure(
        kind, text, failure.pilot, failure.library, failure.signal, failure.exit_code, failure.tail, failure.log
    )
    fail(core, call, evidence)
    return True


def cut_beside(core: Core, library: Library, call: Call, failure: Failure) -> None:
    """A library was ended for another call's sake while it ran this one. That may happen again and again beside calls
    that run into their time limits, so the call soon has a library for itself."""
    call.cuts_beside += 1
    call.by_itself |= call.cuts_beside >= CUTS_BESIDE
    more = "; it has a library for itself from now on" if call.by_itself else ""
    call.note(core.state.now, f"lib-{library.id} was ended while it ran there ({failure.message}){more}")


# ---- ending


def end(core: Core, call: Call, outcome: CallEnd) -> None:
    """A call ends. Good results of ordinary calls take a shorter way (`feeding.ended`); all others end here."""
    state, group, holder = core.state, call.group, call.holder
    _close(core, call)
    if not outcome.ok:
        if outcome.failure is not None and outcome.failure.kind is FailureKind.CANCELLED:
            state.cancelled += 1
        else:
            state.failures += 1
    if not outcome.ok or call.id in core.watch:
        keep(core, call, outcome, holder=holder)
    core.changed("calls", call.id)
    core.results_of(group.client).append(outcome)


def forget(core: Core, call: Call) -> None:
    """A call ends without a word to its client, which has its result already and does not wait for it."""
    if call.state is CallState.HELD:
        withdraw(core, call, running=False)
    _close(core, call)
    core.changed("calls", call.id)


def forget_failure(state: State, outcome: CallEnd) -> None:
    """A call that had ended before ran once more and failed: it counts as done, and not as failed."""
    state.failed.pop(outcome.call, None)
    if outcome.failure is not None and outcome.failure.kind is FailureKind.CANCELLED:
        state.cancelled -= 1
    else:
        state.failures -= 1


def _close(core: Core, call: Call) -> None:
    """Take a call out of everything that names open calls."""
    state, group = core.state, call.group
    if call.state is CallState.WAITING:
        group.context.queue.leave(call)
        fed(core, group.context)
        if group.options.gang[1] > 1:
            feeding.serve_after(core, group.context)
    let_go(core, call)
    call.state = CallState.ENDED
    del state.calls[call.id]
    state.reports.pop(call.id, None)
    state.forecasts.pop(call.id, None)
    state.breaks.pop(call.id, None)
    state.broken_runs.pop(call.id, None)
    if state.trials:
        suspects.ended(core, call.id)
    closed(core, group, 1)


def finished_elsewhere(core: Core, call: Call, library: Library, outcome: CallEnd) -> None:
    """A call that waits again, or runs somewhere else by now, has ended where it ran first."""
    call.note(core.state.now, f"{library.pilot.id}, which had been given up, has finished it")
    if call.state is CallState.HELD:
        withdraw(core, call, running=False)
        call.state = CallState.WAITING
        call.group.context.queue.put_back(call)
    end(core, call, outcome)


def closed(core: Core, group: Group, count: int) -> None:
    """So many calls of a group have ended."""
    state = core.state
    group.open_calls -= count
    group.client.open_calls -= count
    group.context.ended += count
    state.done += count
    if not group.open_calls and len(state.groups) > KEPT_GROUPS:
        state.groups.pop(group.key, None)


def keep(core: Core, call: Call, outcome: CallEnd, *, holder: Library | Gang | None) -> None:
    """Keep an ended call for its story. `holder`: where it ran when it ended."""
    failure, now = outcome.failure, core.state.now
    if holder is not None:
        call.note(call.sent_at, f"sent to {place_of(holder)}")
    if outcome.printed is not None:
        printed = outcome.printed
        call.note(now, f"printed {printed.path}:{printed.start}-{printed.end}")
    if outcome.ok:
        call.note(now, f"ended with a result after {outcome.run_s:.3f} s in its function")
    elif failure is None:
        call.note(now, f"raised an exception in your code after {outcome.run_s:.3f} s")
    else:
        call.note(now, f"ended without a result ({failure.kind.value}): {failure.message}")
        if failure.log:
            call.note(now, f"its library's log is {failure.log}")
    kept = core.state.failed
    kept[call.id] = call
    if len(kept) > KEPT_FAILURES and not core.watch:
        del kept[next(iter(kept))]


def place_of(holder: Library | Gang) -> str:
    """Where a call runs, in words: `lib-3 (cuda:0 of n014)`."""
    members = holder.members if isinstance(holder, Gang) else (holder,)
    places = [
        f"{show_library(library.id)} ({', '.join(device.id for device in library.devices)} of {library.pilot.id})"
        for library in members
    ]
    return f"a gang of {', '.join(places)}" if isinstance(holder, Gang) else places[0]


def fail(core: Core, call: Call, failure: Failure) -> None:
    """End a call without a result of its function."""
    end(core, call, CallEnd(call.id, False, b"", 0.0, failure))


def cancel(core: Core, call: Call, *, reason: str, running: bool) -> None:
    """End a call because nobody wants it any more."""
    if call.state is CallState.HELD:
        if call.holder is not None:
            call.note(call.sent_at, f"sent to {place_of(call.holder)}")
        withdraw(core, call, running=running)
    fail(core, call, Failure(FailureKind.CANCELLED, reason))
