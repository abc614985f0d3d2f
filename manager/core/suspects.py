"""Calls that have lost what they ran on: a call can hurt only itself.

A call that takes its whole node with it (memory, a driver, a signal to its pilot) leaves no culprit behind: the pilot
is gone, with all that ran there. Each call that may have run on a pilot that was lost without a reason, or for want of
memory, has a *loss* noted. A loss for which the batch system names another reason (`losses`) does not count. After
`ALONE_AFTER` losses a call runs alone: a pilot is reserved for it, which is given nothing else, begins when all others
there have ended, and is free again after it. If the pilot, or the library, is lost then as well, the call did it: it
fails as poison, with its evidence. Calls that only were beside it end there.

A death of the library alone is better evidence (`poison.killed_its_library`), unless the process was killed from
outside while others ran on the node: then the system may have chosen it although another one took the memory.

A call that is cut off by the end of the walltime is tried on a pilot that has more time left than it ran
(`walltime.trial_fits`). It fails when it was cut off twice although it had most of a walltime each time. One that the
infrastructure failed (`faults`) is tried on another pilot.

What a call has saved in between (`stoker.progress(state=...)`) wipes out what was counted: it gets on.

Under a policy that plans in rounds no pilot is reserved: such a policy sends its calls itself. There a call counts as
alone where nothing else happened to run on its pilot, and `MOST_LOSSES` are the bound.

A context whose load takes the pilot along `loads.LOADS` times in a row, with nothing beside it, cannot be loaded.
"""

from __future__ import annotations

from itertools import chain

from stoker.manager.core import (
    ending,
    faults,
    holding,
    judging,
    libraries,
    loads,
    queues,
    reservations,
    variants,
    verdicts,
    walltime,
)
from stoker.manager.core.judging import ALONE_AFTER, MOST_LOSSES
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Library, Pilot
from stoker.manager.core.phases import LibraryState, PilotState
from stoker.manager.core.state import State
from stoker.manager.core.trials import Loss, Trial
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.ids import show_library
from stoker.units import show_seconds

# ---- what happens


def pilot_lost(manager: Manager, pilot: Pilot) -> None:
    """A pilot is gone with what it held: note whom that may tell of. To be called before its calls go elsewhere."""
    if pilot.reserved is not None:
        reservations.free(manager, manager.state.trials[pilot.reserved.id])
    cut = pilot.loss is LossReason.WALLTIME or walltime.is_near_its_end(pilot, manager.state.now)
    if not cut and (pilot.loss is None or pilot.loss.explained):
        return
    ran = {call: library for library in pilot.libraries.values() for call in _may_run(manager, library)}
    if cut:
        for call, library in ran.items():
            _note_cut(manager, library, call)
        return
    loading = [x for x in pilot.libraries.values() if x.state is LibraryState.LOADING]
    others = any(library.zombies for library in pilot.libraries.values())
    alone = len(ran) == 1 and not loading and not others
    for call, library in ran.items():
        _note(manager, library, call, alone=alone)
    if len(loading) == 1 and not ran and not others:
        loads.lost_with(loading[0].context, pilot)
        _judge_loads(manager, loading[0].context)


def library_killed(manager: Manager, library: Library, call: Call, failure: Failure, *, certain: bool) -> None:
    """A library died while it ran this call and no other."""
    _note(manager, library, call, alone=certain, failure=failure)


def cut_off(manager: Manager, library: Library, running: list[Call]) -> None:
    """A library was ended with its pilot while these calls ran; if that was for the walltime, note it."""
    if walltime.is_near_its_end(library.pilot, manager.state.now):
        for call in running:
            _note_cut(manager, library, call)


def settled(manager: Manager, pilot: Pilot) -> None:
    """The reason of a pilot's loss is known now, or will never be."""
    if manager.state.trials:
        manager.apart_due = True
    for context in manager.state.hungry.values():
        if pilot in context.lost_loads:
            _judge_loads(manager, context)
            return


def back(state: State, pilot: Pilot) -> None:
    """A pilot that counted as lost has come back."""
    for trial in state.trials.values():
        trial.losses[:] = [loss for loss in trial.losses if loss.pilot is not pilot or loss.failure is not None]
    loads.back(state, pilot)


def may_begin(state: State) -> bool:
    """True if nothing runs any more on a pilot that is kept for a call: however that came, the call may begin."""
    return any(not _load(pilot) for pilot in state.reserved.values())


def offer(manager: Manager, library: Library) -> None:
    """A library has a free slot: a call that was cut off before goes first, if there is time enough for it, and one
    that other pilots have failed."""
    waiting = (each.queue.apart.values() for each in (library.context, *library.context.listed_by.values()))
    for call in chain.from_iterable(waiting):
        trial = manager.state.trials[call.id]
        if (
            judging.is_suspect(trial)
            or not (trial.cuts or trial.faults)
            or not library.admits(call)
            or not holding.serves(library, call.group)
            or judging.verdict(manager.state, call, trial)
        ):
            continue
        if _fits(manager, library, call, trial):
            _give(manager, library, call)
            return


# ---- what becomes of it


def settle(manager: Manager) -> None:
    """At the end of an event: judge the calls that are apart, and send those for which there is a place."""
    for context in tuple(manager.state.hungry.values()):
        context.apart_lacks = False
        for call in tuple(context.queue.apart.values()):
            trial = manager.state.trials[call.id]
            verdict = judging.verdict(manager.state, call, trial)
            if verdict is not None:
                ending.fail(manager, call, verdict)
            elif not judging.is_apart(manager, call, trial):  # the losses had other reasons
                queues.take_out(call)
                reservations.free(manager, trial)
                queues.put_in_place(call)
                manager.returned[context] = None
            elif judging.is_suspect(trial):
                if not judging.awaits_word(trial):
                    _send_alone(manager, call, trial)
            else:
                _send_where_it_fits(manager, call, trial)


# ---- records


def _may_run(manager: Manager, library: Library) -> list[Call]:
    """Calls that may have begun in a library. It holds more than it has slots only while calls are so short that any of
    them could have."""
    if library.state not in (LibraryState.READY, LibraryState.STOPPING):
        return []
    unsent = manager.sends.get(library, ())
    return [call for call in library.held.values() if call not in unsent]


def _trial(manager: Manager, call: Call) -> Trial:
    """The record of a call's trials; empty again if it has saved something since they were written."""
    trial = reservations.trial_of(manager, call)
    if call.spec.progress != trial.saved:
        trial.gets_on(call.spec.progress)
    return trial


def _note(manager: Manager, library: Library, call: Call, *, alone: bool, failure: Failure | None = None) -> None:
    now, pilot = manager.state.now, library.pilot
    memory = libraries.used_since(library, max(call.sent_at, library.ended_at))
    printed = failure.printed if failure is not None else verdicts.printed_in(library)
    trial = _trial(manager, call)
    trial.losses.append(Loss(now, pilot, library.id, now - call.sent_at, alone, failure, memory, printed))
    del trial.losses[: -2 * MOST_LOSSES]
    count = len(trial.counted)
    more = "" if count < ALONE_AFTER or call.group.options.gang[1] > 1 else "; it runs alone from now on"
    call.note(
        now, f"may have run when {pilot.id if failure is None else show_library(library.id)} died ({count}){more}"
    )


def _note_cut(manager: Manager, library: Library, call: Call) -> None:
    cut = walltime.cut_of(manager.state, library, call)
    _trial(manager, call).cuts.append(cut)
    call.note(manager.state.now, f"ran {show_seconds(cut.ran_s)} and was cut off by the walltime of {cut.pilot}")


def _judge_loads(manager: Manager, context: Context) -> None:
    """Give up a context that takes its pilots along when it is loaded."""
    counted = loads.lost_pilots(context)
    if not counted:
        return
    lines = [
        f"context {context.recipe.name} could not be loaded: its pilot died {judging.times(len(counted))} meanwhile:"
    ]
    lines += [f"{pilot.id}: {judging.last_words(manager.state, pilot)}" for pilot in counted]
    libraries.fail_waiting(manager, context, Failure(FailureKind.CONTEXT, "\n  ".join(lines), counted[-1].id))


def _candidates(call: Call) -> list[Library]:
    return [
        library
        for context in variants.serving(call.group)
        for library in context.libraries.values()
        if library.state is LibraryState.READY
        and library.pilot.state is PilotState.HERE
        and not any(device.fault for device in library.devices)
    ]


def _send_alone(manager: Manager, call: Call, trial: Trial) -> None:
    """Reserve a pilot for a call, and send it there once nothing else runs."""
    pilot, able = trial.pilot, _candidates(call)
    if pilot is None or not any(library.pilot is pilot for library in able):
        reservations.free(manager, trial)
        here = [each for each in manager.state.pilots.values() if each.state is PilotState.HERE]
        if sum(each.reserved is not None for each in here) >= max(1, len(here) // 2):
            return
        free = [x for x in able if x.pilot.reserved is None and _fits(manager, x, call, trial)]
        if not free:
            return
        pilot = min(free, key=lambda x: (_load(x.pilot), x.id)).pilot
        reservations.reserve(manager, trial, pilot, call)
    if not _load(pilot):
        _give(manager, next(library for library in able if library.pilot is pilot), call)


def _load(pilot: Pilot) -> int:
    return sum(library.load for library in pilot.libraries.values())


def _fits(manager: Manager, library: Library, call: Call, trial: Trial) -> bool:
    """True if a call may run on a pilot now: there is time enough, and the pilot has not failed it just now."""
    return not faults.avoided(trial, library, manager.state.now) and walltime.trial_fits(
        manager.state, library, call, trial
    )


def _send_where_it_fits(manager: Manager, call: Call, trial: Trial) -> None:
    """Send a call to a library with a free slot: one that was cut off to a pilot that has more time left than it had,
    one that was failed to another pilot, or after a while."""
    able = [x for x in _candidates(call) if _fits(manager, x, call, trial)]
    free = [library for library in able if library.load < library.slots and library.admits(call)]
    if free:
        _give(manager, min(free, key=lambda x: faults.count(trial, x)), call)
    elif not able:
        call.group.context.apart_lacks = faults.has_elsewhere(manager, trial)


def _give(manager: Manager, library: Library, call: Call) -> None:
    queues.leave(manager, call)
    holding.give(manager, library, call)
