"""Handle calls that lost their library, pilot or device: requeue, run alone, or fail with evidence.

*Faults* (`FailureKind.INFRASTRUCTURE`): after a fault the call waits apart, and avoids that pilot or device for some
seconds. The call fails after faults on `MOST_PILOTS` pilots, or `MOST_THERE` faults on one pilot.

*Losses*: if a pilot is lost without a harmless reason, each call that may have run on it gets a loss, because a call
that kills its node leaves no evidence. After `ALONE_AFTER` losses the call runs alone on a reserved pilot. If that
pilot or its library also dies, the call fails as poison. The death of a library alone is better evidence
(`blame_killer`), unless the process was killed from outside while other libraries ran.

*Cuts*: a call fails after two cuts by walltimes, if it had most of the walltime each time.

Saved progress (`stoker.progress(state=...)`) resets losses, cuts and faults. Policies with rounds reserve no pilot;
their calls fail after `MOST_LOSSES` losses.
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
from stoker.protocol.calls import CallEnd, Failure, FailureKind
from stoker.protocol.ids import show_call, show_library
from stoker.units import show_seconds

MOST_PILOTS = 3  # A call fails after faults on this number of pilots
MOST_THERE = 3  # A call fails after this number of faults on one pilot
AVOIDS_S = (15.0, 30.0)  # Seconds that a call avoids a pilot after each fault on it; the last value repeats
PAUSE_S = (0.0, 10.0)  # Seconds that a call pauses after its first fault, and after each later fault
FAULTS_TIMER = "fault"


def is_fault(outcome: CallEnd) -> bool:
    """True if the infrastructure failed a call."""
    return outcome.failure is not None and outcome.failure.kind is FailureKind.INFRASTRUCTURE


def requeue_after_fault(manager: Manager, library: Library, call: Call, outcome: CallEnd) -> None:
    assert outcome.failure is not None
    state, pilot, failure = manager.state, library.pilot, outcome.failure
    trial = holding.trial_of(manager, call)
    there = _faults_of_pilot(trial, library)
    devices = frozenset(device.id for device in library.devices) if failure.device else frozenset()
    avoided_until = state.now + AVOIDS_S[min(there, len(AVOIDS_S) - 1)]
    pause_s = PAUSE_S[min(len(trial.faults), len(PAUSE_S) - 1)]
    trial.faults.append(Fault(state.now, pilot.id, devices, avoided_until, state.now + pause_s, failure))
    pilot.note(state.now, f"failed {show_call(call.id)}: {failure.message}")
    blame.ask_why_call_failed(manager, library, call, outcome)
    call.note(state.now, f"{ending.place_of(library)} failed it: {failure.message}")
    pilots = {fault.pilot for fault in trial.faults}
    if len(pilots) >= MOST_PILOTS or there + 1 >= MOST_THERE:
        evidence = _evidence(call, trial)
        ending.end_call(manager, call, msgspec.structs.replace(outcome, failure=evidence))
        return
    where = ", ".join(sorted(devices)) + f" of {pilot.id}" if devices else str(pilot.id)
    holding.requeue(manager, (call,), why=f"runs again, for {avoided_until - state.now:g} s not on {where}")
    libraries.count_runs_again(manager, 1)
    for at in (avoided_until, state.now + pause_s):
        key = f"{FAULTS_TIMER}/{int(at) + 1}"  # one timer per second: thousands of calls may wait for one file server
        if at > state.now and key not in state.timers:
            manager.set_timer(key, float(int(at) + 1))


def _is_avoided(trial: Trial, library: Library, now: float) -> bool:
    return any(
        now < fault.pauses_until
        or (
            fault.pilot == library.pilot.id
            and now < fault.avoided_until
            and (not fault.devices or any(device.id in fault.devices for device in library.devices))
        )
        for fault in trial.faults
    )


def _faults_of_pilot(trial: Trial, library: Library) -> int:
    return sum(fault.pilot == library.pilot.id for fault in trial.faults)


def retry_after_faults(manager: Manager, _: str) -> None:
    manager.apart_due = True


def _other_pilot_may_run(manager: Manager, trial: Trial) -> bool:
    now, faults = manager.state.now, trial.faults
    if any(now < fault.pauses_until for fault in faults):
        return False
    not_now = {fault.pilot: fault.devices for fault in faults if now < fault.avoided_until}
    return any(
        pilot.state is PilotState.HERE
        and (id not in not_now or (bool(not_now[id]) and any(device not in not_now[id] for device in pilot.devices)))
        for id, pilot in manager.state.pilots.items()
    )


def _evidence(call: Call, trial: Trial) -> Failure:
    faults, last = trial.faults, trial.faults[-1].failure
    pilots = len({fault.pilot for fault in faults})
    times = "once" if len(faults) == 1 else f"{len(faults)} times"
    lines = [f"devices, disks or networks failed the call {times}, on {pilots} pilot{'s' * (pilots != 1)}:"]
    lines += [
        f"{fault.pilot}, {show_seconds(fault.at - call.submitted_at)} after the call was submitted: "
        f"{fault.failure.message}"
        for fault in faults
    ]
    return Failure(
        FailureKind.INFRASTRUCTURE, "\n  ".join(lines), last.pilot, last.library, log=last.log, device=last.device
    )


def note_pilot_loss(manager: Manager, pilot: Pilot) -> None:
    """Record the losses and cuts of a pilot's calls before the calls are requeued."""
    if pilot.reserved is not None:
        holding.free_reserved_pilot(manager, manager.state.trials[pilot.reserved.id])
    cut = pilot.loss is LossReason.WALLTIME or deadlines.is_near_its_end(pilot, manager.state.now)
    if not cut and (pilot.loss is None or pilot.loss.explained):
        return
    ran = {call: library for library in pilot.libraries.values() for call in _calls_that_may_run(manager, library)}
    if cut:
        for call, library in ran.items():
            _note_cut(manager, library, call)
        return
    loading = [x for x in pilot.libraries.values() if x.state is LibraryState.LOADING]
    others = any(library.zombies for library in pilot.libraries.values())
    alone = len(ran) == 1 and not loading and not others
    for call, library in ran.items():
        _record_loss(manager, library, call, alone=alone)
    if len(loading) == 1 and not ran and not others:
        libraries.record_lost_load(loading[0].context, pilot)
        _judge_loads(manager, loading[0].context)


def note_cut_calls(manager: Manager, library: Library, running: list[Call]) -> None:
    if deadlines.is_near_its_end(library.pilot, manager.state.now):
        for call in running:
            _note_cut(manager, library, call)


def loss_explained(manager: Manager, pilot: Pilot) -> None:
    if manager.state.trials:
        manager.apart_due = True
    for context in manager.state.waiting_contexts.values():
        if pilot in context.lost_loads:
            _judge_loads(manager, context)
            return


def undo_pilot_loss(state: State, pilot: Pilot) -> None:
    for trial in state.trials.values():
        trial.losses[:] = [loss for loss in trial.losses if loss.pilot is not pilot or loss.failure is not None]
    libraries.undo_lost_load(state, pilot)


def may_begin_alone(state: State) -> bool:
    """True if a reserved pilot has no running calls."""
    return any(not _load(pilot) for pilot in state.reserved.values())


def offer_apart(manager: Manager, library: Library) -> None:
    """Send a free library a call that was cut off or failed on another pilot."""
    waiting = (each.queue.apart.values() for each in (library.context, *library.context.listed_by.values()))
    for call in chain.from_iterable(waiting):
        trial = manager.state.trials[call.id]
        if (
            (trial.cuts or trial.faults)
            and not blame.is_suspect(trial)
            and library.admits(call)
            and holding.serves(library, call.group)
            and not blame.judge_trial(manager.state, call, trial)
            and _may_run_in(manager, library, call, trial)
        ):
            _send_call(manager, library, call)
            return


def settle_apart(manager: Manager) -> None:
    for context in tuple(manager.state.waiting_contexts.values()):
        context.apart_lacks = False
        for call in tuple(context.queue.apart.values()):
            trial = manager.state.trials[call.id]
            verdict = blame.judge_trial(manager.state, call, trial)
            if verdict is not None:
                ending.fail_call(manager, call, verdict)
            elif not blame.is_held_back(manager, call, trial):  # the call did not cause its losses
                queues.dequeue_call(call)
                holding.free_reserved_pilot(manager, trial)
                queues.enqueue_in_place(call)
                manager.returned[context] = None
            elif blame.is_suspect(trial):
                if not blame.awaits_batch_reason(trial):
                    _send_alone(manager, call, trial)
            else:
                _send_where_it_fits(manager, call, trial)


def _calls_that_may_run(manager: Manager, library: Library) -> list[Call]:
    if library.state not in (LibraryState.READY, LibraryState.STOPPING):
        return []
    unsent = manager.sends.get(library, ())
    return [call for call in library.held.values() if call not in unsent]


def _record_loss(
    manager: Manager, library: Library, call: Call, *, alone: bool, failure: Failure | None = None
) -> None:
    now, pilot = manager.state.now, library.pilot
    memory = libraries.used_since(library, max(call.sent_at, library.ended_at))
    printed = failure.printed if failure is not None else blame.printed_in(library)
    trial = holding.trial_of(manager, call)
    trial.losses.append(Loss(now, pilot, library.id, now - call.sent_at, alone, failure, memory, printed))
    del trial.losses[: -2 * MOST_LOSSES]
    count = len(trial.counted)
    more = "" if count < ALONE_AFTER or call.group.options.gang[1] > 1 else "; the call runs alone from now on"
    who = pilot.id if failure is None else show_library(library.id)
    call.note(now, f"may have run when {who} died ({count}){more}")


def _note_cut(manager: Manager, library: Library, call: Call) -> None:
    cut = deadlines.cut_of(manager.state, library, call)
    holding.trial_of(manager, call).cuts.append(cut)
    call.note(manager.state.now, f"ran {show_seconds(cut.ran_s)} and was cut off by the walltime of {cut.pilot}")


def _judge_loads(manager: Manager, context: Context) -> None:
    counted = libraries.lost_pilots(context)
    if not counted:
        return
    name = context.recipe.name
    lines = [f"context {name} could not be loaded: its pilot died {blame.times(len(counted))} meanwhile:"]
    lines += [f"{pilot.id}: {blame.loss_description(manager.state, pilot)}" for pilot in counted]
    libraries.fail_waiting_calls(manager, context, Failure(FailureKind.CONTEXT, "\n  ".join(lines), counted[-1].id))


def _candidates(call: Call) -> list[Library]:
    return [
        library
        for context in queues.serving_contexts(call.group)
        for library in context.libraries.values()
        if library.state is LibraryState.READY
        and library.pilot.state is PilotState.HERE
        and not any(device.fault for device in library.devices)
    ]


def _send_alone(manager: Manager, call: Call, trial: Trial) -> None:
    pilot, able = trial.pilot, _candidates(call)
    if pilot is None or not any(library.pilot is pilot for library in able):
        holding.free_reserved_pilot(manager, trial)
        here = [each for each in manager.state.pilots.values() if each.state is PilotState.HERE]
        if sum(each.reserved is not None for each in here) >= max(1, len(here) // 2):
            return
        free = [x for x in able if x.pilot.reserved is None and _may_run_in(manager, x, call, trial)]
        if not free:
            return
        pilot = min(free, key=lambda x: (_load(x.pilot), x.id)).pilot
        holding.reserve_pilot(manager, trial, pilot, call)
    if not _load(pilot):
        _send_call(manager, next(library for library in able if library.pilot is pilot), call)


def _load(pilot: Pilot) -> int:
    return sum(library.load for library in pilot.libraries.values())


def _may_run_in(manager: Manager, library: Library, call: Call, trial: Trial) -> bool:
    state = manager.state
    return not _is_avoided(trial, library, state.now) and deadlines.trial_fits(state, library, call, trial)


def _send_where_it_fits(manager: Manager, call: Call, trial: Trial) -> None:
    able = [x for x in _candidates(call) if _may_run_in(manager, x, call, trial)]
    free = [library for library in able if library.load < library.slots and library.admits(call)]
    if free:
        _send_call(manager, min(free, key=lambda x: _faults_of_pilot(trial, x)), call)
    elif not able:
        call.group.context.apart_lacks = _other_pilot_may_run(manager, trial)


def _send_call(manager: Manager, library: Library, call: Call) -> None:
    queues.leave_queue(manager, call)
    holding.give(manager, library, call)


SIGKILL = 9
CUTS_BESIDE = 2  # A call runs alone after other calls ended its library this number of times

# A call fails as poison after it killed this number of libraries. The node may have caused the first death.
POISON_KILLS = 2


def blame_killer(manager: Manager, library: Library, call: Call, failure: Failure, *, alone: bool) -> bool:
    """Count the death of a library against a call. Return True if the call fails as poison."""
    text = f"its library died ({failure.message})"
    outside = failure.signal == SIGKILL or failure.kind is FailureKind.CONTEXT
    beside = library.pilot.libraries.values()
    at_work = any(
        x.held.keys() - {call.id} or x.state is LibraryState.LOADING for x in beside
    )  # the ranks of this call do not count
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


def cut_beside(manager: Manager, library: Library, call: Call, failure: Failure) -> None:
    """Record that another call ended the library of this call."""
    past = call.remember()
    past.cuts_beside += 1
    call.runs_alone |= past.cuts_beside >= CUTS_BESIDE
    more = "; the call runs alone in a library from now on" if call.runs_alone else ""
    call.note(manager.state.now, f"lib-{library.id} was ended while the call ran there ({failure.message}){more}")
