"""How a library goes from stage to stage, and how it ends. This file alone writes a library's stage."""

from __future__ import annotations

import signal

import msgspec

from stoker.pilot.core import holding, probes, station, wants
from stoker.pilot.core.commands import Forget, KillProcess, Severity
from stoker.pilot.core.events import ProcessEnded
from stoker.pilot.core.exits import DEVICE_FAILED, OF_ITS_PILOT, OF_THE_INFRASTRUCTURE, SAID_BY_CODE
from stoker.pilot.core.stages import NEXT, Stage
from stoker.pilot.core.state import Cause, CoreState, PilotLibrary
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.ids import CallId
from stoker.protocol.to_manager import LibraryFacts, LibraryGone
from stoker.units import show_bytes

_REMEMBERED = 10_000


def move(library: PilotLibrary, stage: Stage) -> None:
    """Go to another stage. Raises ValueError for a transition that is not in the table, and changes nothing then."""
    if stage not in NEXT[library.stage]:
        raise ValueError(f"library {library.number} cannot go from {library.stage.value} to {stage.value}")
    library.stage = stage


def blame(library: PilotLibrary, failure: Failure, *, printed: bool = False) -> None:
    """Why a library ends, unless there is a reason already."""
    library.cause = library.cause or Cause(failure, printed)


def kill(state: CoreState, library: PilotLibrary, *, cause: Failure | None = None, printed: bool = False) -> None:
    """End a library's process now. Its end is told when that has happened."""
    if cause is not None:
        blame(library, cause, printed=printed)
    library.told_to_end = library.is_killed = True
    if library.has_process:
        state.out.append(KillProcess(library.number))
    else:
        finish(state, library, ProcessEnded(library.number))


def finish(state: CoreState, library: PilotLibrary, ending: ProcessEnded) -> None:
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
    move(library, Stage.GONE)
    left = holding.depart(library, running)
    wants.forget(state, library)
    said = f": {failure.message}" if failure else ""
    state.log(f"lib-{number} ({library.recipe.name}) ended{said}", Severity.WARNING if failure else Severity.INFO)
    state.tell(
        LibraryGone(
            number, failure, not is_ready, left.running, left.unstarted, cache_lacks_bytes=library.cache_lacks_bytes
        )
    )
    state.out.append(Forget(number, left.running))
    station.release(state, library)
    state.libraries.pop(number, None)
    if ending.exit_code == DEVICE_FAILED:
        probes.suspect(state, library.devices)
    state.gone[number] = LibraryFacts(
        library=number, recipe=library.recipe.key, devices=library.devices, ready=is_ready  # type: ignore[arg-type]
    )  # fmt: skip
    if len(state.gone) > _REMEMBERED:
        state.gone.popitem(last=False)


def _why(state: CoreState, library: PilotLibrary, ending: ProcessEnded, running: list[CallId]) -> Failure | None:
    """Why a library has ended; None if it ended as it should. The last lines of its log count only where they are those
    of the one call that ran, or where no call ran."""
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
    """That others hold the memory which a library declares, in words; empty if that is not proved. A library that
    declares nothing may have taken the memory itself."""
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
