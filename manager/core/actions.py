"""What policies answer, carried out. Each action is checked whole before it changes anything; PolicyError otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Never, NoReturn

from stoker.manager.core import blocks, calls, feeding, forecasts, gangs, libraries, pilots
from stoker.manager.core.commands import AskAdvice
from stoker.manager.core.phases import CallState, LibraryState, PilotState
from stoker.manager.core.seams import (
    Action,
    Ask,
    Drop,
    Evict,
    FailCall,
    FailWaiting,
    Forecast,
    Load,
    PolicyError,
    Release,
    ReleaseBlock,
    Resize,
    Send,
    SendGang,
    TakeBack,
    Timer,
    Unload,
    WantBlocks,
)
from stoker.manager.core.state import Call, Context, Gang, Library, Pilot
from stoker.manager.protocol.calls import Failure, FailureKind
from stoker.manager.protocol.to_pilot import EvictCall, RunCalls
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
            _take_back(core, action)
        case Load():
            _load(core, action)
        case Unload():
            libraries.stop(core, _library(core, action.library), reason=action.reason)
        case Resize():
            _resize(core, action)
        case FailCall():
            calls.fail(core, _waiting(core, action.call), action.failure)
        case FailWaiting():
            libraries.fail_waiting(core, _context(core, action.recipe), action.failure)
        case Forecast():
            forecasts.note(core, action)
        case Timer():
            core.set_timer(f"{seam}/{action.key}", action.at)
        case WantBlocks():
            _want_blocks(core, action)
        case ReleaseBlock():
            block = core.state.blocks.get(action.block)
            if block is None:
                raise PolicyError(f"there is no block {action.block}")
            blocks.release(core, block, action.reason)
        case Release():
            pilots.release(core, _pilot(core, action.pilot), action.reason)
        case Ask():
            _context(core, action.recipe)
            core.out.append(AskAdvice(action.recipe))
        case _:
            _no_action(action)


def _no_action(answer: Never) -> NoReturn:
    raise PolicyError(f"{answer!r} is no action")


# ---- what actions name


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
    if not feeding.takes(core, library, call):
        raise PolicyError(
            f"library {id} is {library.state.value}, of {library.context.recipe.name}, with load {library.load}"
        )
    return library


# ---- calls


def _send(core: Core, action: Send) -> None:
    call = _waiting(core, action.call)
    library, group = _with_room(core, action.library, call), call.group
    if group.options.gang[0] > 1:
        raise PolicyError(f"call {call.id} wants a gang of {group.options.gang[0]}")
    group.context.queue.leave(call)
    calls.fed(core, group.context)
    calls.give(core, library, call)
    if action.offer:
        core.sends[library].remove(call)
        call.offered = True
        call.note(core.state.now, f"offered to lib-{library.id} on {library.pilot.id}")
        blob = feeding.blob_for(library, group)
        core.say(
            library.pilot,
            RunCalls(library.id, group.function.key, [call.spec], group.options, blob, offer=True),
        )


def _send_gang(core: Core, action: SendGang) -> None:
    call = _waiting(core, action.call)
    smallest, largest = call.group.options.gang
    if not smallest <= len(action.libraries) <= largest or len(set(action.libraries)) != len(action.libraries):
        raise PolicyError(f"a gang of {len(action.libraries)} for a call that wants {smallest} to {largest}")
    members = tuple(_with_room(core, id, call) for id in action.libraries)
    gangs.start(core, call, members, action.rendezvous)


def _evict(core: Core, action: Evict) -> None:
    call = core.state.calls.get(action.call)
    if call is None or call.holder is None:
        raise PolicyError(f"call {action.call} is held by no library")
    holder = call.holder.members[0] if isinstance(call.holder, Gang) else call.holder
    unsent = core.sends.get(holder)
    if unsent and call in unsent:
        raise PolicyError(f"call {action.call} is being sent in this very moment")
    core.say(holder.pilot, EvictCall(holder.id, call.id))


def _take_back(core: Core, action: TakeBack) -> None:
    library = _library(core, action.library)
    if action.count < 1:
        raise PolicyError(f"{action.count} calls cannot be taken back")
    library.taking += action.count
    core.say(library.pilot, TakeBackMessage(library.id, action.count))


# ---- pilots and libraries


def _want_blocks(core: Core, action: WantBlocks) -> None:
    source = core.state.sources.get(action.source)
    if source is None:
        raise PolicyError(f"there is no source {action.source}")
    if not 1 <= action.count <= source.room:
        raise PolicyError(
            f"{action.count} blocks of {action.source}, which has {len(source.blocks)} of at most {source.source.most}"
        )
    blocks.want(core, source, action.count)


def _load(core: Core, action: Load) -> None:
    context, pilot = _context(core, action.recipe), _pilot(core, action.pilot)
    if pilot.state is not PilotState.HERE:
        raise PolicyError(f"{pilot.id} is {pilot.state.value}")
    if not action.devices or len(set(action.devices)) != len(action.devices):
        raise PolicyError("a library needs devices, each once")
    faulty = [id for id in action.devices if id in pilot.devices and pilot.devices[id].fault]
    if faulty:
        raise PolicyError(f"{faulty[0]} of {pilot.id} is quarantined")
    unknown = [id for id in action.devices if id not in pilot.devices]
    if unknown:
        raise PolicyError(f"{pilot.id} has no device {unknown[0]}")
    if action.memory_bytes < 0:
        raise PolicyError(f"{action.memory_bytes} bytes cannot be promised")
    for id in action.devices:
        device = pilot.devices[id]
        if 0 < device.facts.processes <= len(device.libraries):
            raise PolicyError(f"{id} of {pilot.id} takes {device.facts.processes} process at a time, and has one")
    libraries.load(core, context, pilot, tuple(pilot.devices[id] for id in action.devices), action.memory_bytes)


def _resize(core: Core, action: Resize) -> None:
    library = _library(core, action.library)
    if library.state is not LibraryState.READY or library.pilot.state is not PilotState.HERE:
        raise PolicyError(
            f"library {library.id} is {library.state.value} on a pilot that is {library.pilot.state.value}"
        )
    if action.memory_bytes < 0:
        raise PolicyError(f"{action.memory_bytes} bytes cannot be promised")
    libraries.resize(core, library, action.memory_bytes)
