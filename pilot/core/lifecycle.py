"""Libraries and their calls from start to end, and how the pilot leaves.

Only this file changes which calls a library holds (`held`), a library's stage, and whether the pilot leaves. A call
enters with `hold_calls` and leaves exactly once. Later messages about it change nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable

import msgspec

from stoker.pilot.core import memory, objects, probes
from stoker.pilot.core.commands import Forget, KillProcess, Severity, TellLibrary
from stoker.pilot.core.events import ProcessEnded
from stoker.pilot.core.infrastructure import DEVICE_FAILED, OF_ITS_PILOT, OF_THE_INFRASTRUCTURE, SAID_BY_CODE
from stoker.pilot.core.state import NEXT, TAKES_CALLS, Cause, CoreState, PieceWindow, PilotLibrary, Stage
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.ids import CallId
from stoker.protocol.to_library import Stop
from stoker.protocol.to_manager import LibraryFacts, LibraryGone
from stoker.protocol.to_pilot import RunCalls
from stoker.units import show_bytes

# ---- calls of libraries


class Departure(msgspec.Struct, frozen=True):
    """The calls that a library held when it ended: those it was running, and those it had not begun, in order."""

    running: tuple[CallId, ...]
    unstarted: tuple[CallId, ...]


def hold_calls(library: PilotLibrary, calls: Iterable[CallId], *, limit_s: float = 0.0, streams: bool = False) -> None:
    """Calls have come for a library; with `streams` they give their results in pieces."""
    if library.stage is not Stage.READY and library.stage not in TAKES_CALLS:  # to hash a stage takes long
        raise ValueError(f"library {library.number} is {library.stage.value} and takes no calls")
    library.held.update(dict.fromkeys(calls, limit_s))
    library.has_limits |= limit_s > 0
    if streams:
        library.streams.update((call, PieceWindow()) for call in calls)


def drop_ended(library: PilotLibrary, calls: Iterable[CallId]) -> list[CallId]:
    """Calls have ended in a library; returns those of them that it held until now."""
    here = _leave(library, calls)
    library.served += len(here)
    return here


def drop_returned(library: PilotLibrary, calls: Iterable[CallId]) -> list[CallId]:
    """A library has given calls back; returns those of them that it held until now."""
    return _leave(library, calls)


def does_not_react(library: PilotLibrary, calls: Iterable[CallId], *, now: float) -> None:
    """Record calls that still run after the grace of their stop."""
    library.stuck_at = library.stuck_at or now
    library.stuck.update(calls)
    for call in calls:
        library.stopping.pop(call, None)


def drop_all(library: PilotLibrary, running: Iterable[CallId]) -> Departure:
    """A library's process has ended while `running` ran (calls that it does not hold are ignored)."""
    begun = tuple(call for call in dict.fromkeys(running) if call in library.held)
    left = Departure(running=begun, unstarted=tuple(call for call in library.held if call not in begun))
    library.held.clear()
    library.streams.clear()
    library.stopping.clear()
    library.stuck.clear()
    library.waiting.clear()
    library.orders_waiting_for_arguments.clear()
    return left


def postpone_order(library: PilotLibrary, order: RunCalls) -> None:
    """An order waits until the library is ready."""
    library.waiting.append(msgspec.structs.replace(order, calls=list(order.calls)))  # some of them may be taken back


def take_postponed(library: PilotLibrary) -> list[RunCalls]:
    """The orders that have waited, all at once; none waits from now on."""
    orders, library.waiting = library.waiting, []
    return orders


def take_back_waiting(library: PilotLibrary, count: int) -> list[CallId]:
    """Take out up to `count` calls that were not even sent to the library, newest first."""
    out: list[CallId] = []
    while library.waiting and len(out) < count:
        last = library.waiting[-1]
        out.append(last.calls.pop().call)
        if not last.calls:
            library.waiting.pop()
    return drop_returned(library, out)


def drop_waiting(library: PilotLibrary, calls: Collection[CallId]) -> list[CallId]:
    """Take out those of `calls` that were not even sent to the library."""
    out: list[CallId] = []
    for order in (*library.waiting, *library.orders_waiting_for_arguments.values()):
        out += [spec.call for spec in order.calls if spec.call in calls]
        order.calls[:] = [spec for spec in order.calls if spec.call not in calls]
    library.waiting = [order for order in library.waiting if order.calls]
    return drop_returned(library, out)


def _leave(library: PilotLibrary, calls: Iterable[CallId]) -> list[CallId]:
    held = library.held
    left = [call for call in calls if held.pop(call, None) is not None]
    if library.streams:
        for call in left:
            library.streams.pop(call, None)
    if library.stopping:  # it may come again, and is not told to stop then
        for call in left:
            library.stopping.pop(call, None)
    if library.stuck:
        library.stuck.difference_update(left)
    return left


# ---- lifecycle

_REMEMBERED = 10_000


def move_to(library: PilotLibrary, stage: Stage) -> None:
    """Go to another stage. Raises ValueError for a transition that is not in the table, and changes nothing then."""
    if stage not in NEXT[library.stage]:
        raise ValueError(f"library {library.number} cannot go from {library.stage.value} to {stage.value}")
    library.stage = stage


def blame(library: PilotLibrary, failure: Failure, *, printed: bool = False) -> None:
    """Why a library ends, unless there is a reason already."""
    library.cause = library.cause or Cause(failure, printed)


def kill_library(
    state: CoreState, library: PilotLibrary, *, cause: Failure | None = None, printed: bool = False
) -> None:
    """End a library's process now. Its end is told when that has happened."""
    if cause is not None:
        blame(library, cause, printed=printed)
    library.told_to_end = library.is_killed = True
    if library.has_process:
        state.out.append(KillProcess(library.number))
    else:
        finish_library(state, library, ProcessEnded(library.number))


def finish_library(state: CoreState, library: PilotLibrary, ending: ProcessEnded) -> None:
    """A library's process has ended (or never was): settle what it held and tell the manager."""
    if library.stage is Stage.GONE:
        return
    number = library.number
    is_ready = library.serves
    running = [call for call in ending.running if call in library.held]
    if library.garbled and not running:  # the ends of those that ran may be among what could not be read
        running = list(library.held)
    failure = _why(state, library, ending, running)
    if failure is not None and state.is_unfit:
        state.log(f"lib-{number} failed of what the pilot lacks: {failure.message}", Severity.WARNING)
        failure = None
    move_to(library, Stage.GONE)
    left = drop_all(library, running)
    objects.forget_wants(state, library)
    said = f": {failure.message}" if failure else ""
    state.log(f"lib-{number} ({library.recipe.name}) ended{said}", Severity.WARNING if failure else Severity.INFO)
    state.tell(
        LibraryGone(
            number, failure, not is_ready, left.running, left.unstarted, cache_lacks_bytes=library.cache_lacks_bytes
        )
    )
    state.out.append(Forget(number, left.running))
    memory.release_memory(state, library)
    state.libraries.pop(number, None)
    if ending.exit_code == DEVICE_FAILED:
        probes.suspect(state, library.devices)
    state.gone[number] = LibraryFacts(
        library=number, recipe=library.recipe.key, devices=library.devices, ready=is_ready  # type: ignore[arg-type]
    )  # fmt: skip
    if len(state.gone) > _REMEMBERED:
        state.gone.popitem(last=False)


def _why(state: CoreState, library: PilotLibrary, ending: ProcessEnded, running: list[CallId]) -> Failure | None:
    """Why a library has ended; None if it ended as it should."""
    printed = ending.printed if len(running) == 1 else None
    tail = ending.tail if printed is not None or not running else ""
    if library.cause is not None:
        failure = library.cause.failure
        return msgspec.structs.replace(failure, tail=tail, printed=printed) if library.cause.printed else failure
    how, code = ending.signal, ending.exit_code
    if library.told_to_end and library.serves:
        return None
    if library.told_to_end or (library.retires and not how and not code and not running):
        return None
    name, log = library.recipe.name, state.log_of(library.number)
    crowded = _crowded_out(library, ending)
    if crowded:
        what = f"was killed by SIGKILL ({crowded})"
    elif how:
        what = f"was killed by {signal.Signals(how).name}" + (_OUT_OF_MEMORY if how == signal.SIGKILL else "")
    else:
        what = SAID_BY_CODE.get(code, "ended by itself with exit code {code}: something in it called exit")
        what = what.format(code=code, log=log)
    if not library.serves:
        doing = f"while it loaded {name}"
    else:
        doing = f"in a call on {name}" if running else f"while it held {name} idle"
    if crowded:
        kind = FailureKind.PILOT
    elif library.serves:
        kind = FailureKind.PILOT if code in OF_THE_INFRASTRUCTURE and not how else FailureKind.DIED
    else:
        kind = FailureKind.PILOT if code in OF_ITS_PILOT else FailureKind.CONTEXT
    return Failure(
        kind=kind,
        message=f"lib-{library.number} on {state.facts.pilot} {what}, {doing}",
        pilot=state.facts.pilot,
        library=library.number,
        signal=how,
        exit_code=code,
        tail=tail,
        log=log,
        printed=printed,
    )


def _crowded_out(library: PilotLibrary, ending: ProcessEnded) -> str:
    """That others hold the memory which a library declares, in words; empty if that is not proved."""
    declared, shortage = library.recipe.needs.memory_bytes, ending.shortage
    if ending.signal != signal.SIGKILL or shortage is None or not declared:
        return ""
    room = max(0, shortage.room_bytes)
    if not room < declared <= room + shortage.others_bytes:
        return ""
    return (
        f"the node had no memory left: {show_bytes(room)} are free for the {show_bytes(declared)} that it declares, and"
        f" processes which are not the pilot's hold {show_bytes(shortage.others_bytes)}"
    )


_OUT_OF_MEMORY = " (nobody here sent it: most often the system had no memory left)"


# ---- leaving

HAND_ON_S = 5.0  # how long a pilot that could leave goes on serving those that are getting something from it
FORCED_S = 1.0  # a pilot that should have left is gone after so long, whatever is still there


def leave(state: CoreState, reason: str, *, within_s: float, code: int = 0, loss: LossReason | None = None) -> None:
    """Begin to end."""
    if not state.leaving:
        state.log(f"leaving: {reason}")
        state.exit_code = code
        state.loss = loss
    state.leaving = state.leaving or reason
    state.leave_by = min(state.leave_by, state.now + within_s)


def drain(state: CoreState, reason: str, *, within_s: float, code: int = 0, loss: LossReason | None = None) -> None:
    """Begin to leave: running calls may finish within this time, others are given back. `loss`: as in `leave`."""
    leave(state, reason, within_s=within_s, code=code, loss=loss)
    for number in list(state.libraries):
        stop_library(state, number, drain=within_s > 0, reason=reason)


def stop_library(state: CoreState, number: int, *, drain: bool, reason: str) -> None:
    """End a library."""
    library = state.libraries.get(number)  # type: ignore[call-overload]
    if library is None:
        state.tell(LibraryGone(library=number))  # type: ignore[arg-type]
        return
    state.log(f"lib-{number} is told to end: {reason}")
    if not drain or not library.serves:
        kill_library(state, library)
    elif not library.told_to_end:
        library.told_to_end = True
        move_to(library, Stage.DRAINING)
        state.out.append(TellLibrary(library.number, Stop()))


def has_left(state: CoreState, *, serves_peers: bool) -> bool:
    """Whether a pilot that leaves has nothing left to do, or no time left to do it."""
    if not state.leaving:
        return False
    if state.now > state.leave_by + FORCED_S:
        return True
    return not state.libraries and not state.handing_in and not _hands_on(state, serves_peers=serves_peers)


def _hands_on(state: CoreState, *, serves_peers: bool) -> bool:
    """Whether a pilot that has nothing else to do had better stay a little: others are getting objects from it."""
    if state.now < state.hands_on_until:
        return True
    if not serves_peers:
        return False
    state.serves_until = state.serves_until or state.now + HAND_ON_S
    return state.now < state.serves_until


# ---- failures


def failure_of(state: CoreState, library: PilotLibrary, kind: FailureKind, message: str) -> Failure:
    """The failure of a library, or of a call on it."""
    return Failure(
        kind=kind, message=message, pilot=state.facts.pilot, library=library.number, log=state.log_of(library.number)
    )


def load_failure(state: CoreState, library: PilotLibrary, what: str, *, is_pilots_fault: bool) -> Failure:
    """Why a library will hold nothing."""
    kind = FailureKind.PILOT if is_pilots_fault else FailureKind.CONTEXT
    return failure_of(state, library, kind, f"{library.recipe.name} on {state.facts.pilot}: {what}")
