"""Ends libraries, stops running calls, and ends the pilot.

Only this module changes the stage of a library or starts the exit of the pilot. To stop a call, the pilot

1. requests the stop: the function ends at its next wait for a model or its next progress report,
2. after a grace period, reports the end of the call and drains the library, and
3. kills the library if only calls that do not react are still running.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

import msgspec

from stoker.pilot.core import memory, objects, probes
from stoker.pilot.core.commands import KillProcess, RemoveLibrary, SendToLibrary, SetTimer, Severity
from stoker.pilot.core.events import ProcessEnded
from stoker.pilot.core.infrastructure import DEVICE_FAILED, EXIT_CODE_TEXTS, NODE_FAULT_CODES, PILOT_FAULT_CODES
from stoker.pilot.core.running import make_library_failure, remove_all_calls, remove_ended_calls, set_end_cause
from stoker.pilot.core.state import NEXT_STAGES, SLEEP_STAGES, CoreState, PilotLibrary, Stage, StoppingCall
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd, Failure, FailureKind
from stoker.protocol.ids import CallId
from stoker.protocol.to_library import Evict, Stop
from stoker.protocol.to_manager import CallsEnded, LibraryFacts, LibraryGone
from stoker.units import show_bytes, show_seconds, show_signal

# ---- libraries
_MOST_ENDED_LIBRARIES = 10_000


def change_stage(library: PilotLibrary, stage: Stage) -> None:
    """Move a library to the next stage. Raises ValueError if the transition is not in `NEXT_STAGES`."""
    if stage not in NEXT_STAGES[library.stage]:
        raise ValueError(f"library {library.number} cannot go from {library.stage.value} to {stage.value}")
    library.stage = stage


def fail_library(
    state: CoreState, library: PilotLibrary, kind: FailureKind, what: str, *, printed: bool = True
) -> None:
    """Kill a library because of a failure. `printed`: True if the failure includes the library's last log lines."""
    set_end_cause(library, make_library_failure(state, library, kind, what), printed=printed)
    kill_library(state, library)


def kill_library(state: CoreState, library: PilotLibrary) -> None:
    library.must_end = library.is_killed = True
    if library.has_process:
        state.commands.append(KillProcess(library.number))
    else:
        release_ended_library(state, library, ProcessEnded(library.number))


def release_ended_library(state: CoreState, library: PilotLibrary, ending: ProcessEnded) -> None:
    """Release the calls and the memory of an ended library, and report the end to the manager."""
    if library.stage is Stage.GONE:
        return
    number, is_ready = library.number, library.is_loaded
    running = [call for call in ending.running if call in library.held_calls]
    if library.invalid_bytes_reason and not running:  # the unread bytes may contain the ends of running calls
        running = list(library.held_calls)
    failure = _find_failure(state, library, ending, running)
    if failure is not None and state.is_unfit:
        state.write_log(f"lib-{number} failed because of its pilot: {failure.message}", Severity.WARNING)
        failure = None
    change_stage(library, Stage.GONE)
    begun, unstarted = remove_all_calls(library, running)
    objects.remove_library_from_wants(state, library)
    said = f": {failure.message}" if failure else ""
    state.write_log(f"lib-{number} ({library.recipe.name}) ended{said}", Severity.WARNING if failure else Severity.INFO)
    lacks_bytes = library.cache_lacks_bytes
    state.tell_manager(LibraryGone(number, failure, not is_ready, begun, unstarted, cache_lacks_bytes=lacks_bytes))
    state.commands.append(RemoveLibrary(number, begun))
    memory.release_memory(state, library)
    state.libraries.pop(number, None)
    if ending.exit_code == DEVICE_FAILED:
        probes.request_urgent_probes(state, library.devices)
    state.ended_libraries[number] = LibraryFacts(
        library=number, recipe=library.recipe.key, devices=library.devices, ready=is_ready  # type: ignore[arg-type]
    )  # fmt: skip
    if len(state.ended_libraries) > _MOST_ENDED_LIBRARIES:
        state.ended_libraries.popitem(last=False)


def _find_failure(
    state: CoreState, library: PilotLibrary, ending: ProcessEnded, running: list[CallId]
) -> Failure | None:
    printed = ending.printed if len(running) == 1 else None
    tail = ending.tail if printed is not None or not running else ""
    if library.end_cause is not None:
        failure = library.end_cause.failure
        return msgspec.structs.replace(failure, tail=tail, printed=printed) if library.end_cause.printed else failure
    how, code = ending.signal, ending.exit_code
    has_retired = 0 < library.recipe.calls_per_library <= library.served
    if library.must_end or (has_retired and not how and not code and not running):
        return None
    name, log = library.recipe.name, state.log_path(library.number)
    crowded = _explain_outside_memory_use(library, ending)
    if crowded:
        what = f"was killed by SIGKILL ({crowded})"
    elif how:
        what = f"was killed by {show_signal(how)}" + (_OUT_OF_MEMORY if how == signal.SIGKILL else "")
    else:
        what = EXIT_CODE_TEXTS.get(code, "exited with code {code}: code in it called exit")
        what = what.format(code=code, log=log)
    if not library.is_loaded:
        doing = f"while it loaded {name}"
        is_pilots_fault, other = code in PILOT_FAULT_CODES, FailureKind.CONTEXT
    else:
        is_pilots_fault, other = code in NODE_FAULT_CODES and not how, FailureKind.DIED
        doing = f"in a call on {name}" if running else f"while {name} was loaded and idle"
        if library.stage in SLEEP_STAGES:
            doing = f"while {name} was {library.stage.value}"
    return Failure(
        FailureKind.PILOT if crowded or is_pilots_fault else other,
        f"lib-{library.number} on {state.facts.pilot} {what}, {doing}", state.facts.pilot, library.number,
        signal=how, exit_code=code, tail=tail, log=log, printed=printed,
    )  # fmt: skip


def _explain_outside_memory_use(library: PilotLibrary, ending: ProcessEnded) -> str:
    """Return a message if processes outside the pilot used memory that the library declares; otherwise empty."""
    declared, shortage = library.recipe.needs.memory_bytes, ending.shortage
    if ending.signal != signal.SIGKILL or shortage is None or not declared:
        return ""
    room = max(0, shortage.room_bytes)
    if not room < declared <= room + shortage.others_bytes:
        return ""
    return (
        f"the node had no memory left: {show_bytes(room)} are free, the context declares {show_bytes(declared)}, and"
        f" processes outside the pilot use {show_bytes(shortage.others_bytes)}"
    )


_OUT_OF_MEMORY = " (no Stoker process sent the signal; the system probably ran out of memory)"


# ---- stopping calls
LEAST_GRACE_S, MOST_GRACE_S = 3.0, 10.0  # seconds for a call to react to a stop; a busy node may take two seconds
UNSTARTED_RETURN_S = 1.0  # seconds for a draining library to return its unstarted calls


def stop_calls(
    state: CoreState, library: PilotLibrary, calls: Iterable[CallId], *, least_s: float = 0.0, failure: Failure | None
) -> None:
    until = state.now + max(least_s, stop_grace_s(library))
    for call in calls:
        state.commands.append(SendToLibrary(library.number, Evict(call=call)))
        library.stopping_calls.setdefault(call, StoppingCall(until, failure))
    state.commands.append(SetTimer(until, f"cancel/{library.number}"))


def stop_grace_s(library: PilotLibrary) -> float:
    """Return the seconds that a call has to react to a stop: the load time of its library, within bounds."""
    return min(MOST_GRACE_S, max(LEAST_GRACE_S, library.ready_at - library.started_at))


def enforce_stop_deadlines(state: CoreState, library: PilotLibrary, running: Sequence[CallId]) -> None:
    """Report the ends of calls that did not stop in time. Kill the library if no other calls are running."""
    stuck = [
        call for call in running if (stop := library.stopping_calls.get(call)) is not None and state.now >= stop.until
    ]
    if stuck:
        _end_stuck_calls(state, library, stuck)
    if not any(call in library.stuck_calls for call in running):
        return
    others = [call for call in library.held_calls if call not in library.stuck_calls]
    gave_back = not others or state.now > library.stuck_at + UNSTARTED_RETURN_S
    if gave_back and not any(call in running for call in others):
        kill_library(state, library)


def _end_stuck_calls(state: CoreState, library: PilotLibrary, calls: list[CallId]) -> None:
    stops = [library.stopping_calls.pop(call) for call in calls]
    failure = stops[0].failure
    if failure is None:
        within = f"did not stop within {show_seconds(stop_grace_s(library))}, so its library ended"
        what = f"a call that ran on lib-{library.number} was cancelled and {within}"
        failure = make_library_failure(state, library, FailureKind.CANCELLED, what)
    stopped = [(call, stop.failure) for call, stop in zip(calls, stops, strict=True) if stop.failure is not None]
    if ends := [CallEnd(call, ok=False, failure=why) for call, why in stopped]:
        remove_ended_calls(library, [end.call for end in ends])
        state.tell_manager(CallsEnded(library.number, ends))
    library.stuck_at = library.stuck_at or state.now
    library.stuck_calls.update(calls)
    set_end_cause(library, failure, printed=True)
    stop_library(state, library.number, drain=True, reason=failure.message)


# ---- leaving
LAST_TRANSFERS_S = 5.0  # seconds that a leaving pilot without libraries continues to serve transfers
FORCED_EXIT_DELAY_S = 1.0  # seconds after `leave_by` at which a leaving pilot exits in any case


def start_exit(
    state: CoreState, reason: str, *, within_s: float, code: int = 0, loss: LossReason | None = None
) -> None:
    if not state.leaving:
        state.write_log(f"leaving: {reason}")
        state.exit_code = code
        state.loss = loss
    state.leaving = state.leaving or reason
    state.leave_by = min(state.leave_by, state.now + within_s)


def start_drain(
    state: CoreState, reason: str, *, within_s: float, code: int = 0, loss: LossReason | None = None
) -> None:
    """Start the pilot's exit. Running calls may finish within `within_s` seconds. Unstarted calls return to the
    manager.
    """
    start_exit(state, reason, within_s=within_s, code=code, loss=loss)
    for number in list(state.libraries):
        stop_library(state, number, drain=within_s > 0, reason=reason)


def stop_library(state: CoreState, number: int, *, drain: bool, reason: str) -> None:
    library = state.libraries.get(number)  # type: ignore[call-overload]
    if library is None:
        state.tell_manager(LibraryGone(library=number))  # type: ignore[arg-type]
        return
    state.write_log(f"lib-{number} is ordered to end: {reason}")
    if not drain or not library.is_serving:
        kill_library(state, library)
    elif not library.must_end:
        library.must_end = True
        change_stage(library, Stage.DRAINING)
        state.commands.append(SendToLibrary(library.number, Stop()))


def may_exit_now(state: CoreState, *, serves_peers: bool) -> bool:
    """Return True if a leaving pilot has no work left or no time left."""
    if not state.leaving:
        return False
    if state.now > state.leave_by + FORCED_EXIT_DELAY_S:
        return True
    if state.libraries or state.uploads_pending or state.now < state.hands_on_until:
        return False
    if serves_peers:
        state.serves_until = state.serves_until or state.now + LAST_TRANSFERS_S
    return not serves_peers or state.now >= state.serves_until
