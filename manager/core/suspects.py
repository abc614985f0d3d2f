"""Calls that have lost what they ran on: a call can hurt only itself.

A call that takes its whole node with it (memory, a driver, a signal to its pilot) leaves no culprit behind: the pilot
is gone, with all that ran there. Each call that may have run on a pilot that was lost without a reason, or for want of
memory, has a *loss* noted. A loss for which the batch system names another reason (`losses`) does not count. After
`ALONE_AFTER` losses a call runs alone: a pilot is reserved for it, which is given nothing else, begins when all others
there have ended, and is free again after it. If the pilot, or the library, is lost then as well, the call did it: it
fails as poison, with its evidence. Calls that only were beside it end there.

A death of the library alone is better evidence (`calls.killed_its_library`), unless the process was killed from outside
while others ran on the node: then the system may have chosen it although another one took the memory.

A call that is cut off by the end of the walltime is tried on a pilot that has more time left than it ran. It fails when
it was cut off twice although it had most of a walltime each time.

What a call has saved in between (`stoker.progress(state=...)`) wipes out what was counted: it gets on.

Under a policy that plans in rounds no pilot is reserved: such a policy sends its calls itself. There a call counts as
alone where nothing else happened to run on its pilot, and `MOST_LOSSES` are the bound.

A context whose load takes the pilot along `LOADS` times in a row, with nothing beside it, cannot be loaded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stoker.manager.core import calls, feeding, libraries, losses
from stoker.manager.core.phases import LibraryState, PilotState
from stoker.manager.core.state import Call, Context, Library, Pilot, State
from stoker.manager.core.trials import Cut, Loss, Trial
from stoker.manager.core.walltime import CAUTION, has_time
from stoker.manager.protocol.blocks import LossReason
from stoker.manager.protocol.calls import Failure, FailureKind
from stoker.manager.protocol.ids import show_library
from stoker.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from stoker.manager.core.core import Core

ALONE_AFTER = 3
"""After this many losses a call runs alone; the next loss is its end."""
MOST_LOSSES = 10
"""A call that is never alone when it loses its pilots is given up after so many."""
LOADS = 4
"""Pilots that are lost in a row while they load one context, and do nothing else."""
CUTS = 2
"""A call that the walltime cut off so often is given up."""
_FRESH = 0.9
"""A pilot that has this part of the longest walltime left is as good as any."""
_WHOLE = 0.6
"""A cut counts if the call had this part of its pilot's whole time."""


# ---- what happens


def pilot_lost(core: Core, pilot: Pilot) -> None:
    """A pilot is gone with what it held: note whom that may tell of. To be called before its calls go elsewhere."""
    if pilot.reserved is not None:
        _free(core, core.state.trials[pilot.reserved.id])
    cut = pilot.loss is LossReason.WALLTIME or losses.near_walltime(pilot, core.state.now)
    if not cut and (pilot.loss is None or pilot.loss.explained):
        return
    ran = {call: library for library in pilot.libraries.values() for call in _may_run(core, library)}
    if cut:
        for call, library in ran.items():
            _note_cut(core, library, call)
        return
    loading = [x for x in pilot.libraries.values() if x.state is LibraryState.LOADING]
    others = any(library.zombies for library in pilot.libraries.values())
    alone = len(ran) == 1 and not loading and not others
    for call, library in ran.items():
        _note(core, library, call, alone=alone)
    if len(loading) == 1 and not ran and not others:
        loading[0].context.lost_loads.append(pilot)
        _judge_loads(core, loading[0].context)


def library_killed(core: Core, library: Library, call: Call, failure: Failure, *, certain: bool) -> None:
    """A library died while it ran this call and no other."""
    _note(core, library, call, alone=certain, failure=failure)


def cut_off(core: Core, library: Library, running: list[Call]) -> None:
    """A library was ended with its pilot while these calls ran; if that was for the walltime, note it."""
    if losses.near_walltime(library.pilot, core.state.now):
        for call in running:
            _note_cut(core, library, call)


def settled(core: Core, pilot: Pilot) -> None:
    """The reason of a pilot's loss is known now, or will never be."""
    if core.state.trials:
        core.apart_due = True
    for context in core.state.hungry.values():
        if pilot in context.lost_loads:
            _judge_loads(core, context)
            return


def back(state: State, pilot: Pilot) -> None:
    """A pilot that counted as lost has come back."""
    for trial in state.trials.values():
        trial.losses[:] = [loss for loss in trial.losses if loss.pilot is not pilot or loss.failure is not None]
    for context in state.contexts.values():
        if pilot in context.lost_loads:
            context.lost_loads.remove(pilot)


def supply(core: Core, context: Context) -> None:
    """Libraries of a context, or their pilots, have changed: calls that are apart may find a place now."""
    core.apart_due |= bool(context.queue.apart)


def ended(core: Core, id: int) -> None:
    """A call has ended."""
    trial = core.state.trials.pop(id, None)
    if trial is not None:
        _free(core, trial)


def let_go(core: Core, call: Call) -> None:
    """A call is held by no library any more: the pilot that was reserved for it serves others."""
    trial = core.state.trials.get(call.id)
    if trial is not None:
        _free(core, trial)


def put_back(core: Core, call: Call) -> None:
    """A call waits again: in its place in the queue, or apart."""
    queue = call.group.context.queue
    trial = core.state.trials.get(call.id)
    if trial is None or not _is_apart(core, call, trial):
        queue.put_back(call)
    else:
        queue.put_apart(call)
        core.apart_due = True


def may_begin(state: State) -> bool:
    """True if nothing runs any more on a pilot that is kept for a call: however that came, the call may begin."""
    return any(not _load(pilot) for pilot in state.reserved.values())


def offer(core: Core, library: Library) -> None:
    """A library has a free slot: a call that was cut off before goes first, if there is time enough for it."""
    for call in library.context.queue.apart.values():
        trial = core.state.trials[call.id]
        if _is_suspect(trial) or not trial.cuts or not library.admits(call) or _verdict(core.state, call, trial):
            continue
        if _has_time(core, library, call, trial):
            _give(core, library, call)
            return


# ---- what becomes of it


def settle(core: Core) -> None:
    """At the end of an event: judge the calls that are apart, and send those for which there is a place."""
    for context in tuple(core.state.hungry.values()):
        context.apart_lacks = False
        for call in tuple(context.queue.apart.values()):
            trial = core.state.trials[call.id]
            verdict = _verdict(core.state, call, trial)
            if verdict is not None:
                calls.fail(core, call, verdict)
            elif not _is_apart(core, call, trial):  # the losses had other reasons
                context.queue.leave(call)
                _free(core, trial)
                context.queue.put_back(call)
                core.returned[context] = None
            elif _is_suspect(trial):
                if not _awaits_word(trial):
                    _send_alone(core, call, trial)
            else:
                _send_in_time(core, call, trial)


def why_apart(state: State, call: Call) -> str:
    """What a call that is apart waits for, in words."""
    trial = state.trials.get(call.id)
    if trial is None or call.id not in call.group.context.queue.apart:
        return ""
    if not _is_suspect(trial):
        return f"waits for a pilot with more than {show_seconds(trial.longest_s)} left of its walltime"
    count = len(trial.counted)
    if _awaits_word(trial):
        return f"lost {count} pilots; waits for what the batch system says of the last one"
    where = f": {trial.pilot.id} is kept for it and ends other calls first" if trial.pilot is not None else ""
    return f"lost {count} pilots or libraries while it ran, and is to run alone on a pilot{where}"


def _verdict(state: State, call: Call, trial: Trial) -> Failure | None:
    """Why a call ends here; None if it is tried again."""
    if sum(cut.whole for cut in trial.cuts) >= CUTS:
        cut = trial.cuts[-1]
        text = (
            f"ran {show_seconds(cut.ran_s)} and was cut off by the {show_seconds(cut.walltime_s)} walltime, "
            f"{_times(len(trial.cuts))}; raise [provider] walltime, or save state with stoker.progress(state=...)"
        )
        return Failure(FailureKind.TIMEOUT, text, cut.pilot, cut.library, log=cut.log)
    counted = trial.counted
    if not counted or not all(loss.is_settled for loss in counted):
        return None
    proved = len(counted) > ALONE_AFTER and counted[-1].alone
    if not proved and len(counted) < MOST_LOSSES:
        return None
    beside = ", the last time with nothing beside it" if counted[-1].alone else ""
    lines = [f"its pilot or library died {_times(len(counted))} while it ran{beside}:"]
    lines += [_evidence(state, call, loss) for loss in counted[-MOST_LOSSES:]]
    last, failure = counted[-1], next((loss.failure for loss in reversed(counted) if loss.failure is not None), None)
    log = f"{last.pilot.folder}/lib-{last.library}.log" if last.pilot.folder else ""
    if failure is None:
        return Failure(FailureKind.POISON, "\n  ".join(lines), last.pilot.id, last.library, log=log)
    return Failure(
        FailureKind.POISON, "\n  ".join(lines), last.pilot.id, last.library, failure.signal, failure.exit_code,
        failure.tail, failure.log or log,
    )  # fmt: skip


def _evidence(state: State, call: Call, loss: Loss) -> str:
    what = loss.failure.message if loss.failure is not None else _said(state, loss.pilot)
    took = f"; {show_library(loss.library)} used {show_bytes(loss.memory_bytes)} when it was measured last"
    after = show_seconds(loss.at - call.submitted_at)
    return (
        f"{loss.pilot.id}, {after} after the call was submitted, {show_seconds(loss.ran_s)} after it was sent there: "
        f"{what}{took if loss.memory_bytes else ''}"
    )


def _said(state: State, pilot: Pilot) -> str:
    """What is known of the end of a pilot."""
    block = losses.block_of(state, pilot)
    words = [pilot.loss.value if pilot.loss is not None else "", pilot.notes[-1][1] if pilot.notes else ""]
    if block is not None and block.reason:
        words.append(f"the batch system says {block.reason}")
    return ", ".join(word for word in words if word)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


# ---- the books


def _may_run(core: Core, library: Library) -> list[Call]:
    """Calls that may have begun in a library. It holds more than it has slots only while calls are so short that any of
    them could have."""
    if library.state not in (LibraryState.READY, LibraryState.STOPPING):
        return []
    unsent = core.sends.get(library, ())
    return [call for call in library.held.values() if call not in unsent]


def _trial(core: Core, call: Call) -> Trial:
    """The books of a call; empty again if it has saved something since they were written."""
    trial = core.state.trials.get(call.id)
    if trial is None:
        trial = core.state.trials[call.id] = Trial()
    if call.spec.progress != trial.saved:
        trial.saved = call.spec.progress
        trial.losses.clear()
        trial.cuts.clear()
    return trial


def _note(core: Core, library: Library, call: Call, *, alone: bool, failure: Failure | None = None) -> None:
    now, pilot = core.state.now, library.pilot
    memory = max(library.memory_bytes, library.device_bytes)
    trial = _trial(core, call)
    trial.losses.append(Loss(now, pilot, library.id, now - call.sent_at, alone, failure, memory))
    del trial.losses[: -2 * MOST_LOSSES]
    count = len(trial.counted)
    more = "" if count < ALONE_AFTER or call.group.options.gang[1] > 1 else "; it runs alone from now on"
    call.note(
        now, f"may have run when {pilot.id if failure is None else show_library(library.id)} died ({count}){more}"
    )


def _note_cut(core: Core, library: Library, call: Call) -> None:
    pilot, now = library.pilot, core.state.now
    source = core.state.sources.get(pilot.source)
    walltime_s = source.source.walltime_s if source is not None and source.source.walltime_s else pilot.lasts_s
    ran_s = min(now - max(call.sent_at, library.ready_at), pilot.lasts_s or math.inf)
    log = f"{pilot.folder}/lib-{library.id}.log" if pilot.folder else ""
    whole = ran_s >= _WHOLE * pilot.lasts_s
    trial = _trial(core, call)
    trial.cuts.append(Cut(ran_s, walltime_s, whole, pilot.id, library.id, log))
    call.note(now, f"ran {show_seconds(ran_s)} and was cut off by the walltime of {pilot.id}")


def _judge_loads(core: Core, context: Context) -> None:
    """Give up a context that takes its pilots along when it is loaded."""
    counted = [x for x in context.lost_loads if x.loss is not None and not x.loss.explained]
    if len(counted) < LOADS or not all(pilot.loss_settled for pilot in counted):
        return
    lines = [f"context {context.recipe.name} could not be loaded: its pilot died {_times(len(counted))} meanwhile:"]
    lines += [f"{pilot.id}: {_said(core.state, pilot)}" for pilot in counted]
    context.lost_loads.clear()
    libraries.fail_waiting(core, context, Failure(FailureKind.CONTEXT, "\n  ".join(lines), counted[-1].id))


# ---- where they run


def _is_suspect(trial: Trial) -> bool:
    return len(trial.counted) >= ALONE_AFTER


def _is_apart(core: Core, call: Call, trial: Trial) -> bool:
    """True if a call waits apart: it is to run alone, or on a pilot with more time left, or its end is to be told."""
    if call.group.options.gang[1] > 1 or core.policies.dispatch.period_s:
        return _verdict(core.state, call, trial) is not None
    return _is_suspect(trial) or bool(trial.cuts)


def _awaits_word(trial: Trial) -> bool:
    """True if the call would be given up, were it not for what the batch system may still say."""
    counted = trial.counted
    return len(counted) > ALONE_AFTER and counted[-1].alone and not all(loss.is_settled for loss in counted)


def _candidates(call: Call) -> list[Library]:
    return [
        library
        for library in call.group.context.libraries.values()
        if library.state is LibraryState.READY
        and library.pilot.state is PilotState.HERE
        and not any(device.fault for device in library.devices)
    ]


def _send_alone(core: Core, call: Call, trial: Trial) -> None:
    """Reserve a pilot for a call, and send it there once nothing else runs."""
    pilot, able = trial.pilot, _candidates(call)
    if pilot is None or not any(library.pilot is pilot for library in able):
        _free(core, trial)
        here = [each for each in core.state.pilots.values() if each.state is PilotState.HERE]
        if sum(each.reserved is not None for each in here) >= max(1, len(here) // 2):
            return
        free = [x for x in able if x.pilot.reserved is None and _has_time(core, x, call, trial)]
        if not free:
            return
        pilot = min(free, key=lambda x: (_load(x.pilot), x.id)).pilot
        trial.pilot, pilot.reserved = pilot, call
        core.state.reserved[pilot.id] = pilot
        for library in pilot.libraries.values():
            feeding.reclass(core, library)
    if not _load(pilot):
        _give(core, next(library for library in able if library.pilot is pilot), call)


def _load(pilot: Pilot) -> int:
    return sum(library.load for library in pilot.libraries.values())


def _send_in_time(core: Core, call: Call, trial: Trial) -> None:
    """Send a call that was cut off to a library with a free slot, on a pilot that has more time left than it had."""
    able = [library for library in _candidates(call) if _has_time(core, library, call, trial)]
    free = [library for library in able if library.load < library.slots and library.admits(call)]
    if free:
        _give(core, free[0], call)
    elif not able:
        call.group.context.apart_lacks = True


def _has_time(core: Core, library: Library, call: Call, trial: Trial) -> bool:
    """True if a pilot has more time left than a call ran when it was cut off, or about as much as any pilot has."""
    state, pilot = core.state, library.pilot
    if not has_time(state.now, library, max(call.group.cost.run_s, trial.longest_s)):
        return False
    if not trial.cuts or not pilot.ends_at:
        return True
    left_s = pilot.ends_at - state.now
    lasts_s = [source.source.walltime_s for source in state.sources.values()]
    lasts_s += [each.lasts_s for each in state.pilots.values()]
    return left_s > CAUTION * trial.longest_s or left_s > _FRESH * max(lasts_s)


def _give(core: Core, library: Library, call: Call) -> None:
    context = call.group.context
    context.queue.leave(call)
    calls.fed(core, context)
    calls.give(core, library, call)


def _free(core: Core, trial: Trial) -> None:
    """The pilot that was reserved serves others again."""
    pilot, trial.pilot = trial.pilot, None
    if pilot is None:
        return
    pilot.reserved = None
    core.state.reserved.pop(pilot.id, None)
    core.supply_changed = core.apart_due = True
    for library in pilot.libraries.values():
        feeding.reclass(core, library)
        if library.context.queue.count:
            core.returned[library.context] = None
