"""What policies answer, carried out. Each action is checked whole before it changes anything; PolicyError otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from stoker.manager.core import calls, libraries
from stoker.manager.core.commands import AskAdvice, RequestPilots
from stoker.manager.core.seams import (
    Action,
    Ask,
    Drop,
    Evict,
    FailWaiting,
    Load,
    PolicyError,
    Release,
    Resize,
    Send,
    SendGang,
    TakeBack,
    Timer,
    Unload,
    WantPilots,
)
from stoker.manager.core.state import Call, CallState, Context, Library, LibraryState, Pilot, PilotState
from stoker.manager.protocol.calls import CallOptions, Failure, FailureKind, GangPlace
from stoker.manager.protocol.ids import CallId
from stoker.manager.protocol.to_pilot import EvictCall, Exit, FunctionBlob, ResizeLibrary, RunCalls
from stoker.manager.protocol.to_pilot import TakeBack as TakeBackMessage

if TYPE_CHECKING:
    from stoker.manager.core.core import Core


def apply(core: Core, action: Action, *, seam: str) -> None:
    """Carry out one action of a seam's policy."""
    match action:
        case Send():
            _send(core, action)
        case SendGang():
            _send_gang(core, action)
        case Drop():
            calls.fail(core, _waiting(core, action.call), Failure(FailureKind.DROPPED, action.reason))
        case Evict():
            _evict(core, action)
        case TakeBack():
            library = _library(core, action.library)
            core.say(library.pilot, TakeBackMessage(library.id, action.count))
        case Load():
            _load(core, action)
        case Unload():
            libraries.stop(core, _library(core, action.library), reason=action.reason)
        case Resize():
            _resize(core, action)
        case FailWaiting():
            _fail_waiting(core, action)
        case Timer():
            core.set_timer(f"{seam}/{action.key}", action.at)
        case WantPilots():
            core.out.append(RequestPilots(action.count, action.kind))
        case Release():
            release(core, _pilot(core, action.pilot), action.reason)
        case Ask():
            _context(core, action.recipe)
            core.out.append(AskAdvice(action.recipe))
        case _:
            assert_never(action)


def _waiting(core: Core, id: int) -> Call:
    call = core.state.calls.get(id)
    if call is None or call.state is not CallState.WAITING:
        raise PolicyError(f"call {id} is not waiting")
    return call


def _library(core: Core, id: int) -> Library:
    library = core.state.libraries.get(id)  # type: ignore[call-overload]
    if library is None:
        raise PolicyError(f"there is no library {id}")
    found: Library = library
    return found


def _pilot(core: Core, id: str) -> Pilot:
    pilot = core.state.pilots.get(id)  # type: ignore[call-overload]
    if pilot is None:
        raise PolicyError(f"there is no pilot {id}")
    found: Pilot = pilot
    return found


def _context(core: Core, key: str) -> Context:
    context = core.state.contexts.get(key)
    if context is None:
        raise PolicyError(f"there is no context {key}")
    return context


def _with_room(core: Core, id: int, call: Call) -> Library:
    library = _library(core, id)
    if not libraries.takes(core, library, call):
        raise PolicyError(
            f"library {id} is {library.state.value}, of {library.context.recipe.name}, with load {library.load}"
        )
    return library


def _send(core: Core, action: Send) -> None:
    call = _waiting(core, action.call)
    library = _with_room(core, action.library, call)
    call.group.context.queue.left()
    calls.fed(core, call.group.context)
    if not action.offer:
        calls.give(core, library, call)
        return
    call.state, call.holder, call.sent_at = CallState.HELD, library, core.state.now
    call.note(core.state.now, f"offered to lib-{library.id} on {library.pilot.id}")
    library.held[call.id] = call
    libraries.reclass(core, library)
    group = call.group
    core.say(
        library.pilot,
        RunCalls(library.id, group.function.key, [call.spec], group.options, blob_for(library, call), offer=True),
    )


def blob_for(library: Library, call: Call) -> FunctionBlob | None:
    """The call's function, if the library has not been sent it."""
    function = call.group.function
    if function.key in library.functions:
        return None
    library.functions.add(function.key)
    return function


def _send_gang(core: Core, action: SendGang) -> None:
    call = _waiting(core, action.call)
    smallest, largest = call.group.options.gang
    if not smallest <= len(action.libraries) <= largest or len(set(action.libraries)) != len(action.libraries):
        raise PolicyError(f"a gang of {len(action.libraries)} for a call that wants {smallest} to {largest}")
    members = tuple(_with_room(core, id, call) for id in action.libraries)
    calls.start_gang(core, call, members, action.rendezvous)


def run_gang(core: Core, call: Call, members: tuple[Library, ...], rendezvous: str) -> None:
    """Tell every member of a gang its part."""
    options: CallOptions = call.group.options
    for rank, library in enumerate(members):
        library.held[call.id] = call
        libraries.reclass(core, library)
        place = GangPlace(rank, len(members), rendezvous)
        core.say(
            library.pilot,
            RunCalls(library.id, call.group.function.key, [call.spec], options, blob_for(library, call), place),
        )


def _evict(core: Core, action: Evict) -> None:
    call = core.state.calls.get(action.call)
    if call is None or not isinstance(call.holder, Library):
        raise PolicyError(f"call {action.call} is not held by one library")
    core.say(call.holder.pilot, EvictCall(call.holder.id, CallId(call.id)))


def _load(core: Core, action: Load) -> None:
    context, pilot = _context(core, action.recipe), _pilot(core, action.pilot)
    if pilot.state is not PilotState.HERE:
        raise PolicyError(f"{pilot.id} is {pilot.state.value}")
    if not action.devices or len(set(action.devices)) != len(action.devices):
        raise PolicyError("a library needs devices, each once")
    unknown = [id for id in action.devices if id not in pilot.devices]
    if unknown:
        raise PolicyError(f"{pilot.id} has no device {unknown[0]}")
    libraries.load(core, context, pilot, tuple(pilot.devices[id] for id in action.devices), action.memory_bytes)
    if core.tracked:
        core.changed(lambda c: c.libraries, core.state.next_library - 1)


def _resize(core: Core, action: Resize) -> None:
    library = _library(core, action.library)
    if library.state is not LibraryState.READY:
        raise PolicyError(f"library {library.id} is {library.state.value}")
    if action.memory_bytes > library.promised_bytes:
        libraries.promise(library, action.memory_bytes)
    core.say(library.pilot, ResizeLibrary(library.id, action.memory_bytes))


def _fail_waiting(core: Core, action: FailWaiting) -> None:
    context = _context(core, action.recipe)
    for call in list(context.queue):
        calls.fail(core, call, action.failure)
    calls.fed(core, context)


def release(core: Core, pilot: Pilot, reason: str) -> None:
    """Drain a pilot and let it end: it gets nothing new, finishes what it runs, and gives back the rest."""
    if pilot.state in (PilotState.DRAINING, PilotState.GONE):
        return
    pilot.state = PilotState.DRAINING
    pilot.notes.append((core.state.now, f"draining: {reason}"))
    for library in pilot.libraries.values():
        libraries.reclass(core, library)
    core.say(pilot, Exit(reason, drain=True))
