"""Find the causes of failures: calls that kill pilots, pilots that cannot load contexts, and the advisor's verdicts.

If a function fails repeatedly on a pilot, the manager asks the advisor at once, after `SOON_S` seconds, and then at
most every `AGAIN_S` seconds. The verdict arrives later, or never.

A failure that a pilot causes, for example by a full disk, does not count against a recipe. The pilot is *unfit* for
`UNFIT_RETRY_S` seconds: it does not load the context. If the load failed after its files were fetched, the pilot loads
no context.
"""

from __future__ import annotations

import msgspec

from stoker.manager.core.events import AskAdvice, OfFailure, OfPace, VerdictAdvice
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Gang, Judged, Library, LibraryState, Pilot
from stoker.manager.core.state import Loss, State, Trial
from stoker.protocol.calls import CallEnd, Failure, FailureKind, Printed
from stoker.protocol.ids import CallId, LibraryId, format_library_id, show_call
from stoker.protocol.to_manager import LibraryPhase
from stoker.units import show_bytes, show_seconds

ALONE_AFTER = 3  # A call runs alone after this many deaths of its library or pilot. After one more death the call fails
MOST_LOSSES = 10  # A call fails after this many deaths of its library or pilot, even if the call never ran alone
CUTS = 2  # A call fails after this many walltime cuts that count against it (`Cut.whole`)


def special_placement_reason(state: State, call: Call) -> str:
    """Return why a call waits apart from the queue (see `retries`), or an empty text."""
    trial = state.trials.get(call.id)
    if trial is None or call.id not in call.group.context.queue.apart:
        return ""
    count = len(trial.counted)
    if count < ALONE_AFTER and trial.faults:
        last = trial.faults[-1]
        pause_s = last.pauses_until - state.now
        when = f"in {show_seconds(pause_s)}" if pause_s > 0 else "on another pilot, or later on this one"
        return f"{last.pilot} failed the call ({last.failure.message}); the call runs again {when}"
    if count < ALONE_AFTER:
        return f"the call needs a pilot with more than {show_seconds(trial.longest_s)} of walltime left"
    if is_waiting_for_loss_reason(trial):
        return f"the call lost {count} pilots, and waits for the batch system's record of the last pilot"
    where = f": {trial.pilot.id} is kept for the call and ends other calls first" if trial.pilot is not None else ""
    return f"the call lost {count} pilots or libraries, and runs alone on a pilot next{where}"


def terminal_call_failure(state: State, call: Call, trial: Trial) -> Failure | None:
    """Return the failure that ends a call, or None if the call may run again."""
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
    beside = ", the last time with no other call" if counted[-1].alone else ""
    lines = [f"its pilot or library died {times(len(counted))} while it ran{beside}:"]
    lines += [_evidence(state, call, loss) for loss in counted[-MOST_LOSSES:]]
    last, text = counted[-1], "\n  ".join(lines)
    if last.failure is not None:
        return msgspec.structs.replace(last.failure, kind=FailureKind.POISON, message=text)
    log = log_of(last.pilot, last.library)
    return Failure(FailureKind.POISON, text, last.pilot.id, last.library, log=log, printed=last.printed)


def _evidence(state: State, call: Call, loss: Loss) -> str:
    what = loss.failure.message if loss.failure is not None else loss_description(state, loss.pilot)
    took = f"; {format_library_id(loss.library)} used up to {show_bytes(loss.memory_bytes)} meanwhile"
    after = show_seconds(loss.at - call.submitted_at)
    return (
        f"{loss.pilot.id}, {after} after the call was submitted, {show_seconds(loss.ran_s)} after it was sent there: "
        f"{what}{took if loss.memory_bytes else ''}"
    )


def loss_description(state: State, pilot: Pilot) -> str:
    block = state.block_of(pilot)
    words = [pilot.loss.value if pilot.loss is not None else "", pilot.notes[-1][1] if pilot.notes else ""]
    if block is not None and block.reason:
        words.append(f"the batch system reports {block.reason}")
    return ", ".join(word for word in words if word)


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def needs_exclusive_pilot(trial: Trial) -> bool:
    return len(trial.counted) >= ALONE_AFTER


def needs_special_placement(manager: Manager, call: Call, trial: Trial) -> bool:
    if call.group.options.gang[1] > 1 or manager.policies.dispatch.period_s:
        return terminal_call_failure(manager.state, call, trial) is not None
    return needs_exclusive_pilot(trial) or bool(trial.cuts) or bool(trial.faults)


def is_waiting_for_loss_reason(trial: Trial) -> bool:
    """True if a call may not fail yet: the batch system may report a harmless reason for its last loss."""
    counted = trial.counted
    return len(counted) > ALONE_AFTER and counted[-1].alone and not all(loss.is_settled for loss in counted)


AGAIN_S = 60.0
SOON_S = 2.0  # Minimum seconds between the first two questions to the advisor about a function
FORGET_S = 600.0  # Seconds without failures after which the earlier failures of a function are forgotten
MOST_NAMES = 64  # Maximum number of failing functions, per pilot, about which the manager asks the advisor
SHOWN_LINES = 2
LEAST_SURE = 0.5  # Minimum certainty of verdicts in histories. Policies and `stoker explain --json` get all verdicts
KEPT = 20  # Number of newest verdicts that are kept for each pilot
SAID_CHARACTERS = 4_000
NO_CALL = CallId(-1)

# The manager does not ask the advisor about these kinds of failures, because their reasons are known.
UNASKED = frozenset({
    FailureKind.CANCELLED, FailureKind.DROPPED, FailureKind.TIMEOUT, FailureKind.NO_DEVICE, FailureKind.SERIALIZATION,
    FailureKind.GANG, FailureKind.CONTEXT,
})  # fmt: skip


def ask_why_call_failed(manager: Manager, holder: Library | Gang | None, call: Call, outcome: CallEnd) -> None:
    failure = outcome.failure
    if not isinstance(holder, Library) or (failure is not None and failure.kind in UNASKED):
        return
    said = outcome.raised if failure is None else "\n".join((failure.message, failure.tail))
    printed = outcome.printed or (failure.printed if failure is not None else None) or Printed("", 0, 0)
    _ask(manager, holder, call.id, name=call.group.function.name, printed=printed, said=said)


def ask_why_load_failed(manager: Manager, library: Library, failure: Failure) -> None:
    said = "\n".join((failure.message, failure.tail))
    printed = Printed(failure.log or log_of(library.pilot, library.id), 0, 0)
    _ask(manager, library, NO_CALL, name=library.context.recipe.name, printed=printed, said=said)


def record_advisor_verdict(manager: Manager, about: OfFailure, verdict: VerdictAdvice) -> bool:
    """Record the advisor's verdict on a failure. Return False if the pilot has left."""
    state = manager.state
    sure = f"{verdict.kind} ({verdict.component}), {verdict.sure:.0%} sure: {verdict.means}"
    call = state.failed.get(about.call) or state.calls.get(about.call)
    is_shown = verdict.sure >= LEAST_SURE
    if call is not None and is_shown:
        call.note(state.now, "\n  ".join([f"why it failed: {sure}", *verdict.proof[:SHOWN_LINES]]))
    pilot = state.pilots.get(about.pilot)
    if pilot is None:
        return False
    what = show_call(about.call) if about.call != NO_CALL else "a load"
    if is_shown:
        pilot.note(state.now, f"why {what} failed: {sure}")
    pilot.verdicts.append(Judged(state.now, about.call, about.devices, verdict))
    del pilot.verdicts[:-KEPT]
    return True


def _ask(manager: Manager, library: Library, call: CallId, *, name: str, printed: Printed, said: str) -> None:
    now, pilot = manager.state.now, library.pilot
    asked = pilot.asked_why
    before = asked.get(name)
    if before is not None and now - before[0] < (SOON_S if before[1] == 1 else AGAIN_S):
        return
    if before is None and len(asked) >= MOST_NAMES:
        for old in [old for old, (at, _) in asked.items() if now - at >= FORGET_S]:
            del asked[old]
        if len(asked) >= MOST_NAMES:
            return
    asked[name] = (now, 1 if before is None or now - before[0] >= FORGET_S else before[1] + 1)
    about = OfFailure(pilot.id, library.id, call, tuple(device.id for device in library.devices))
    said = said[-SAID_CHARACTERS:]
    manager.out.append(AskAdvice(about, name, printed.path, printed.start, printed.end, said))


def log_of(pilot: Pilot, library: LibraryId) -> str:
    return f"{pilot.folder}/lib-{library}.log" if pilot.folder else ""


PRINTING_TIMER = "pace"
EVERY_S = 15.0
MOST = 64  # Maximum number of questions to the advisor per timer event. Later events ask about the other calls


def ask_advisor_about_output(manager: Manager, _: str) -> None:
    state = manager.state
    busy = [library for library in state.libraries.values() if library.held and library.pilot.folder]
    asked = [question for library in busy if (question := _build_output_question(manager, library)) is not None]
    first = int(state.now / EVERY_S) * MOST % max(1, len(asked))
    manager.out += (asked[first:] + asked[:first])[:MOST]
    if busy:
        manager.set_timer(PRINTING_TIMER, state.now + EVERY_S)


def _build_output_question(manager: Manager, library: Library) -> AskAdvice | None:
    state = manager.state
    if library.slots > 1 or library.zombies or library.state is not LibraryState.READY:
        return None
    call = next(iter(library.held.values()))
    runs_since = max(call.sent_at, library.ready_at, library.ended_at)
    if call.id in state.reports or isinstance(call.holder, Gang) or state.now - runs_since < EVERY_S:
        return None
    about, log = OfPace(library.id, call.id), log_of(library.pilot, library.id)
    return AskAdvice(about, call.group.function.name, log, start=library.printed_to)


UNFIT_RETRY_S = (5.0, 20.0, 80.0, 300.0)  # Seconds until the next load after each failure; the last value repeats
LASTING_TIMES = 3  # A pilot counts as permanently unfit after this number of failed loads in a row
EVERY = ""  # Key in `Pilot.unfit` that means all contexts


def mark_pilot_unfit(state: State, library: Library, failure: Failure, *, loading: bool, waits_s: float) -> None:
    """Record that a pilot cannot load a context, or any context. `waits_s`: seconds until its cache has room, or 0.

    Further failures of a pilot that is already unfit are not counted.
    """
    pilot, context = library.pilot, library.context
    everything = loading and library.phase is not LibraryPhase.FETCHING
    what = "anything" if everything else context.recipe.name
    key = EVERY if everything else context.recipe.key
    times = pilot.unfit_times.get(key, 0)
    if times and not waits_s and state.now < pilot.unfit[key][0]:
        return
    pilot.unfit_times[key] = 0 if waits_s else times + 1
    again_s = waits_s or UNFIT_RETRY_S[min(times, len(UNFIT_RETRY_S) - 1)]
    known = waits_s and pilot.unfit.get(key, (0.0, ""))[1] == failure.message
    pilot.unfit[key] = state.now + again_s, failure.message
    if not known:
        pilot.note(state.now, f"cannot load {what}: {failure.message}")


def mark_pilot_fit(pilot: Pilot, key: str) -> None:
    for about in (EVERY, key):
        pilot.unfit.pop(about, None)
        pilot.unfit_times.pop(about, None)


def pilot_unfit_reason(pilot: Pilot, key: str, now: float) -> str:
    for about in (EVERY, key):
        until, why = pilot.unfit.get(about, (0.0, ""))
        if now < until:
            return why
    return ""


def is_pilot_repeatedly_unfit(pilot: Pilot, key: str) -> bool:
    return sum(pilot.unfit_times.get(about, 0) for about in (EVERY, key)) >= LASTING_TIMES
