"""A call's way: it arrives, waits or is held, comes back when its library does, and ends exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stoker.manager.core import actions, libraries
from stoker.manager.core.state import Call, CallState, Context, Gang, Group, Library
from stoker.manager.protocol.calls import CallEnd, CallSpec, Failure, FailureKind
from stoker.manager.protocol.ids import CallId
from stoker.manager.protocol.to_pilot import CancelCalls

if TYPE_CHECKING:
    from stoker.manager.core.core import Core

POISON_KILLS = 2
"""A call that has killed this many libraries is a poison call: the first death may have been the node's fault."""

KEPT_FAILURES = 1000
"""So many failed calls are kept for `stoker explain`."""


def arrive(core: Core, group: Group, specs: list[CallSpec]) -> None:
    """Accept calls of one group: each goes to a library with room, or waits."""
    state, calls = core.state, core.state.calls
    now = state.now
    fresh: list[Call] = []
    for spec in specs:
        if spec.call in calls:
            state.refuse("repeated call")
            continue
        call = calls[spec.call] = Call(spec, group, now)
        fresh.append(call)
    group.client.open_calls += len(fresh)
    if core.tracked:
        for changes in core.tracked:
            changes.calls.update(call.id for call in fresh)
    context = group.context
    if core.policies.dispatch.asks_every_call:
        for call in fresh:
            place(core, call)
    else:
        placed = 0
        while placed < len(fresh) and not context.queue.count and (context.idle or context.roomy):
            place(core, fresh[placed])
            placed += 1
        if placed < len(fresh):
            context.queue.extend(fresh[placed:] if placed else fresh)
    if context.queue.count:
        hungry(core, context)


def hungry(core: Core, context: Context) -> None:
    """A context has waiting calls: ask what to do about it, when its queue has doubled since the last time."""
    state = core.state
    if context.recipe.key not in state.hungry:
        state.hungry[context.recipe.key] = context
        if not context.libraries:
            context.starved_since = state.now
    if context.queue.count >= context.ask_at:
        context.ask_at = 2 * context.queue.count
        core.dirty[context] = None


def fed(core: Core, context: Context) -> None:
    """A context's queue may have become empty."""
    if not context.queue.count:
        context.ask_at = 1
        context.starved_since = None
        core.state.hungry.pop(context.recipe.key, None)


def place(core: Core, call: Call) -> None:
    """Ask where a waiting call that is in no queue yet should go."""
    answer = core.policies.dispatch.place(core.state, call)
    if type(answer) is int:
        library = core.state.libraries.get(answer)  # type: ignore[call-overload]
        if library is not None and libraries.takes(core, library, call):
            give(core, library, call)
            return
        core.state.refuse("plan of dispatch: place names a library without room")
        answer = None
    call.group.context.queue.push(call)
    if answer is not None:
        core.apply((answer,), seam="dispatch")  # type: ignore[arg-type]
    if call.state is CallState.WAITING:
        hungry(core, call.group.context)


def give(core: Core, library: Library, call: Call) -> None:
    """A call that is in no queue goes to a library."""
    call.state = CallState.HELD
    call.holder = library
    call.sent_at = core.state.now
    core.hold(library, call)
    libraries.reclass(core, library)


def requeue(core: Core, calls: Iterable[Call], *, why: str) -> None:
    """Calls come back, in their order, to the front of their queues."""
    state = core.state
    back = list(calls)
    for call in reversed(back):
        call.state = CallState.WAITING
        call.holder = None
        call.note(state.now, why)
        call.group.context.queue.push_front(call)
    for context in {call.group.context for call in back}:
        hungry(core, context)
        core.dirty[context] = None
        libraries.serve(core, context)


def end(core: Core, call: Call, outcome: CallEnd) -> None:
    """A call ends: this is the one place where a call that failed, or was never run, meets its client."""
    state = core.state
    if call.state is CallState.WAITING:
        call.group.context.queue.left()
        fed(core, call.group.context)
    call.state = CallState.ENDED
    call.holder = None
    state.calls.pop(call.id, None)
    state.reports.by_call.pop(call.id, None)
    context, client = call.group.context, call.group.client
    context.ended += 1
    client.open_calls -= 1
    state.done += 1
    if not outcome.ok:
        state.failures += 1
        keep(core, call, outcome)
    elif call.id in core.watch:
        keep(core, call, outcome)
    if core.tracked:
        for changes in core.tracked:
            changes.calls.add(call.id)
    if not client.gone:
        core.deliver(client, outcome)


def keep(core: Core, call: Call, outcome: CallEnd) -> None:
    """Keep an ended call for its story."""
    failure, now = outcome.failure, core.state.now
    if outcome.printed is not None:
        printed = outcome.printed
        call.note(now, f"printed {printed.path}:{printed.start}-{printed.end}")
    if outcome.ok:
        call.note(now, f"ended with a result after {outcome.run_s:.3f} s in its function")
    elif failure is None:
        call.note(now, f"raised an exception in your code after {outcome.run_s:.3f} s")
    else:
        call.note(now, f"ended without a result ({failure.kind.value}): {failure.message}")
    kept = core.state.failed
    kept[call.id] = call
    if len(kept) > KEPT_FAILURES and not core.watch:
        del kept[next(iter(kept))]


def fail(core: Core, call: Call, failure: Failure) -> None:
    """End a call without a result of its function."""
    end(core, call, CallEnd(call.id, False, b"", 0.0, failure))


def withdraw(core: Core, call: Call, *, running: bool) -> None:
    """Take a held call away from whoever holds it; its slot stays taken until the pilot says that it is free."""
    members = call.holder.members if isinstance(call.holder, Gang) else (call.holder,)
    for library in members:
        if library is not None and library.held.pop(call.id, None) is not None:
            batch = core.sends.get(library)
            if batch is not None and call in batch:
                batch.remove(call)
            else:
                library.zombies.add(call.id)
                core.say(library.pilot, CancelCalls(library.id, (CallId(call.id),), running))
            libraries.reclass(core, library)
    call.holder = None


def cancel(core: Core, call: Call, *, reason: str, running: bool) -> None:
    """End a call because nobody wants it any more."""
    if call.state is CallState.HELD:
        withdraw(core, call, running=running)
    fail(core, call, Failure(FailureKind.CANCELLED, reason))


def killed_its_library(core: Core, call: Call, failure: Failure) -> bool:
    """A library died while it ran this call. True if that makes it a poison call, which ends here."""
    call.kills += 1
    call.note(
        core.state.now, f"its library died ({failure.message}), {call.kills} of {POISON_KILLS} before it is given up"
    )
    if call.kills < POISON_KILLS:
        return False
    kind = FailureKind.MEMORY if failure.kind is FailureKind.MEMORY else FailureKind.POISON
    text = f"it ended its library {call.kills} times; the last time: {failure.message}"
    evidence = Failure(
        kind, text, failure.pilot, failure.library, failure.signal, failure.exit_code, failure.tail, failure.log
    )
    fail(core, call, evidence)
    return True


def gang_end(core: Core, call: Call, library: Library, outcome: CallEnd) -> None:
    """A member of a gang has ended its part. The call ends with the last of them, or with the first failure."""
    gang = call.holder
    if not isinstance(gang, Gang):
        core.state.refuse("end of a gang that is not one")
        return
    gang.ends[library.id] = outcome
    if not outcome.ok:
        withdraw(core, call, running=True)
        end(core, call, outcome)
    elif len(gang.ends) == len(gang.members):
        end(core, call, gang.ends[gang.members[0].id])


def start_gang(core: Core, call: Call, members: tuple[Library, ...], rendezvous: str) -> None:
    """Start a waiting call on all of these libraries together."""
    call.group.context.queue.left()
    fed(core, call.group.context)
    call.state = CallState.HELD
    call.holder = Gang(members)
    call.sent_at = core.state.now
    actions.run_gang(core, call, members, rendezvous)
