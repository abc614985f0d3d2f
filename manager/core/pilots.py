"""What pilots say, and what is done about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, assert_never

from stoker.manager.core import (
    blocks,
    call_news,
    calls,
    feeding,
    gangs,
    heartbeats,
    libraries,
    objects,
    reconcile,
    rejoin,
    repair,
    snapshots,
    suspects,
    walltime,
)
from stoker.manager.core.commands import ToPilot
from stoker.manager.core.events import FromPilot
from stoker.manager.core.phases import PilotState
from stoker.manager.core.state import JOURNAL_LOST, Device, Library, Pilot, State
from stoker.manager.protocol import bounds, to_manager, to_pilot
from stoker.manager.protocol.blocks import LossReason
from stoker.manager.protocol.ids import DeviceId, PilotId
from stoker.manager.protocol.to_manager import (
    CallEvicted,
    CallsEnded,
    CallsProgress,
    CallsReturned,
    DeviceFault,
    FetchFailed,
    GangMeets,
    Heartbeat,
    LibraryGone,
    LibraryNews,
    LibraryReady,
    LibraryResized,
    ObjectsGone,
    ObjectsHere,
    PilotHello,
    PilotLeaving,
    SnapshotHere,
    WalltimeNews,
    WantObjects,
)
from stoker.manager.protocol.wire import why_not

if TYPE_CHECKING:
    from stoker.manager.core.core import Core

KEPT_NOTES = 100
"""The last so many notes of a pilot are kept, and its first."""
MOST_HELLOS = 4
"""A pilot is asked so often in a row for a newer hello."""
KEPT_PILOTS = 1000
"""So many pilots that are gone are kept: for their stories, and to tell them should they come back."""


def frame(core: Core, event: FromPilot) -> None:
    """Take a pilot's frame, unless it was taken before."""
    state = core.state
    pilot = state.pilots.get(event.pilot)
    messages = event.messages
    if messages and type(messages[0]) is PilotHello:
        pilot = _hello(core, event.pilot, messages[0])
        messages = messages[1:]
    elif pilot is None:
        state.refuse("frame of a pilot that is not known")
        gone = state.gone_pilots.get(event.pilot)
        if gone is not None and gone.kept is not None:
            core.out.append(ToPilot(event.pilot, to_pilot.HelloAgain()))
        elif gone is not None:
            _refuse(core, event.pilot, _NOT_BACK)
        return
    if pilot is None:
        return
    if pilot.hellos_asked and event.sequence:
        state.refuse("frame of a pilot before the hello that it was asked for")
        return
    if not pilot.inbox.accept(event.sequence):
        state.refuse("repeated or early frame of a pilot")
        core.say(pilot, to_pilot.Ack(pilot.inbox.last))
        return
    for message in messages:
        if pilot.state is PilotState.GONE:  # it has left in this very frame
            break
        if wrong := bounds.wrong_with(message):
            _unsound(core, pilot, wrong)
            return
        _message(core, pilot, message)
    if event.sequence:
        core.say(pilot, to_pilot.Ack(event.sequence))


def _unsound(core: Core, pilot: Pilot, wrong: str) -> None:
    """A pilot says what cannot be. Nothing that rests on it can be believed, so the pilot is given up for good."""
    core.state.refuse("message of a pilot with a value that cannot be")
    _refuse(core, pilot.id, wrong)
    lost(core, pilot.id, f"it said what cannot be: {wrong}", may_return=False)


def _message(core: Core, pilot: Pilot, message: to_manager.FromPilot) -> None:
    if type(message) is CallsEnded:  # nearly all are: they need not pass the rest
        library = pilot.libraries.get(message.library)
        if library is not None:
            feeding.ended(core, library, message.ends)
            return
    match message:
        case Heartbeat():
            heartbeats.take(core, pilot, message)
        case PilotLeaving(reason=reason, loss=loss):
            lost(core, pilot.id, reason, loss=loss, may_return=False)
        case PilotHello():
            core.state.refuse("hello in the middle of a frame")
        case DeviceFault(device=device, reason=reason):
            _fault(core, pilot, device, reason)
        case WalltimeNews(ends_in_s=ends_in_s):
            walltime.note(core, pilot, ends_in_s)
            _supply(core, pilot)
        case WantObjects() | ObjectsHere() | ObjectsGone() | FetchFailed() | SnapshotHere():
            _of_objects(core, pilot, message)
        case _:
            library = pilot.libraries.get(message.library)
            if library is None:
                core.state.refuse("message of a library that the pilot does not have")
            else:
                _of_library(core, library, message)


_OfObjects = WantObjects | ObjectsHere | ObjectsGone | FetchFailed | SnapshotHere


def _of_objects(core: Core, pilot: Pilot, message: _OfObjects) -> None:
    match message:
        case WantObjects(objects=refs):
            objects.wanted(core, pilot, refs)
        case ObjectsHere(arrivals=arrivals):
            for arrival in arrivals:
                objects.arrived(core, pilot, arrival)
        case ObjectsGone(names=names):
            objects.gone(core, pilot, names)
        case FetchFailed():
            objects.failed(core, pilot, message)
        case SnapshotHere():
            snapshots.made(core, pilot, message)
        case _:
            assert_never(message)


_FromLibrary = (
    CallsEnded
    | CallsReturned
    | CallsProgress
    | CallEvicted
    | GangMeets
    | LibraryNews
    | LibraryReady
    | LibraryGone
    | LibraryResized
)


def _of_library(core: Core, library: Library, message: _FromLibrary) -> None:
    match message:
        case CallsEnded(ends=ends):
            feeding.ended(core, library, ends)
        case CallsReturned():
            call_news.returned(core, library, message)
        case CallsProgress():
            call_news.progress(core, library, message)
        case CallEvicted():
            call_news.evicted(core, library, message.progress)
        case GangMeets(call=call, address=address):
            gangs.met(core, library, call, address)
        case LibraryNews(phase=phase, line=line):
            if phase is not library.phase or not line:
                library.notes.append((core.state.now, phase.value))
            library.phase, library.line = phase, line
        case LibraryReady():
            libraries.ready(core, library, message)
        case LibraryGone():
            libraries.gone(core, library, message)
        case LibraryResized():
            libraries.resized(core, library, message)
        case _:
            assert_never(message)


# ---- coming and going


_NOT_BACK = "you were given up as lost, and your calls run elsewhere"


def _refuse(core: Core, id: PilotId, reason: str) -> None:
    core.out.append(ToPilot(id, to_pilot.PilotRefused(reason)))


def _unwanted(state: State, id: PilotId, gone: Pilot | None) -> str:
    """Why one that speaks as it should is not taken in; empty if it is. One with libraries that is not known at all was
    in a part of the journal that is lost, or was given up so long ago that it is forgotten: it is taken in as it is."""
    if state.ending:
        return f"the session is over: {state.ending}"
    if banned := state.banned.get(id, ""):
        return banned
    return _NOT_BACK if gone is not None and gone.kept is None else ""


def _hello(core: Core, id: PilotId, message: PilotHello) -> Pilot | None:
    state = core.state
    pilot = state.pilots.get(id)
    gone = state.gone_pilots.get(id)
    if wrong := why_not(message, session=state.session) or bounds.wrong_with(message) or _unwanted(state, id, gone):
        state.refuse("pilot that is not wanted")
        _refuse(core, id, wrong)
        return None
    known = pilot or gone
    if known is not None and _is_stale(known, message):
        known.hellos_asked += 1
        core.out.append(ToPilot(id, to_pilot.HelloAgain(known.inbox.last)))
        return None
    if known is not None:
        known.hellos_asked = 0
    if gone is not None:
        pilot = rejoin.rejoin(core, gone, message)
    elif pilot is None:
        pilot = state.pilots[id] = Pilot(
            id, host=message.host, pid=message.pid, block=message.block, folder=message.folder, now=state.now
        )
        for facts in message.devices:
            pilot.devices[facts.device] = Device(pilot, facts, state.now)
        pilot.troubles, pilot.lacks = message.troubles, message.lacks
        said = [*message.troubles, *(f"{facts.device}: {facts.fault}" for facts in message.devices if facts.fault)]
        pilot.notes += [(state.now, text) for text in dict.fromkeys(said)]
        blocks.pilot_came(core, pilot)
    else:
        pilot.notes.append((state.now, "came back"))
        if pilot.state is PilotState.CUT:
            pilot.state = PilotState.HERE
    lost = pilot.inbox.skip_to(message.acknowledged)
    if lost:
        state.notice(JOURNAL_LOST)
    repair.note_numbers(state, message)
    walltime.note(core, pilot, message.ends_in_s)
    objects.pilot_came(core, pilot, message)
    core.say(
        pilot, to_pilot.PilotWelcome(state.session, core.heartbeat_s, core.lease_s, again=lost, hello=message.number)
    )
    reconcile.reconcile(core, pilot, message)
    _faults(core, pilot, message.faults, lost=lost)
    _supply(core, pilot)
    return pilot


def _is_stale(pilot: Pilot, message: PilotHello) -> bool:
    """True if a hello speaks of the time before frames that were taken, because their acknowledgement has not reached
    the pilot. It is older than the manager's books then: a library that has ended would seem to live, and a call that
    was given back to run. The frames are not taken twice, so nothing would put that right."""
    return pilot.hellos_asked < MOST_HELLOS and not pilot.inbox.has_hole and message.acknowledged < pilot.inbox.last


def _supply(core: Core, pilot: Pilot) -> None:
    """A pilot has come, gone, or changed its state: tell everybody who plans with it."""
    for context in {library.context.recipe.key: library.context for library in pilot.libraries.values()}.values():
        calls.starving(core, context)
        suspects.supply(core, context)
        if context.queue.gangs:
            feeding.serve_after(core, context)
    core.supply_changed = True
    core.changed("pilots", pilot.id)


def cut(core: Core, id: PilotId) -> None:
    """A pilot's connection broke: nothing more is sent there until it is back or given up."""
    pilot = core.state.pilots.get(id)
    if pilot is None or pilot.state is not PilotState.HERE:
        return
    pilot.state = PilotState.CUT
    pilot.notes.append((core.state.now, "its connection broke"))
    del pilot.notes[1:-KEPT_NOTES]
    objects.pilot_cut(core, pilot)
    for library in pilot.libraries.values():
        feeding.reclass(core, library)
    _supply(core, pilot)


def lost(
    core: Core,
    id: PilotId,
    reason: str,
    *,
    loss: LossReason | None = LossReason.UNEXPLAINED,
    may_return: bool = True,
) -> None:
    """A pilot is gone with everything that it held. `loss`: why it counts as lost, None if it left as it should; one
    that the manager told to end is not lost. `may_return`: it may be alive, and is taken back if it reconnects."""
    state = core.state
    pilot = state.pilots.pop(id, None)
    if pilot is None:
        return
    if may_return:
        rejoin.remember(pilot)
    state.pilots_gone += 1
    blocks.pilot_left(core, pilot, loss=None if pilot.released or state.ending else loss)
    objects.pilot_left(core, pilot)
    pilot.state = PilotState.GONE
    pilot.notes.append((state.now, f"gone: {reason}"))
    suspects.pilot_lost(core, pilot)
    for library in list(pilot.libraries.values()):
        libraries.lost(core, library, reason=reason)
    for device in pilot.devices.values():
        libraries.tier(core, device)
    state.gone_pilots[id] = pilot
    if len(state.gone_pilots) > KEPT_PILOTS:
        del state.gone_pilots[next(iter(state.gone_pilots))]
    _supply(core, pilot)


def release(core: Core, pilot: Pilot, reason: str) -> None:
    """Drain a pilot and let it end: it gets nothing new, finishes what it runs, and gives back the rest."""
    pilot.released = True
    if pilot.state in (PilotState.DRAINING, PilotState.GONE):
        return
    pilot.state = PilotState.DRAINING
    pilot.notes.append((core.state.now, f"draining: {reason}"))
    hand_on_s = objects.pilot_drains(core, pilot)
    for library in pilot.libraries.values():
        feeding.unsend(core, library, why=f"back in the queue: {pilot.id} is to end")
        feeding.reclass(core, library)
    core.say(pilot, to_pilot.Exit(reason, drain=True, hand_on_s=hand_on_s))
    _supply(core, pilot)


def leaves(core: Core, pilot: Pilot) -> None:
    """A pilot has refused to load, without fault: it is leaving, whatever the reason, and gets nothing new."""
    if pilot.state is PilotState.HERE:
        pilot.state = PilotState.DRAINING
        pilot.notes.append((core.state.now, "draining: it is about to leave"))
        objects.pilot_drains(core, pilot)
        for library in pilot.libraries.values():
            feeding.unsend(core, library, why=f"back in the queue: {pilot.id} is about to leave")
            feeding.reclass(core, library)
        _supply(core, pilot)


def restarted(core: Core) -> None:
    """The manager is back from its journal: nobody is connected until they say so."""
    repair.leave_gaps(core.state)
    for pilot in core.state.pilots.values():
        cut(core, pilot.id)
    for client in core.state.clients.values():
        client.connected = False
        client.known_ends = client.first_unacked + len(client.unacked)


# ---- what they tell


def _faults(core: Core, pilot: Pilot, faults: Mapping[DeviceId, str], *, lost: bool) -> None:
    """A pilot says in its hello which devices have failed. `lost`: the manager may have missed that one is well."""
    for device in list(pilot.devices.values()):
        reason = faults.get(device.id, device.facts.fault if lost else device.fault)
        if reason != device.fault:
            _fault(core, pilot, device.id, reason)


def _fault(core: Core, pilot: Pilot, id: str, reason: str) -> None:
    """A device failed its probe, or is well again: what holds it or loads on it ends there, and its calls run again."""
    device = pilot.devices.get(DeviceId(id))
    if device is None:
        core.state.refuse("fault of a device that the pilot does not have")
        return
    if device.fault == reason:  # its hello has told it
        return
    device.fault = reason
    if not reason:
        pilot.notes.append((core.state.now, f"{id} is well again"))
        _supply(core, pilot)
        return
    pilot.notes.append((core.state.now, f"{id} quarantined: {reason}"))
    for library in tuple(device.libraries.values()):
        for call in tuple(library.held.values()):
            calls.withdraw(core, call, running=True)
            calls.requeue(core, (call,), why=f"{id} of {pilot.id} is quarantined ({reason}), not counted as a try")
        libraries.stop(core, library, reason=f"{id} is quarantined: {reason}")
    _supply(core, pilot)
