"""A library's way: told to load, ready, given calls, told to stop, gone. And the promises of device memory that go along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stoker.manager.core import calls
from stoker.manager.core.commands import RecordLoad
from stoker.manager.core.events import ContextAdvice
from stoker.manager.core.seams import PolicyError
from stoker.manager.core.state import Call, CallState, Context, Device, Gang, Library, LibraryState, Pilot, PilotState
from stoker.manager.protocol.calls import CallEnd, Failure, FailureKind
from stoker.manager.protocol.ids import LibraryId
from stoker.manager.protocol.to_manager import LibraryGone, LibraryReady
from stoker.manager.protocol.to_pilot import StartLibrary, StopLibrary

if TYPE_CHECKING:
    from stoker.manager.core.core import Core

LOAD_TRIES = 2
"""A context whose loads have failed this often in a row, with none between that worked, cannot be loaded."""


# ---- promises


def promise(library: Library, memory_bytes: int) -> None:
    """Change what a library is promised on each of its devices. Raises PolicyError where it does not fit."""
    more = memory_bytes - library.promised_bytes
    for device in library.devices:
        if more > 0 and device.free_bytes < more:
            raise PolicyError(
                f"{device.id} of {library.pilot.id} has {device.free_bytes} bytes left, {library.context.recipe.name} "
                f"wants {more} more"
            )
    for device in library.devices:
        device.promised_bytes += more
    library.promised_bytes = memory_bytes


def tier(core: Core, device: Device) -> None:
    """Account the time that a device has spent cold or warm."""
    state = core.state
    tiers = state.tier_seconds
    tiers[device.tier] = tiers.get(device.tier, 0.0) + state.now - device.tier_since
    device.tier_since = state.now
    warm = any(library.state is LibraryState.READY for library in device.libraries.values())
    device.tier = "warm" if warm else "cold"


# ---- loading


def load(core: Core, context: Context, pilot: Pilot, devices: tuple[Device, ...], memory_bytes: int) -> Library:
    """Promise the memory and tell the pilot to start a library. Raises PolicyError where the memory is not there."""
    state = core.state
    library = Library(LibraryId(state.next_library), context, pilot, devices, 0, state.now)
    promise(library, memory_bytes)
    state.next_library += 1
    state.libraries[library.id] = library
    context.libraries[library.id] = library
    pilot.libraries[library.id] = library
    for device in devices:
        device.libraries[library.id] = library
    needs = context.recipe.needs
    core.say(
        pilot,
        StartLibrary(library.id, context.recipe, tuple(d.id for d in devices), needs.memory_bytes, memory_bytes),
    )
    return library


def ready(core: Core, library: Library, message: LibraryReady) -> None:
    """A library holds its context: remember what that cost, promise what it really takes, give it calls."""
    state, context = core.state, library.context
    if library.state is not LibraryState.LOADING:
        state.refuse("library ready twice")
        return
    library.state = LibraryState.READY
    library.used_at = state.now
    library.memory_bytes, library.device_bytes = message.resident_bytes, message.device_bytes
    library.notes.append((state.now, f"ready: {message.start_s:.2f} s to start, {message.load_s:.2f} s to load"))
    kind = library.devices[0].facts.kind
    context.loads += 1
    context.load_failures = 0
    context.failed_on.clear()
    seconds = message.start_s + message.load_s + message.fetch_s
    context.load_s = seconds
    context.load_total_s += seconds
    resident = message.device_bytes or message.resident_bytes
    context.resident_bytes = resident
    context.advice[kind] = ContextAdvice(seconds, 0.0, resident, message.peak_bytes, context.run_s, 0.0)
    core.out.append(
        RecordLoad(
            context.recipe.key, context.recipe.name, kind, message.start_s, message.load_s, message.resident_bytes,
            message.peak_bytes, message.device_bytes,
        )
    )  # fmt: skip
    wanted = core.policies.residency.measured(state, library)
    if wanted < library.promised_bytes or all(d.free_bytes >= wanted - library.promised_bytes for d in library.devices):
        shrunk = wanted < library.promised_bytes
        promise(library, wanted)
        core.supply_changed |= shrunk and len(state.hungry) > 0
    for device in library.devices:
        tier(core, device)
    if core.tracked:
        core.changed(lambda c: c.libraries, library.id)
    reclass(core, library)
    pull(core, library)


def advise(context: Context, by_kind: Mapping[str, ContextAdvice]) -> None:
    """Take advice where nothing was measured yet."""
    for kind, advice in by_kind.items():
        context.advice.setdefault(kind, advice)
        if not context.run_s:
            context.run_s = advice.run_s
        if not context.load_s:
            context.load_s = advice.load_s


# ---- giving calls


def takes(core: Core, library: Library, call: Call) -> bool:
    """Whether a library may be given one more call of this kind just now."""
    return (
        library.state is LibraryState.READY
        and library.pilot.state is PilotState.HERE
        and (library.context is call.group.context or library.context.recipe.key in call.group.options.variants)
        and library.load < core.policies.dispatch.window(core.state, library)
    )


def reclass(core: Core, library: Library) -> None:
    """Put a library into those of its context's sets that it belongs to now."""
    context, id = library.context, library.id
    load = len(library.held) + len(library.zombies)
    context.idle.pop(id, None)
    if library.state is not LibraryState.READY or library.pilot.state is not PilotState.HERE:
        context.roomy.pop(id, None)
        context.backlogged.pop(id, None)
        return
    if load < library.slots:
        context.idle[id] = library
        context.roomy.pop(id, None)
        context.backlogged.pop(id, None)
        return
    if load > library.slots:
        context.backlogged[id] = library
    else:
        context.backlogged.pop(id, None)
    if load < core.policies.dispatch.window(core.state, library):
        context.roomy[id] = library
    else:
        context.roomy.pop(id, None)


def pull(core: Core, library: Library) -> None:
    """A library has room: give it calls from its context's queue, else see whether others hold too many."""
    state, context = core.state, library.context
    dispatch = core.policies.dispatch
    queue = context.queue
    if library.state is not LibraryState.READY or library.pilot.state is not PilotState.HERE:
        return
    while queue.count:
        answer = dispatch.pull(state, library)
        if not isinstance(answer, int):
            core.apply(answer, seam="dispatch")
            break
        head = queue.head()
        if answer <= 0 or head is None:
            break
        now, hold = state.now, core.hold
        for call in queue.pop_like(head.group, answer):
            call.state = CallState.HELD
            call.holder = library
            call.sent_at = now
            hold(library, call)
    reclass(core, library)
    if queue.count:
        return
    calls.fed(core, context)
    if not library.held and not library.zombies:
        library.used_at = state.now
        core.apply(dispatch.dry(state, library), seam="dispatch")
        if state.hungry:
            for hungry in state.hungry.values():
                if not hungry.libraries:
                    core.dirty[hungry] = None


def serve(core: Core, context: Context) -> None:
    """Calls came back to the queue: give them to libraries that have room."""
    for library in (*reversed(context.idle.values()), *context.roomy.values()):
        if not context.queue.count:
            return
        pull(core, library)


def ended(core: Core, library: Library, ends: list[CallEnd]) -> None:
    """Calls of a library have ended. The hot path: what is done a call here, is done a million times."""
    state = core.state
    held, open_calls, watch = library.held, state.calls, core.watch
    context = library.context
    group, client, batch = None, None, None
    count, seconds, good = 0, 0.0, 0
    for outcome in ends:
        call = held.pop(outcome.call, None)
        if call is None:
            if outcome.call in library.zombies:
                library.zombies.discard(outcome.call)
            else:
                state.refuse("late or repeated end of a call")
            continue
        if type(call.holder) is Gang:
            calls.gang_end(core, call, library, outcome)
            continue
        if call.group is not group:
            if group is not None:
                _account(library, group, count, seconds)
            group, client = call.group, call.group.client
            count, seconds = 0, 0.0
            batch = core.results.setdefault(client, [])
        count += 1
        seconds += outcome.run_s
        if not outcome.ok or watch or core.tracked:
            calls.end(core, call, outcome)
            continue
        good += 1
        call.state = CallState.ENDED
        call.holder = None
        del open_calls[outcome.call]
        client.open_calls -= 1  # type: ignore[union-attr]
        batch.append(outcome)  # type: ignore[union-attr]
    if state.reports.by_call:
        for outcome in ends:
            state.reports.by_call.pop(outcome.call, None)
    if group is not None:
        first = context.runs == 0
        _account(library, group, count, seconds)
        if first and context.queue.count:
            core.dirty[context] = None
    context.ended += good
    state.done += good
    library.served += len(ends)
    library.pilot.ended += len(ends)
    _rate(core, len(ends))
    pull(core, library)


def _account(library: Library, group: object, count: int, seconds: float) -> None:
    from stoker.manager.core.state import Group

    if not isinstance(group, Group) or not count:
        return
    context, mean = library.context, seconds / count
    weight = max(0.2, count / (group.runs + count))
    group.run_s += (mean - group.run_s) * weight
    group.runs += count
    context.run_s += (mean - context.run_s) * max(0.2, count / (context.runs + count))
    context.runs += count
    context.run_total_s += seconds
    kind = group.kind_runs.setdefault(library.devices[0].facts.kind, [0.0, 0.0])
    kind[0] += count
    kind[1] += seconds


def _rate(core: Core, count: int) -> None:
    rate, second = core.state.rate, int(core.state.now)
    if rate and rate[-1][0] == second:
        rate[-1] = (second, rate[-1][1] + count)
    else:
        rate.append((second, count))
        while rate[0][0] < second - 30:
            rate.popleft()


# ---- the end of a library


def stop(core: Core, library: Library, *, reason: str) -> None:
    """Tell a library to end after what it runs. Its memory stays promised until the pilot says that it is gone."""
    if library.state in (LibraryState.STOPPING, LibraryState.GONE):
        return
    library.state = LibraryState.STOPPING
    library.notes.append((core.state.now, f"told to stop: {reason}"))
    reclass(core, library)
    core.say(library.pilot, StopLibrary(library.id, reason))


def gone(core: Core, library: Library, message: LibraryGone) -> None:
    """A library has ended; its calls go elsewhere, or end if they killed it once too often."""
    state, context, failure = core.state, library.context, message.failure
    running = [library.held[id] for id in message.running if id in library.held]
    died = failure is not None and not message.loading
    survivors = _detach(core, library)
    if failure is not None:
        library.notes.append((state.now, f"ended: {failure.message}"))
    if message.loading and failure is not None:
        _load_failed(core, context, library, failure)
    back = []
    for call in survivors:
        if call.state is not CallState.HELD and call.state is not CallState.WAITING:
            continue
        if died and failure is not None and call in running and calls.killed_its_library(core, call, failure):
            continue
        back.append(call)
    if back:
        why = f"back in the queue: lib-{library.id} on {library.pilot.id} ended"
        calls.requeue(core, back, why=f"{why} ({failure.message})" if failure else why)
    core.supply_changed = True


def lost(core: Core, library: Library, *, reason: str) -> None:
    """A library vanished with its pilot. What it ran runs again elsewhere; that is no call's fault."""
    state = core.state
    begun = sum(1 for _ in zip(library.held, range(library.slots), strict=False))
    state.rerun_calls += begun
    survivors = _detach(core, library)
    if survivors:
        calls.requeue(
            core, survivors, why=f"{library.pilot.id} was lost ({reason}): back in the queue, not counted as a try"
        )
    core.supply_changed = True


def _detach(core: Core, library: Library) -> list[Call]:
    """Take a library out of everything that names it, and return the calls that it held, in order."""
    state = core.state
    core.sends.pop(library, None)
    held = list(library.held.values())
    library.held.clear()
    library.zombies.clear()
    library.state = LibraryState.GONE
    reclass(core, library)
    promise(library, 0)
    for device in library.devices:
        device.libraries.pop(library.id, None)
        tier(core, device)
    library.context.libraries.pop(library.id, None)
    library.pilot.libraries.pop(library.id, None)
    state.libraries.pop(library.id, None)
    context = library.context
    if context.queue.count and not context.libraries and context.starved_since is None:
        context.starved_since = state.now
    for call in held:
        if type(call.holder) is Gang:
            calls.withdraw(core, call, running=True)
    if core.tracked:
        core.changed(lambda c: c.libraries, library.id)
    return held


def _load_failed(core: Core, context: Context, library: Library, failure: Failure) -> None:
    context.load_failures += 1
    context.last_failure = failure
    context.failed_on[library.pilot.id] = context.failed_on.get(library.pilot.id, 0) + 1
    if context.load_failures < LOAD_TRIES or any(x.state is LibraryState.READY for x in context.libraries.values()):
        return
    context.load_failures = 0
    kind = FailureKind.CONTEXT
    evidence = Failure(
        kind, f"context {context.recipe.name} could not be loaded: {failure.message}", failure.pilot, failure.library,
        failure.signal, failure.exit_code, failure.tail, failure.log,
    )  # fmt: skip
    for call in list(context.queue):
        calls.fail(core, call, evidence)
    calls.fed(core, context)
