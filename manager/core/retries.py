"""Handle calls that lost their library, pilot or device. Such a call is requeued, runs alone, or fails with evidence.

*Faults* (`FailureKind.INFRASTRUCTURE`): after a fault, the call waits apart from the queue, and avoids the faulty pilot
or device for `AVOIDS_S` seconds.

*Losses*: if a pilot is lost without a harmless reason, each call that may have run there gets a loss. A call that kills
its node leaves no other evidence. After `ALONE_AFTER` losses, the call runs alone on a reserved pilot. If this pilot or
its library also dies, the call fails as poison. Policies with rounds reserve no pilot. Their calls fail after
`MOST_LOSSES` losses.

*Cuts*: a call fails if the walltimes of two pilots cut it off, and the call had most of the walltime each time.

Once a call saves its progress (`stoker.progress(state=...)`), its earlier losses, cuts and faults no longer count.
"""

from __future__ import annotations

from itertools import chain

import msgspec

from stoker.manager.core import blame, deadlines, ending, holding, libraries, queues
from stoker.manager.core.blame import ALONE_AFTER, MOST_LOSSES
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.state import Fault, Loss, State, Trial
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd, Failure, FailureKind, Printed
from stoker.protocol.ids import format_library_id, show_call
from stoker.units import show_seconds

MOST_PILOTS = 3  # A call fails after faults on this number of pilots
MOST_THERE = 3  # A call fails after this number of faults on one pilot
AVOIDS_S = (15.0, 30.0)  # Seconds that a call avoids a pilot after each fault. The last value repeats
PAUSE_S = (0.0, 10.0)  # Seconds that a call pauses after its first fault, and after each later fault
FAULTS_TIMER = "fault"


def is_fault(outcome: CallEnd) -> bool:
    """Return True if a call failed because of a fault of the infrastructure."""
    return outcome.failure is not None and outcome.failure.kind is FailureKind.INFRASTRUCTURE


def requeue_after_fault(manager: Manager, library: Library, call: Call, outcome: CallEnd) -> None:
    assert outcome.failure is not None
    state, pilot, failure = manager.state, library.pilot, outcome.failure
    trial = holding.get_or_create_trial(manager, call)
    there = _count_faults_on_pilot(trial, library)
    devices = frozenset([device.id for device in library.devices] if failure.device else ())
    avoided_until = state.now + AVOIDS_S[min(there, len(AVOIDS_S) - 1)]
    pause_s = PAUSE_S[min(len(trial.faults), len(PAUSE_S) - 1)]
    trial.faults.append(Fault(state.now, pilot.id, devices, avoided_until, state.now + pause_s, failure))
    pilot.note(state.now, f"failed {show_call(call.id)}: {failure.message}")
    blame.ask_why_call_failed(manager, library, call, outcome)
    call.note(state.now, f"{ending.place_of(library)} failed it: {failure.message}")
    pilots = {fault.pilot for fault in trial.faults}
    if len(pilots) >= MOST_PILOTS or there + 1 >= MOST_THERE:
        ending.end_call(manager, call, msgspec.structs.replace(outcome, failure=_evidence(call, trial)))
        return
    where = ", ".join(sorted(devices)) + f" of {pilot.id}" if devices else str(pilot.id)
    holding.requeue(manager, (call,), why=f"runs again, for {avoided_until - state.now:g} s not on {where}")
    state.rerun_calls += 1
    for at in (avoided_until, state.now + pause_s):
        key = f"{FAULTS_TIMER}/{int(at) + 1}"  # one timer per second, because thousands of calls may wait together
        if at > state.now and key not in state.timers:
            manager.set_timer(key, float(int(at) + 1))


def _is_library_avoided(trial: Trial, library: Library, now: float) -> bool:
    return any(
        now < fault.pauses_until
        or (
            fault.pilot == library.pilot.id
            and now < fault.avoided_until
            and (not fault.devices or any(device.id in fault.devices for device in library.devices))
        )
        for fault in trial.faults
    )


def _count_faults_on_pilot(trial: Trial, library: Library) -> int:
    return sum(fault.pilot == library.pilot.id for fault in trial.faults)


def _can_run_on_other_pilot(manager: Manager, trial: Trial) -> bool:
    now = manager.state.now
    if any(now < fault.pauses_until for fault in trial.faults):
        return False
    not_now = {fault.pilot: fault.devices for fault in trial.faults if now < fault.avoided_until}
    return any(
        pilot.state is PilotState.HERE
        and (id not in not_now or (bool(not_now[id]) and any(device not in not_now[id] for device in pilot.devices)))
        for id, pilot in manager.state.pilots.items()
    )


def _evidence(call: Call, trial: Trial) -> Failure:
    faults, last = trial.faults, trial.faults[-1].failure
    pilots = len({fault.pilot for fault in faults})
    often = blame.times(len(faults))
    lines = [f"devices, disks or networks failed the call {often}, on {pilots} pilot{'s' * (pilots != 1)}:"]
    lines += [
        f"{fault.pilot}, {show_seconds(fault.at - call.submitted_at)} after the call was submitted: "
        f"{fault.failure.message}"
        for fault in faults
    ]
    text = "\n  ".join(lines)
    return Failure(FailureKind.INFRASTRUCTURE, text, last.pilot, last.library, log=last.log, device=last.device)


def record_call_losses_of_pilot(manager: Manager, pilot: Pilot) -> None:
    """Record a loss, or a walltime cut, for each call that ran on an ended pilot."""
    if pilot.reserved is not None:
        holding.free_reserved_pilot(manager, manager.state.trials[pilot.reserved.id])
    cut = pilot.loss is LossReason.WALLTIME or deadlines.is_near_walltime_end(pilot, manager.state.now)
    if not cut and (pilot.loss is None or pilot.loss.explained):
        return
    ran = {call: library for library in pilot.libraries.values() for call in _possibly_running_calls(manager, library)}
    if cut:
        for call, library in ran.items():
            _record_walltime_cut(manager, library, call)
        return
    loading = [x for x in pilot.libraries.values() if x.state is LibraryState.LOADING]
    others = any(library.zombies for library in pilot.libraries.values())
    alone = len(ran) == 1 and not loading and not others
    for call, library in ran.items():
        _record_loss(manager, library, call, alone=alone)
    if len(loading) == 1 and not ran and not others:
        loading[0].context.lost_loads.append(pilot)
        _fail_calls_after_lost_loads(manager, loading[0].context)


def record_walltime_cuts(manager: Manager, library: Library, running: list[Call]) -> None:
    if deadlines.is_near_walltime_end(library.pilot, manager.state.now):
        for call in running:
            _record_walltime_cut(manager, library, call)


def recheck_calls_of_lost_pilot(manager: Manager, pilot: Pilot) -> None:
    if manager.state.trials:
        manager.apart_due = True
    for context in manager.state.waiting_contexts.values():
        if pilot in context.lost_loads:
            _fail_calls_after_lost_loads(manager, context)
            return


def remove_call_losses_of_pilot(state: State, pilot: Pilot) -> None:
    for trial in state.trials.values():
        trial.losses[:] = [loss for loss in trial.losses if loss.pilot is not pilot or loss.failure is not None]
    for context in state.contexts.values():
        if pilot in context.lost_loads:
            context.lost_loads.remove(pilot)


def has_idle_reserved_pilot(state: State) -> bool:
    return any(not _load(pilot) for pilot in state.reserved.values())


def send_call_to_retry(manager: Manager, library: Library) -> None:
    """Send a call that was cut off, or failed elsewhere, to a library with a free slot."""
    waiting = (each.queue.apart.values() for each in (library.context, *library.context.listed_by.values()))
    for call in chain.from_iterable(waiting):
        trial = manager.state.trials[call.id]
        if (
            (trial.cuts or trial.faults)
            and not blame.needs_exclusive_pilot(trial)
            and library.admits(call)
            and holding.serves(library, call.group)
            and not blame.terminal_call_failure(manager.state, call, trial)
            and _can_run_in_library(manager, library, call, trial)
        ):
            _send_call(manager, library, call)
            return


def process_special_placements(manager: Manager) -> None:
    for context in tuple(manager.state.waiting_contexts.values()):
        context.apart_lacks = False
        for call in tuple(context.queue.apart.values()):
            trial = manager.state.trials[call.id]
            verdict = blame.terminal_call_failure(manager.state, call, trial)
            if verdict is not None:
                ending.fail_call(manager, call, verdict)
            elif not blame.needs_special_placement(manager, call, trial):  # the call did not cause its losses
                context.queue.leave(call)
                holding.free_reserved_pilot(manager, trial)
                context.queue.put_back(call)
                manager.returned[context] = None
            elif blame.needs_exclusive_pilot(trial):
                if not blame.is_waiting_for_loss_reason(trial):
                    _send_alone(manager, call, trial)
            else:
                _send_to_fitting_library(manager, call, trial)


def _possibly_running_calls(manager: Manager, library: Library) -> list[Call]:
    if library.state not in (LibraryState.READY, LibraryState.STOPPING):
        return []
    unsent = manager.sends.get(library, ())
    return [call for call in library.held.values() if call not in unsent]


def _record_loss(
    manager: Manager, library: Library, call: Call, *, alone: bool, failure: Failure | None = None
) -> None:
    now, pilot = manager.state.now, library.pilot
    since = max(call.sent_at, library.ended_at)
    memory = max((size for at, size in library.measured if at >= since), default=0)
    if failure is not None:
        printed = failure.printed
    else:
        log = blame.log_of(pilot, library.id)
        printed = Printed(log, library.printed_to, 0) if log and library.slots == 1 else None
    trial = holding.get_or_create_trial(manager, call)
    trial.losses.append(Loss(now, pilot, library.id, now - call.sent_at, alone, failure, memory, printed))
    del trial.losses[: -2 * MOST_LOSSES]
    count = len(trial.counted)
    more = "" if count < ALONE_AFTER or call.group.options.gang[1] > 1 else "; the call runs alone from now on"
    who = pilot.id if failure is None else format_library_id(library.id)
    call.note(now, f"may have run when {who} died ({count}){more}")


def _record_walltime_cut(manager: Manager, library: Library, call: Call) -> None:
    cut = deadlines.build_walltime_cut(manager.state, library, call)
    holding.get_or_create_trial(manager, call).cuts.append(cut)
    call.note(manager.state.now, f"ran {show_seconds(cut.ran_s)} and was cut off by the walltime of {cut.pilot}")


def _fail_calls_after_lost_loads(manager: Manager, context: Context) -> None:
    counted = [x for x in context.lost_loads if x.loss is not None and not x.loss.explained]
    if len(counted) < libraries.LOADS or not all(pilot.loss_settled for pilot in counted):
        return
    context.lost_loads.clear()
    often = blame.times(len(counted))
    lines = [f"context {context.recipe.name} could not be loaded: its pilot died {often} meanwhile:"]
    lines += [f"{pilot.id}: {blame.loss_description(manager.state, pilot)}" for pilot in counted]
    libraries.fail_waiting_calls(manager, context, Failure(FailureKind.CONTEXT, "\n  ".join(lines), counted[-1].id))


def _candidates(call: Call) -> list[Library]:
    return [
        library
        for context in queues.contexts_serving_group(call.group)
        for library in context.libraries.values()
        if library.is_serving and not any(device.fault for device in library.devices)
    ]


def _send_alone(manager: Manager, call: Call, trial: Trial) -> None:
    pilot, able = trial.pilot, _candidates(call)
    if pilot is None or not any(library.pilot is pilot for library in able):
        holding.free_reserved_pilot(manager, trial)
        here = [each for each in manager.state.pilots.values() if each.state is PilotState.HERE]
        if sum(each.reserved is not None for each in here) >= max(1, len(here) // 2):
            return
        free = [x for x in able if x.pilot.reserved is None and _can_run_in_library(manager, x, call, trial)]
        if not free:
            return
        pilot = min(free, key=lambda x: (_load(x.pilot), x.id)).pilot
        holding.reserve_pilot(manager, trial, pilot, call)
    if not _load(pilot):
        _send_call(manager, next(library for library in able if library.pilot is pilot), call)


def _load(pilot: Pilot) -> int:
    return sum(library.load for library in pilot.libraries.values())


def _can_run_in_library(manager: Manager, library: Library, call: Call, trial: Trial) -> bool:
    if _is_library_avoided(trial, library, manager.state.now):
        return False
    return deadlines.has_time_for_retry(manager.state, library, call, trial)


def _send_to_fitting_library(manager: Manager, call: Call, trial: Trial) -> None:
    able = [x for x in _candidates(call) if _can_run_in_library(manager, x, call, trial)]
    free = [library for library in able if library.load < library.slots and library.admits(call)]
    if free:
        _send_call(manager, min(free, key=lambda x: _count_faults_on_pilot(trial, x)), call)
    elif not able:
        call.group.context.apart_lacks = _can_run_on_other_pilot(manager, trial)


def _send_call(manager: Manager, library: Library, call: Call) -> None:
    queues.remove_call_from_queue(manager, call)
    holding.give(manager, library, call)


SIGKILL = 9
CUTS_BESIDE = 2  # Number of times that other calls may end a call's library before the call runs alone

# A call that kills libraries is poison: it fails after this number of deaths. The node may cause the first death.
POISON_KILLS = 2


def blame_call_for_library_death(
    manager: Manager, library: Library, call: Call, failure: Failure, *, alone: bool
) -> bool:
    """Count the death of a library against a call. Return True if the call fails because of such deaths."""
    text = f"its library died ({failure.message})"
    outside = failure.signal == SIGKILL or failure.kind is FailureKind.CONTEXT
    beside = library.pilot.libraries.values()  # the call's own ranks are not other work
    at_work = any(x.held.keys() - {call.id} or x.state is LibraryState.LOADING for x in beside)
    if alone:
        _record_loss(manager, library, call, alone=not at_work, failure=failure)
        if outside and at_work:
            call.note(manager.state.now, f"{text} while other libraries of {library.pilot.id} ran calls or loaded")
            return False
    past = call.remember()
    past.kills += 1
    call.runs_alone = True
    if not alone:
        past.kills = min(past.kills, POISON_KILLS - 1)
        call.note(manager.state.now, f"{text} while it ran other calls too; the call runs again alone")
        return False
    call.note(manager.state.now, f"{text}, {past.kills} of {POISON_KILLS} before it is given up")
    if past.kills < POISON_KILLS:
        return False
    kind = FailureKind.MEMORY if failure.kind is FailureKind.MEMORY else FailureKind.POISON
    text = f"it ended its library {past.kills} times; the last time: {failure.message}"
    ending.fail_call(manager, call, msgspec.structs.replace(failure, kind=kind, message=text))
    return True


def record_cut_by_other_call(manager: Manager, library: Library, call: Call, failure: Failure) -> None:
    past = call.remember()
    past.cuts_beside += 1
    call.runs_alone |= past.cuts_beside >= CUTS_BESIDE
    more = "; the call runs alone in a library from now on" if call.runs_alone else ""
    call.note(manager.state.now, f"lib-{library.id} was ended while the call ran there ({failure.message}){more}")
