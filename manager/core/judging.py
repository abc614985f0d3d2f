"""What the losses of a call say of it: whether it is tried again, and how. Nothing is changed here."""

from __future__ import annotations

import msgspec

from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Pilot
from stoker.manager.core.state import State
from stoker.manager.core.trials import Loss, Trial
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.ids import show_library
from stoker.units import show_bytes, show_seconds

# After this many losses a call runs alone; the next loss is its end.
ALONE_AFTER = 3

# A call that is never alone when it loses its pilots is given up after so many.
MOST_LOSSES = 10

# A call that the walltime cut off so often is given up.
CUTS = 2


def why_apart(state: State, call: Call) -> str:
    """What a call that is apart waits for, in words."""
    trial = state.trials.get(call.id)
    if trial is None or call.id not in call.group.context.queue.apart:
        return ""
    if not is_suspect(trial) and trial.faults:
        last = trial.faults[-1]
        pause_s = last.pauses_until - state.now
        when = f"in {show_seconds(pause_s)}" if pause_s > 0 else "on another pilot, or there later"
        return f"{last.pilot} failed it ({last.failure.message}); is to run again {when}"
    if not is_suspect(trial):
        return f"waits for a pilot with more than {show_seconds(trial.longest_s)} left of its walltime"
    count = len(trial.counted)
    if awaits_word(trial):
        return f"lost {count} pilots; waits for what the batch system says of the last one"
    where = f": {trial.pilot.id} is kept for it and ends other calls first" if trial.pilot is not None else ""
    return f"lost {count} pilots or libraries while it ran, and is to run alone on a pilot{where}"


def verdict(state: State, call: Call, trial: Trial) -> Failure | None:
    """Why a call ends here; None if it is tried again."""
    if sum(cut.whole for cut in trial.cuts) >= CUTS:
        cut = trial.cuts[-1]
        text = (
            f"ran {show_seconds(cut.ran_s)} and was cut off by the {show_seconds(cut.walltime_s)} walltime, "
            f"{times(len(trial.cuts))}; raise [provider] walltime, or save state with stoker.progress(state=...)"
        )
        return Failure(FailureKind.TIMEOUT, text, cut.pilot, cut.library, log=cut.log)
    counted = trial.counted
    if not counted or not all(loss.is_settled for loss in counted):
        return None
    proved = len(counted) > ALONE_AFTER and counted[-1].alone
    if not proved and len(counted) < MOST_LOSSES:
        return None
    beside = ", the last time with nothing beside it" if counted[-1].alone else ""
    lines = [f"its pilot or library died {times(len(counted))} while it ran{beside}:"]
    lines += [_evidence(state, call, loss) for loss in counted[-MOST_LOSSES:]]
    last = counted[-1]
    if last.failure is not None:
        return msgspec.structs.replace(last.failure, kind=FailureKind.POISON, message="\n  ".join(lines))
    log = f"{last.pilot.folder}/lib-{last.library}.log" if last.pilot.folder else ""
    return Failure(FailureKind.POISON, "\n  ".join(lines), last.pilot.id, last.library, log=log, printed=last.printed)


def _evidence(state: State, call: Call, loss: Loss) -> str:
    what = loss.failure.message if loss.failure is not None else last_words(state, loss.pilot)
    took = f"; {show_library(loss.library)} used up to {show_bytes(loss.memory_bytes)} meanwhile"
    after = show_seconds(loss.at - call.submitted_at)
    return (
        f"{loss.pilot.id}, {after} after the call was submitted, {show_seconds(loss.ran_s)} after it was sent there: "
        f"{what}{took if loss.memory_bytes else ''}"
    )


def last_words(state: State, pilot: Pilot) -> str:
    """What is known of the end of a pilot."""
    block = state.block_of(pilot)
    words = [pilot.loss.value if pilot.loss is not None else "", pilot.notes[-1][1] if pilot.notes else ""]
    if block is not None and block.reason:
        words.append(f"the batch system says {block.reason}")
    return ", ".join(word for word in words if word)


def times(count: int) -> str:
    """How often, in words."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def is_suspect(trial: Trial) -> bool:
    """True if a call is to run alone."""
    return len(trial.counted) >= ALONE_AFTER


def is_apart(manager: Manager, call: Call, trial: Trial) -> bool:
    """True if a call waits apart: it is to run alone, or on another pilot or one with more time left, or its end is to
    be told."""
    if call.group.options.gang[1] > 1 or manager.policies.dispatch.period_s:
        return verdict(manager.state, call, trial) is not None
    return is_suspect(trial) or bool(trial.cuts) or bool(trial.faults)


def awaits_word(trial: Trial) -> bool:
    """True if the call would be given up, were it not for what the batch system may still say."""
    counted = trial.counted
    return len(counted) > ALONE_AFTER and counted[-1].alone and not all(loss.is_settled for loss in counted)
