"""Find the causes of failures: calls that kill pilots, pilots that cannot load contexts, and the advisor's verdicts.

If a function fails on a pilot, the manager asks the advisor for the cause at once. If it fails again, the manager asks
after `SECOND_QUESTION_AFTER_S` seconds, and then at most every `QUESTION_INTERVAL_S` seconds. It may get no answer.

If a pilot causes a failed load, for example by a full disk, the failure does not count against the context. Instead
the pilot is *unfit*: it does not load this context for `UNFIT_RETRY_S` seconds. If the load failed after its files
were fetched, the pilot loads no context at all.
"""

from __future__ import annotations

import msgspec

from stoker.manager.core.events import AskAdvice, OfFailure, OfPace, VerdictAdvice
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Gang, Library, LibraryState, Pilot, RecordedVerdict
from stoker.manager.core.state import CallSetbacks, Loss, State
from stoker.protocol.calls import CallEnd, Failure, FailureKind, OutputRange
from stoker.protocol.ids import CallId, LibraryId, format_call_id, format_library_id
from stoker.protocol.to_manager import LibraryPhase
from stoker.units import show_bytes, show_seconds

# A call runs alone after this many deaths of its library or pilot, and fails after one more
LOSSES_BEFORE_RUNNING_ALONE = 3
MAX_LOSSES = 10  # A call fails after this many deaths of its library or pilot, even if it never ran alone
MAX_COUNTED_CUTS = 2  # A call fails if the walltime of its pilot cut it off this many times (see `WalltimeCut`)


def describe_why_set_aside(state: State, call: Call) -> str:
    """Return why a call waits outside the queue (see `retries`); empty if it waits in the queue."""
    setbacks = state.setbacks.get(call.id)
    if setbacks is None or call.id not in call.group.context.queue.set_aside_calls:
        return ""
    count = len(setbacks.counted_losses)
    if count < LOSSES_BEFORE_RUNNING_ALONE and setbacks.faults:
        last = setbacks.faults[-1]
        pause_s = last.pauses_until - state.now
        when = f"in {show_seconds(pause_s)}" if pause_s > 0 else "on another pilot, or later on this one"
        return f"{last.pilot} failed the call ({last.failure.message}); the call runs again {when}"
    if count < LOSSES_BEFORE_RUNNING_ALONE:
        return f"the call needs a pilot with more than {show_seconds(setbacks.longest_cut_run_s)} of walltime left"
    if is_waiting_for_loss_reason(setbacks):
        return f"the call lost {count} pilots, and waits for the batch system's record of the last pilot"
    where = (
        f": {setbacks.pilot.id} is kept for the call and ends other calls first" if setbacks.pilot is not None else ""
    )
    return f"the call lost {count} pilots or libraries, and runs alone on a pilot next{where}"


def find_final_failure(state: State, call: Call, setbacks: CallSetbacks) -> Failure | None:
    """Return the failure with which a call must end, or None if the call may run again."""
    if sum(cut.counts_against_call for cut in setbacks.cuts) >= MAX_COUNTED_CUTS:
        cut = setbacks.cuts[-1]
        text = (
            f"ran {show_seconds(cut.ran_s)} and was cut off by the {show_seconds(cut.walltime_s)} walltime, "
            f"{show_times(len(setbacks.cuts))}; raise [provider] walltime, "
            "or save state with stoker.progress(state=...)"
        )
        return Failure(FailureKind.TIMEOUT, text, cut.pilot, cut.library, log=cut.log)
    counted = setbacks.counted_losses
    if not counted or not all(loss.is_settled for loss in counted):
        return None
    proved = len(counted) > LOSSES_BEFORE_RUNNING_ALONE and counted[-1].was_alone
    if not proved and len(counted) < MAX_LOSSES:
        return None
    beside = ", the last time with no other call" if counted[-1].was_alone else ""
    lines = [f"its pilot or library died {show_times(len(counted))} while it ran{beside}:"]
    lines += [_describe_call_loss(state, call, loss) for loss in counted[-MAX_LOSSES:]]
    last, text = counted[-1], "\n  ".join(lines)
    if last.failure is not None:
        return msgspec.structs.replace(last.failure, kind=FailureKind.POISON, message=text)
    log = library_log_path(last.pilot, last.library)
    return Failure(FailureKind.POISON, text, last.pilot.id, last.library, log=log, printed=last.printed)


def _describe_call_loss(state: State, call: Call, loss: Loss) -> str:
    what = loss.failure.message if loss.failure is not None else describe_pilot_loss(state, loss.pilot)
    took = f"; {format_library_id(loss.library)} used up to {show_bytes(loss.memory_bytes)} meanwhile"
    after = show_seconds(loss.at - call.submitted_at)
    return (
        f"{loss.pilot.id}, {after} after the call was submitted, {show_seconds(loss.ran_s)} after it was sent there: "
        f"{what}{took if loss.memory_bytes else ''}"
    )


def describe_pilot_loss(state: State, pilot: Pilot) -> str:
    block = state.find_block_of_pilot(pilot)
    words = [pilot.loss.value if pilot.loss is not None else "", pilot.notes[-1][1] if pilot.notes else ""]
    if block is not None and block.reason:
        words.append(f"the batch system reports {block.reason}")
    return ", ".join(word for word in words if word)


def show_times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def needs_exclusive_pilot(setbacks: CallSetbacks) -> bool:
    return len(setbacks.counted_losses) >= LOSSES_BEFORE_RUNNING_ALONE


def must_be_set_aside(manager: Manager, call: Call, setbacks: CallSetbacks) -> bool:
    if call.group.options.gang[1] > 1 or manager.policies.dispatch.period_s:
        return find_final_failure(manager.state, call, setbacks) is not None
    return needs_exclusive_pilot(setbacks) or bool(setbacks.cuts) or bool(setbacks.faults)


def is_waiting_for_loss_reason(setbacks: CallSetbacks) -> bool:
    """True if the batch system may still report a harmless reason for the last loss, so that the call must not fail."""
    counted = setbacks.counted_losses
    return (
        len(counted) > LOSSES_BEFORE_RUNNING_ALONE
        and counted[-1].was_alone
        and not all(loss.is_settled for loss in counted)
    )


QUESTION_INTERVAL_S = 60.0
SECOND_QUESTION_AFTER_S = 2.0  # Minimum seconds between the first two questions to the advisor about a function
# The earlier failures of a function are forgotten after this many seconds without a failure
FORGET_FAILURES_AFTER_S = 600.0
MAX_ASKED_FUNCTIONS = 64  # Maximum number of functions per pilot about whose failures the manager asks the advisor
SHOWN_PROOF_LINES = 2
MIN_SHOWN_CERTAINTY = 0.5  # Less certain verdicts are not shown in histories, but policies get all verdicts
KEPT_VERDICTS = 20  # Maximum number of verdicts that are kept for each pilot
MAX_FAILURE_CHARACTERS = 4_000
NO_CALL = CallId(-1)

# The advisor is not asked about these kinds of failures, because their causes are known.
SELF_EXPLAINING_FAILURES = frozenset({
    FailureKind.CANCELLED, FailureKind.DROPPED, FailureKind.TIMEOUT, FailureKind.NO_DEVICE, FailureKind.SERIALIZATION,
    FailureKind.GANG, FailureKind.CONTEXT,
})  # fmt: skip


def ask_why_call_failed(manager: Manager, holder: Library | Gang | None, call: Call, outcome: CallEnd) -> None:
    failure = outcome.failure
    if not isinstance(holder, Library) or (failure is not None and failure.kind in SELF_EXPLAINING_FAILURES):
        return
    said = outcome.raised if failure is None else "\n".join((failure.message, failure.tail))
    printed = outcome.printed or (failure.printed if failure is not None else None) or OutputRange("", 0, 0)
    _ask_advisor(manager, holder, call.id, name=call.group.function.name, printed=printed, said=said)


def ask_why_load_failed(manager: Manager, library: Library, failure: Failure) -> None:
    said = "\n".join((failure.message, failure.tail))
    printed = OutputRange(failure.log or library_log_path(library.pilot, library.id), 0, 0)
    _ask_advisor(manager, library, NO_CALL, name=library.context.recipe.name, printed=printed, said=said)


def record_advisor_verdict(manager: Manager, about: OfFailure, verdict: VerdictAdvice) -> bool:
    """Record the advisor's verdict on a failure. Return False if the pilot has left."""
    state = manager.state
    sure = f"{verdict.kind} ({verdict.component}), {verdict.sure:.0%} sure: {verdict.means}"
    call = state.failed_calls.get(about.call) or state.calls.get(about.call)
    is_shown = verdict.sure >= MIN_SHOWN_CERTAINTY
    if call is not None and is_shown:
        call.note(state.now, "\n  ".join([f"why it failed: {sure}", *verdict.proof[:SHOWN_PROOF_LINES]]))
    pilot = state.pilots.get(about.pilot)
    if pilot is None:
        return False
    what = format_call_id(about.call) if about.call != NO_CALL else "a load"
    if is_shown:
        pilot.note(state.now, f"why {what} failed: {sure}")
    pilot.verdicts.append(RecordedVerdict(state.now, about.call, about.devices, verdict))
    del pilot.verdicts[:-KEPT_VERDICTS]
    return True


def _ask_advisor(
    manager: Manager, library: Library, call: CallId, *, name: str, printed: OutputRange, said: str
) -> None:
    now, pilot = manager.state.now, library.pilot
    asked = pilot.advisor_questions
    before = asked.get(name)
    if before is not None and now - before[0] < (SECOND_QUESTION_AFTER_S if before[1] == 1 else QUESTION_INTERVAL_S):
        return
    if before is None and len(asked) >= MAX_ASKED_FUNCTIONS:
        for old in [old for old, (at, _) in asked.items() if now - at >= FORGET_FAILURES_AFTER_S]:
            del asked[old]
        if len(asked) >= MAX_ASKED_FUNCTIONS:
            return
    asked[name] = (now, 1 if before is None or now - before[0] >= FORGET_FAILURES_AFTER_S else before[1] + 1)
    about = OfFailure(pilot.id, library.id, call, tuple(device.id for device in library.devices))
    said = said[-MAX_FAILURE_CHARACTERS:]
    manager.commands.append(AskAdvice(about, name, printed.path, printed.start, printed.end, said))


def library_log_path(pilot: Pilot, library: LibraryId) -> str:
    return f"{pilot.folder}/lib-{library}.log" if pilot.folder else ""


OUTPUT_TIMER = "pace"
OUTPUT_QUESTION_INTERVAL_S = 15.0
MAX_OUTPUT_QUESTIONS = 64  # Maximum number of questions per interval. The next interval asks about other calls


def ask_advisor_about_output(manager: Manager, _: str) -> None:
    state = manager.state
    busy = [library for library in state.libraries.values() if library.held and library.pilot.folder]
    asked = [question for library in busy if (question := _build_output_question(manager, library)) is not None]
    first = int(state.now / OUTPUT_QUESTION_INTERVAL_S) * MAX_OUTPUT_QUESTIONS % max(1, len(asked))
    manager.commands += (asked[first:] + asked[:first])[:MAX_OUTPUT_QUESTIONS]
    if busy:
        manager.set_timer(OUTPUT_TIMER, state.now + OUTPUT_QUESTION_INTERVAL_S)


def _build_output_question(manager: Manager, library: Library) -> AskAdvice | None:
    state = manager.state
    if library.slots > 1 or library.withdrawn_calls or library.state is not LibraryState.READY:
        return None
    call = next(iter(library.held.values()))
    runs_since = max(call.sent_at, library.ready_at, library.ended_at)
    if call.id in state.reports or isinstance(call.holder, Gang) or state.now - runs_since < OUTPUT_QUESTION_INTERVAL_S:
        return None
    about, log = OfPace(library.id, call.id), library_log_path(library.pilot, library.id)
    return AskAdvice(about, call.group.function.name, log, start=library.log_position)


# Seconds until a pilot tries to load a context again, after each failure in a row; the last value repeats
UNFIT_RETRY_S = (5.0, 20.0, 80.0, 300.0)
FAILED_LOADS_UNTIL_PERMANENTLY_UNFIT = 3
ALL_CONTEXTS = ""  # Key in `Pilot.unfit_until` if the pilot can load no context at all


def mark_pilot_unfit(state: State, library: Library, failure: Failure, *, was_loading: bool, retry_in_s: float) -> None:
    """Record that a pilot cannot load a context, or any context. `retry_in_s`: seconds until its cache has room, or 0.

    If the pilot is already unfit, the failure is not counted.
    """
    pilot, context = library.pilot, library.context
    everything = was_loading and library.phase is not LibraryPhase.FETCHING
    what = "anything" if everything else context.recipe.name
    key = ALL_CONTEXTS if everything else context.recipe.key
    failures = pilot.failed_loads_in_a_row.get(key, 0)
    if failures and not retry_in_s and state.now < pilot.unfit_until[key][0]:
        return
    pilot.failed_loads_in_a_row[key] = 0 if retry_in_s else failures + 1
    again_s = retry_in_s or UNFIT_RETRY_S[min(failures, len(UNFIT_RETRY_S) - 1)]
    known = retry_in_s and pilot.unfit_until.get(key, (0.0, ""))[1] == failure.message
    pilot.unfit_until[key] = state.now + again_s, failure.message
    if not known:
        pilot.note(state.now, f"cannot load {what}: {failure.message}")


def mark_pilot_fit(pilot: Pilot, key: str) -> None:
    for about in (ALL_CONTEXTS, key):
        pilot.unfit_until.pop(about, None)
        pilot.failed_loads_in_a_row.pop(about, None)


def why_pilot_is_unfit(pilot: Pilot, key: str, now: float) -> str:
    for about in (ALL_CONTEXTS, key):
        until, why = pilot.unfit_until.get(about, (0.0, ""))
        if now < until:
            return why
    return ""


def is_pilot_repeatedly_unfit(pilot: Pilot, key: str) -> bool:
    return (
        sum(pilot.failed_loads_in_a_row.get(about, 0) for about in (ALL_CONTEXTS, key))
        >= FAILED_LOADS_UNTIL_PERMANENTLY_UNFIT
    )
