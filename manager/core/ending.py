"""A call ends exactly once, for whatever reason."""

from __future__ import annotations

from stoker.manager.core import call_records, failure_groups, holding, queues, registry, reservations, verdicts
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Gang, Group, Library
from stoker.manager.core.phases import CallState
from stoker.manager.core.state import State
from stoker.protocol.calls import CallEnd, Failure, FailureKind
from stoker.protocol.ids import show_library

# So many failed calls are kept for `stoker explain`.
KEPT_FAILURES = 1000


def end(manager: Manager, call: Call, outcome: CallEnd, *, waits: bool = True) -> None:
    """A call ends. Good results of ordinary calls take a shorter way (`call_ends.ended`); all others end here. `waits`:
    False for one that has just come and is in no queue."""
    state, group, holder = manager.state, call.group, call.holder
    close(manager, call, waits=waits)
    if not outcome.ok:
        if outcome.failure is not None and outcome.failure.kind is FailureKind.CANCELLED:
            state.cancelled += 1
        else:
            state.failures += 1
            failure_groups.count(state, call, outcome)
    if not outcome.ok or call.id in manager.watch:
        keep(manager, call, outcome, holder=holder)
        if not outcome.ok:
            verdicts.call_failed(manager, holder, call, outcome)
    manager.changed("calls", call.id)
    if outcome.ok:
        manager.took(call)
    manager.results_of(group.client).append(outcome)


def forget(manager: Manager, call: Call) -> None:
    """A call ends without a word to its client, which has its result already and does not wait for it."""
    if call.state is CallState.HELD:
        holding.withdraw(manager, call, running=False)
    close(manager, call)
    manager.changed("calls", call.id)


def forget_failure(state: State, outcome: CallEnd) -> None:
    """A call that had ended before ran once more and failed: it counts as done, and not as failed."""
    call = state.failed.pop(outcome.call, None)
    if outcome.failure is not None and outcome.failure.kind is FailureKind.CANCELLED:
        state.cancelled -= 1
    else:
        state.failures -= 1
        failure_groups.forget(state, call, outcome)


def close(manager: Manager, call: Call, *, waits: bool = True) -> None:
    """Take a call out of everything that names open calls."""
    state, group = manager.state, call.group
    if waits and call.state is CallState.WAITING:
        queues.leave(manager, call)
        if group.options.gang[1] > 1:
            holding.serve_after(manager, group.context)
    holding.ended(manager, call)
    call_records.ended(state, call)
    if state.trials:
        reservations.ended(manager, call.id)
    closed(manager, group, 1)


def finished_elsewhere(manager: Manager, call: Call, library: Library, outcome: CallEnd) -> None:
    """A call that waits again, or runs somewhere else by now, has ended where it ran first."""
    call.note(manager.state.now, f"{library.pilot.id}, which had been given up, has finished it")
    if call.state is CallState.HELD:
        holding.withdraw_to_queue(manager, call)
    end(manager, call, outcome)


def closed(manager: Manager, group: Group, count: int) -> None:
    """So many calls of a group have ended."""
    state = manager.state
    group.open_calls -= count
    group.client.open_calls -= count
    group.context.ended += count
    state.done += count
    if not group.open_calls:
        registry.closed(state, group)


def ended_before(state: State) -> None:
    """A call that is submitted again had ended before the journal began anew."""
    state.done += 1


def keep(manager: Manager, call: Call, outcome: CallEnd, *, holder: Library | Gang | None) -> None:
    """Keep an ended call for its story. `holder`: where it ran when it ended."""
    failure, now = outcome.failure, manager.state.now
    if holder is not None:
        call.note(call.sent_at, f"sent to {place_of(holder)}")
    printed = outcome.printed or (failure.printed if failure is not None else None)
    if printed is not None and printed.end != printed.start:
        call.note(now, f"printed {printed.path}:{printed.start}-{printed.end or ''} (bytes)")
    if outcome.ok:
        call.note(now, f"ended with a result after {outcome.run_s:.3f} s in its function")
    elif failure is None:
        what = f": {outcome.raised}" if outcome.raised else ""
        call.note(now, f"raised an exception in your code after {outcome.run_s:.3f} s{what}")
    else:
        call.note(now, f"ended without a result ({failure.kind.value}): {failure.message}")
        if failure.log:
            call.note(now, f"its library's log is {failure.log}")
    kept = manager.state.failed
    kept[call.id] = call
    if len(kept) > KEPT_FAILURES and not manager.watch:
        del kept[next(iter(kept))]


def place_of(holder: Library | Gang) -> str:
    """Where a call runs, in words: `lib-3 (cuda:0 of n014)`."""
    members = holder.members if isinstance(holder, Gang) else (holder,)
    places = [
        f"{show_library(library.id)} ({', '.join(device.id for device in library.devices)} of {library.pilot.id})"
        for library in members
    ]
    return f"a gang of {', '.join(places)}" if isinstance(holder, Gang) else places[0]


def fail(manager: Manager, call: Call, failure: Failure) -> None:
    """End a call without a result of its function."""
    end(manager, call, CallEnd(call.id, False, b"", 0.0, failure))


def cancel(manager: Manager, call: Call, *, reason: str, running: bool) -> None:
    """End a call because nobody wants it any more."""
    if call.state is CallState.HELD:
        if call.holder is not None:
            call.note(call.sent_at, f"sent to {place_of(call.holder)}")
        holding.withdraw(manager, call, running=running)
    fail(manager, call, Failure(FailureKind.CANCELLED, reason))
