"""Handle calls that lost their library, pilot or device. Such a call is requeued, runs alone, or fails with evidence.

Such a call may be *set aside*: it waits outside the queue until it may run in a certain library.

*Faults* (`FailureKind.INFRASTRUCTURE`): after a fault, the call is set aside, and does not run on the faulty pilot or
device for `AVOID_PILOT_S` seconds.

*Losses*: if a pilot is lost and the reason may be a call, each call that may have run there gets a loss. A call that
kills its node leaves no other evidence. After `LOSSES_BEFORE_RUNNING_ALONE` losses, the call runs alone on a pilot that
is reserved for it. If this pilot or its library also dies, the call fails as poison. If the policy plans in rounds, no
pilot is reserved, and a call fails after `MAX_LOSSES` losses.

*Cuts*: a call fails if it ran for most of the walltime of two pilots, and both walltimes ended before the call did.

If a call saves its progress (`stoker.progress(state=...)`), its earlier losses, cuts and faults no longer count.
"""

from __future__ import annotations

from itertools import chain

import msgspec

from stoker.manager.core import blame, deadlines, ending, holding, libraries, queues
from stoker.manager.core.blame import LOSSES_BEFORE_RUNNING_ALONE, MAX_LOSSES
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.state import CallSetbacks, Fault, Loss, State
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd, Failure, FailureKind, OutputRange
from stoker.protocol.ids import format_call_id, format_library_id
from stoker.units import show_seconds

MAX_PILOTS_WITH_FAULTS = 3  # A call fails after faults on this number of different pilots
MAX_FAULTS_ON_ONE_PILOT = 3  # A call fails after this number of faults on the same pilot
# Seconds for which a call avoids a pilot after its first fault there, and after later faults
AVOID_PILOT_S = (15.0, 30.0)
# Seconds for which a call does not run at all after its first fault, and after later faults
PAUSE_AFTER_FAULT_S = (0.0, 10.0)
FAULT_TIMER = "fault"


def is_infrastructure_fault(outcome: CallEnd) -> bool:
    """Return True if a device, disk or network made a call fail."""
    return outcome.failure is not None and outcome.failure.kind is FailureKind.INFRASTRUCTURE


def requeue_after_fault(manager: Manager, library: Library, call: Call, outcome: CallEnd) -> None:
    assert outcome.failure is not None
    state, pilot, failure = manager.state, library.pilot, outcome.failure
    setbacks = holding.get_or_create_setbacks(manager, call)
    there = _count_faults_on_pilot(setbacks, library)
    devices = frozenset([device.id for device in library.devices] if failure.device else ())
    avoided_until = state.now + AVOID_PILOT_S[min(there, len(AVOID_PILOT_S) - 1)]
    pause_s = PAUSE_AFTER_FAULT_S[min(len(setbacks.faults), len(PAUSE_AFTER_FAULT_S) - 1)]
    setbacks.faults.append(Fault(state.now, pilot.id, devices, avoided_until, state.now + pause_s, failure))
    pilot.note(state.now, f"failed {format_call_id(call.id)}: {failure.message}")
    blame.ask_why_call_failed(manager, library, call, outcome)
    call.note(state.now, f"{ending.describe_place(library)} failed it: {failure.message}")
    pilots = {fault.pilot for fault in setbacks.faults}
    if len(pilots) >= MAX_PILOTS_WITH_FAULTS or there + 1 >= MAX_FAULTS_ON_ONE_PILOT:
        ending.end_call(manager, call, msgspec.structs.replace(outcome, failure=_build_fault_failure(call, setbacks)))
        return
    where = ", ".join(sorted(devices)) + f" of {pilot.id}" if devices else str(pilot.id)
    holding.requeue_calls(manager, (call,), why=f"runs again, for {avoided_until - state.now:g} s not on {where}")
    state.rerun_calls += 1
    for at in (avoided_until, state.now + pause_s):
        key = f"{FAULT_TIMER}/{int(at) + 1}"  # at most one timer per second, even for thousands of calls
        if at > state.now and key not in state.timers:
            manager.set_timer(key, float(int(at) + 1))


def _is_library_avoided(setbacks: CallSetbacks, library: Library, now: float) -> bool:
    return any(
        now < fault.pauses_until
        or (
            fault.pilot == library.pilot.id
            and now < fault.avoided_until
            and (not fault.devices or any(device.id in fault.devices for device in library.devices))
        )
        for fault in setbacks.faults
    )


def _count_faults_on_pilot(setbacks: CallSetbacks, library: Library) -> int:
    return sum(fault.pilot == library.pilot.id for fault in setbacks.faults)


def _can_run_on_other_pilot(manager: Manager, setbacks: CallSetbacks) -> bool:
    now = manager.state.now
    if any(now < fault.pauses_until for fault in setbacks.faults):
        return False
    not_now = {fault.pilot: fault.devices for fault in setbacks.faults if now < fault.avoided_until}
    return any(
        pilot.state is PilotState.HERE
        and (id not in not_now or (bool(not_now[id]) and any(device not in not_now[id] for device in pilot.devices)))
        for id, pilot in manager.state.pilots.items()
    )


def _build_fault_failure(call: Call, setbacks: CallSetbacks) -> Failure:
    faults, last = setbacks.faults, setbacks.faults[-1].failure
    pilots = len({fault.pilot for fault in faults})
    often = blame.show_times(len(faults))
    lines = [f"devices, disks or networks failed the call {often}, on {pilots} pilot{'s' * (pilots != 1)}:"]
    lines += [
        f"{fault.pilot}, {show_seconds(fault.at - call.submitted_at)} after the call was submitted: "
        f"{fault.failure.message}"
        for fault in faults
    ]
    text = "\n  ".join(lines)
    return Failure(FailureKind.INFRASTRUCTURE, text, last.pilot, last.library, log=last.log, device=last.device)


def record_losses_of_running_calls(manager: Manager, pilot: Pilot) -> None:
    """For each call that may have run on a pilot that ended, record a loss or a walltime cut."""
    if pilot.reserved_for is not None:
        holding.free_reserved_pilot(manager, manager.state.setbacks[pilot.reserved_for.id])
    cut = pilot.loss is LossReason.WALLTIME or deadlines.is_near_walltime_end(pilot, manager.state.now)
    if not cut and (pilot.loss is None or pilot.loss.is_explained):
        return
    ran = {call: library for library in pilot.libraries.values() for call in _possibly_running_calls(manager, library)}
    if cut:
        for call, library in ran.items():
            _record_walltime_cut(manager, library, call)
        return
    loading = [x for x in pilot.libraries.values() if x.state is LibraryState.LOADING]
    others = any(library.withdrawn_calls for library in pilot.libraries.values())
    alone = len(ran) == 1 and not loading and not others
    for call, library in ran.items():
        _record_loss(manager, library, call, was_alone=alone)
    if len(loading) == 1 and not ran and not others:
        loading[0].context.pilots_lost_while_loading.append(pilot)
        _fail_calls_after_lost_loads(manager, loading[0].context)


def record_walltime_cuts(manager: Manager, library: Library, running: list[Call]) -> None:
    if deadlines.is_near_walltime_end(library.pilot, manager.state.now):
        for call in running:
            _record_walltime_cut(manager, library, call)


def recheck_calls_of_lost_pilot(manager: Manager, pilot: Pilot) -> None:
    if manager.state.setbacks:
        manager.set_aside_calls_due = True
    for context in manager.state.waiting_contexts.values():
        if pilot in context.pilots_lost_while_loading:
            _fail_calls_after_lost_loads(manager, context)
            return


def remove_call_losses_of_pilot(state: State, pilot: Pilot) -> None:
    for setbacks in state.setbacks.values():
        setbacks.losses[:] = [loss for loss in setbacks.losses if loss.pilot is not pilot or loss.failure is not None]
    for context in state.contexts.values():
        if pilot in context.pilots_lost_while_loading:
            context.pilots_lost_while_loading.remove(pilot)


def has_idle_reserved_pilot(state: State) -> bool:
    return any(not _count_calls_on_pilot(pilot) for pilot in state.reserved_pilots.values())


def send_retried_call(manager: Manager, library: Library) -> None:
    """Send one call that is set aside after a walltime cut or a fault to a library with a free slot."""
    waiting = (each.queue.set_aside_calls.values() for each in (library.context, *library.context.variant_of.values()))
    for call in chain.from_iterable(waiting):
        setbacks = manager.state.setbacks[call.id]
        if (
            (setbacks.cuts or setbacks.faults)
            and not blame.needs_exclusive_pilot(setbacks)
            and library.admits(call)
            and holding.can_run_group(library, call.group)
            and not blame.find_final_failure(manager.state, call, setbacks)
            and _can_run_in_library(manager, library, call, setbacks)
        ):
            _send_call(manager, library, call)
            return


def place_set_aside_calls(manager: Manager) -> None:
    for context in tuple(manager.state.waiting_contexts.values()):
        context.set_aside_call_lacks_library = False
        for call in tuple(context.queue.set_aside_calls.values()):
            setbacks = manager.state.setbacks[call.id]
            verdict = blame.find_final_failure(manager.state, call, setbacks)
            if verdict is not None:
                ending.fail_call(manager, call, verdict)
            # the losses of the call had harmless reasons, so the call returns to the queue
            elif not blame.must_be_set_aside(manager, call, setbacks):
                context.queue.remove(call)
                holding.free_reserved_pilot(manager, setbacks)
                context.queue.put_back(call)
                manager.contexts_to_serve[context] = None
            elif blame.needs_exclusive_pilot(setbacks):
                if not blame.is_waiting_for_loss_reason(setbacks):
                    _send_call_to_reserved_pilot(manager, call, setbacks)
            else:
                _send_to_fitting_library(manager, call, setbacks)


def _possibly_running_calls(manager: Manager, library: Library) -> list[Call]:
    if library.state not in (LibraryState.READY, LibraryState.STOPPING):
        return []
    unsent = manager.calls_to_send.get(library, ())
    return [call for call in library.held.values() if call not in unsent]


def _record_loss(
    manager: Manager, library: Library, call: Call, *, was_alone: bool, failure: Failure | None = None
) -> None:
    now, pilot = manager.state.now, library.pilot
    since = max(call.sent_at, library.ended_at)
    memory = max((size for at, size in library.memory_measurements if at >= since), default=0)
    if failure is not None:
        printed = failure.printed
    else:
        log = blame.library_log_path(pilot, library.id)
        printed = OutputRange(log, library.log_position, 0) if log and library.slots == 1 else None
    setbacks = holding.get_or_create_setbacks(manager, call)
    setbacks.losses.append(Loss(now, pilot, library.id, now - call.sent_at, was_alone, failure, memory, printed))
    del setbacks.losses[: -2 * MAX_LOSSES]
    count = len(setbacks.counted_losses)
    more = (
        ""
        if count < LOSSES_BEFORE_RUNNING_ALONE or call.group.options.gang[1] > 1
        else "; the call runs alone from now on"
    )
    who = pilot.id if failure is None else format_library_id(library.id)
    call.note(now, f"may have run when {who} died ({count}){more}")


def _record_walltime_cut(manager: Manager, library: Library, call: Call) -> None:
    cut = deadlines.build_walltime_cut(manager.state, library, call)
    holding.get_or_create_setbacks(manager, call).cuts.append(cut)
    call.note(manager.state.now, f"ran {show_seconds(cut.ran_s)} and was cut off by the walltime of {cut.pilot}")


def _fail_calls_after_lost_loads(manager: Manager, context: Context) -> None:
    counted = [x for x in context.pilots_lost_while_loading if x.loss is not None and not x.loss.is_explained]
    if len(counted) < libraries.MAX_PILOTS_LOST_WHILE_LOADING or not all(pilot.is_loss_settled for pilot in counted):
        return
    context.pilots_lost_while_loading.clear()
    often = blame.show_times(len(counted))
    lines = [f"context {context.recipe.name} could not be loaded: its pilot died {often} meanwhile:"]
    lines += [f"{pilot.id}: {blame.describe_pilot_loss(manager.state, pilot)}" for pilot in counted]
    libraries.fail_waiting_calls(manager, context, Failure(FailureKind.CONTEXT, "\n  ".join(lines), counted[-1].id))


def _list_serving_libraries(call: Call) -> list[Library]:
    return [
        library
        for context in queues.contexts_serving_group(call.group)
        for library in context.libraries.values()
        if library.is_serving and not any(device.fault for device in library.devices)
    ]


def _send_call_to_reserved_pilot(manager: Manager, call: Call, setbacks: CallSetbacks) -> None:
    pilot, able = setbacks.pilot, _list_serving_libraries(call)
    if pilot is None or not any(library.pilot is pilot for library in able):
        holding.free_reserved_pilot(manager, setbacks)
        here = [each for each in manager.state.pilots.values() if each.state is PilotState.HERE]
        if sum(each.reserved_for is not None for each in here) >= max(1, len(here) // 2):
            return
        free = [x for x in able if x.pilot.reserved_for is None and _can_run_in_library(manager, x, call, setbacks)]
        if not free:
            return
        pilot = min(free, key=lambda x: (_count_calls_on_pilot(x.pilot), x.id)).pilot
        holding.reserve_pilot(manager, setbacks, pilot, call)
    if not _count_calls_on_pilot(pilot):
        _send_call(manager, next(library for library in able if library.pilot is pilot), call)


def _count_calls_on_pilot(pilot: Pilot) -> int:
    return sum(library.load for library in pilot.libraries.values())


def _can_run_in_library(manager: Manager, library: Library, call: Call, setbacks: CallSetbacks) -> bool:
    if _is_library_avoided(setbacks, library, manager.state.now):
        return False
    return deadlines.has_time_for_retry(manager.state, library, call, setbacks)


def _send_to_fitting_library(manager: Manager, call: Call, setbacks: CallSetbacks) -> None:
    able = [x for x in _list_serving_libraries(call) if _can_run_in_library(manager, x, call, setbacks)]
    free = [library for library in able if library.load < library.slots and library.admits(call)]
    if free:
        _send_call(manager, min(free, key=lambda x: _count_faults_on_pilot(setbacks, x)), call)
    elif not able:
        call.group.context.set_aside_call_lacks_library = _can_run_on_other_pilot(manager, setbacks)


def _send_call(manager: Manager, library: Library, call: Call) -> None:
    queues.remove_call_from_queue(manager, call)
    holding.assign_call(manager, library, call)


SIGKILL = 9
# A call runs alone after other calls have ended its library this many times.
ENDS_BY_OTHER_CALLS_BEFORE_ALONE = 2

# After this number of dead libraries the call counts as the cause and fails. One death may have another cause.
LIBRARY_DEATHS_UNTIL_POISON = 2


def blame_call_for_library_death(
    manager: Manager, library: Library, call: Call, failure: Failure, *, was_alone: bool
) -> bool:
    """Count the death of a library against a call that ran there. Return True if the call fails because of it."""
    text = f"its library died ({failure.message})"
    outside = failure.signal == SIGKILL or failure.kind is FailureKind.CONTEXT
    beside = library.pilot.libraries.values()  # other ranks of the same call do not count as other work
    at_work = any(x.held.keys() - {call.id} or x.state is LibraryState.LOADING for x in beside)
    if was_alone:
        _record_loss(manager, library, call, was_alone=not at_work, failure=failure)
        if outside and at_work:
            call.note(manager.state.now, f"{text} while other libraries of {library.pilot.id} ran calls or loaded")
            return False
    past = call.get_or_create_history()
    past.library_deaths += 1
    call.must_run_alone = True
    if not was_alone:
        past.library_deaths = min(past.library_deaths, LIBRARY_DEATHS_UNTIL_POISON - 1)
        call.note(manager.state.now, f"{text} while it ran other calls too; the call runs again alone")
        return False
    call.note(
        manager.state.now, f"{text}, {past.library_deaths} of {LIBRARY_DEATHS_UNTIL_POISON} before it is given up"
    )
    if past.library_deaths < LIBRARY_DEATHS_UNTIL_POISON:
        return False
    kind = FailureKind.MEMORY if failure.kind is FailureKind.MEMORY else FailureKind.POISON
    text = f"it ended its library {past.library_deaths} times; the last time: {failure.message}"
    ending.fail_call(manager, call, msgspec.structs.replace(failure, kind=kind, message=text))
    return True


def record_library_ended_by_other_call(manager: Manager, library: Library, call: Call, failure: Failure) -> None:
    past = call.get_or_create_history()
    past.ends_by_other_calls += 1
    call.must_run_alone |= past.ends_by_other_calls >= ENDS_BY_OTHER_CALLS_BEFORE_ALONE
    more = "; the call runs alone in a library from now on" if call.must_run_alone else ""
    call.note(manager.state.now, f"lib-{library.id} was ended while the call ran there ({failure.message}){more}")
