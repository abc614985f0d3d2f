"""What pilots say, and what is done about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from stoker.manager.core import (
    block_orders,
    call_ends,
    call_updates,
    draining,
    gangs,
    heartbeats,
    libraries,
    library_messages,
    objects,
    pilot_states,
    quarantine,
    reconcile,
    registry,
    rejoin,
    repair,
    snapshots,
)
from stoker.manager.core.commands import ToPilot
from stoker.manager.core.events import FromPilot
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Device, Library, Pilot
from stoker.manager.core.phases import PilotState
from stoker.manager.core.state import JOURNAL_LOST, State
from stoker.protocol import bounds, to_manager, to_pilot
from stoker.protocol.ids import DeviceId, PilotId
from stoker.protocol.to_manager import (
    CallEvicted,
    CallsEnded,
    CallsProgress,
    CallsReturned,
    CallYielded,
    DeviceFault,
    FetchFailed,
    GangMeets,
    Heartbeat,
    LibraryBatch,
    LibraryGone,
    LibraryReady,
    LibraryResized,
    LibraryUpdate,
    ObjectsGone,
    ObjectsHere,
    PilotHello,
    PilotLeaving,
    SnapshotHere,
    WalltimeUpdate,
    WantObjects,
)
from stoker.protocol.wire import why_not

MOST_HELLOS = 4
"""A pilot is asked so often in a row for a newer hello."""


def frame(manager: Manager, event: FromPilot) -> None:
    """Take a pilot's frame, unless it was taken before."""
    state = manager.state
    pilot = state.pilots.get(event.pilot)
    messages = event.messages
    if messages and type(messages[0]) is PilotHello:
        pilot = _hello(manager, event.pilot, messages[0])
        messages = messages[1:]
    elif pilot is None:
        state.refuse("frame of a pilot that is not known")
        gone = state.gone_pilots.get(event.pilot)
        if gone is not None and gone.kept is not None:
            manager.out.append(ToPilot(event.pilot, to_pilot.HelloAgain()))
        elif gone is not None:
            _refuse(manager, event.pilot, _NOT_BACK)
        return
    if pilot is None:
        return
    if pilot.hellos_asked and event.sequence:
        state.refuse("frame of a pilot before the hello that it was asked for")
        return
    if not pilot.inbox.accept(event.sequence):
        state.refuse("repeated or early frame of a pilot")
        manager.say(pilot, to_pilot.Ack(pilot.inbox.last))
        return
    for message in messages:
        if pilot.state is PilotState.GONE:  # it has left in this very frame
            break
        if wrong := bounds.wrong_with(message):
            _unsound(manager, pilot, wrong)
            return
        _message(manager, pilot, message)
    if event.sequence:
        manager.say(pilot, to_pilot.Ack(event.sequence))


def _unsound(manager: Manager, pilot: Pilot, wrong: str) -> None:
    """A pilot says what cannot be. Nothing that rests on it can be believed, so the pilot is given up for good."""
    manager.state.refuse("message of a pilot with a value that cannot be")
    _refuse(manager, pilot.id, wrong)
    pilot_states.lost(manager, pilot.id, f"it said what cannot be: {wrong}", may_return=False)


def _message(manager: Manager, pilot: Pilot, message: to_manager.FromPilot) -> None:
    if type(message) is CallsEnded:  # nearly all are: they need not pass the rest
        library = pilot.libraries.get(message.library)
        if library is not None:
            call_ends.ended(manager, library, message.ends)
            return
    match message:
        case Heartbeat():
            heartbeats.take(manager, pilot, message)
        case PilotLeaving(reason=reason, loss=loss):
            pilot_states.lost(manager, pilot.id, reason, loss=loss, may_return=False)
        case PilotHello():
            manager.state.refuse("hello in the middle of a frame")
        case DeviceFault(device=device, reason=reason):
            _fault(manager, pilot, device, reason)
        case WalltimeUpdate(ends_in_s=ends_in_s):
            draining.note(manager, pilot, ends_in_s)
            pilot_states.supply_changed(manager, pilot)
        case WantObjects() | ObjectsHere() | ObjectsGone() | FetchFailed() | SnapshotHere():
            _of_objects(manager, pilot, message)
        case _:
            library = pilot.libraries.get(message.library)
            if library is None:
                manager.state.refuse("message of a library that the pilot does not have")
            else:
                _of_library(manager, library, message)


_OfObjects = WantObjects | ObjectsHere | ObjectsGone | FetchFailed | SnapshotHere


def _of_objects(manager: Manager, pilot: Pilot, message: _OfObjects) -> None:
    match message:
        case WantObjects(objects=refs):
            objects.wanted(manager, pilot, refs)
        case ObjectsHere(arrivals=arrivals):
            for arrival in arrivals:
                objects.arrived(manager, pilot, arrival)
        case ObjectsGone(names=names):
            objects.gone(manager, pilot, names)
        case FetchFailed():
            objects.failed(manager, pilot, message)
        case SnapshotHere():
            snapshots.made(manager, pilot, message)
        case _:
            assert_never(message)


_FromLibrary = (
    CallsEnded
    | CallsReturned
    | CallsProgress
    | CallEvicted
    | GangMeets
    | LibraryUpdate
    | LibraryReady
    | LibraryGone
    | LibraryResized
    | CallYielded
    | LibraryBatch
)


def _of_library(manager: Manager, library: Library, message: _FromLibrary) -> None:
    match message:
        case CallsEnded(ends=ends):
            call_ends.ended(manager, library, ends)
        case CallsReturned():
            call_updates.returned(manager, library, message)
        case CallsProgress():
            call_updates.progress(manager, library, message)
        case CallEvicted():
            call_updates.evicted(manager, library, message.progress)
        case GangMeets(call=call, address=address):
            gangs.met(manager, library, call, address)
        case LibraryUpdate(phase=phase, line=line):
            if phase is not library.phase or not line:
                library.note(manager.state.now, phase.value)
            library.phase, library.line = phase, line
        case LibraryReady():
            library_messages.ready(manager, library, message)
        case LibraryGone():
            library_messages.gone(manager, library, message)
        case LibraryResized():
            libraries.resized(manager, library, message)
        case CallYielded():
            manager.state.refuse("pieces in a frame that is journalled")
        case LibraryBatch():
            library_messages.batch(manager, library, message)
        case _:
            assert_never(message)


# ---- coming and going


_NOT_BACK = "you were given up as lost, and your calls run elsewhere"


def _refuse(manager: Manager, id: PilotId, reason: str) -> None:
    manager.out.append(ToPilot(id, to_pilot.PilotRefused(reason)))


def _unwanted(state: State, id: PilotId, gone: Pilot | None) -> str:
    """Why one that speaks as it should is not taken in; empty if it is. One with libraries that is not known at all was
    in a part of the journal that is lost, or was given up so long ago that it is forgotten: it is taken in as it is."""
    if state.ending:
        return f"the session is over: {state.ending}"
    if banned := state.banned.get(id, ""):
        return banned
    return _NOT_BACK if gone is not None and gone.kept is None else ""


def _hello(manager: Manager, id: PilotId, message: PilotHello) -> Pilot | None:
    state = manager.state
    pilot = state.pilots.get(id)
    gone = state.gone_pilots.get(id)
    if wrong := why_not(message, session=state.session) or bounds.wrong_with(message) or _unwanted(state, id, gone):
        state.refuse("pilot that is not wanted")
        _refuse(manager, id, wrong)
        return None
    known = pilot or gone
    if known is not None and _is_stale(known, message):
        known.hellos_asked += 1
        manager.out.append(ToPilot(id, to_pilot.HelloAgain(known.inbox.last)))
        return None
    if known is not None:
        known.hellos_asked = 0
    if gone is not None:
        pilot = rejoin.rejoin(manager, gone, message)
    elif pilot is None:
        pilot = Pilot(id, host=message.host, pid=message.pid, block=message.block, folder=message.folder, now=state.now)
        pilot_states.joins(manager, pilot)
        for facts in message.devices:
            pilot.devices[facts.device] = Device(pilot, facts, state.now)
        pilot.troubles, pilot.lacks = message.troubles, message.lacks
        said = [*message.troubles, *(f"{facts.device}: {facts.fault}" for facts in message.devices if facts.fault)]
        pilot.note(state.now, *dict.fromkeys(said))
        block_orders.pilot_came(manager, pilot)
    else:
        pilot.note(state.now, "came back")
        pilot_states.reconnects(pilot)
    lost = pilot.inbox.skip_to(message.acknowledged)
    if lost:
        state.notice(JOURNAL_LOST)
    repair.note_numbers(state, message)
    draining.note(manager, pilot, message.ends_in_s)
    objects.pilot_came(manager, pilot, message)
    manager.say(
        pilot,
        to_pilot.PilotWelcome(state.session, manager.heartbeat_s, manager.lease_s, again=lost, hello=message.number),
    )
    reconcile.reconcile(manager, pilot, message)
    _faults(manager, pilot, message.faults, lost=lost)
    pilot_states.supply_changed(manager, pilot)
    return pilot


def _is_stale(pilot: Pilot, message: PilotHello) -> bool:
    """True if a hello speaks of the time before frames that were taken, because their acknowledgement has not reached
    the pilot. It is older than the manager's records then: a library that has ended would seem to live, and a call that
    was given back to run. The frames are not taken twice, so nothing would put that right."""
    return pilot.hellos_asked < MOST_HELLOS and not pilot.inbox.has_hole and message.acknowledged < pilot.inbox.last


def restarted(manager: Manager) -> None:
    """The manager is back from its journal: nobody is connected until they say so."""
    repair.leave_gaps(manager.state)
    for pilot in manager.state.pilots.values():
        pilot_states.cut(manager, pilot.id)
    for client in manager.state.clients.values():
        client.connected = False
        client.known_ends = client.first_unacked + len(client.unacked)
    registry.ask_again(manager)


# ---- what they tell


def _faults(manager: Manager, pilot: Pilot, faults: Mapping[DeviceId, str], *, lost: bool) -> None:
    """A pilot says in its hello which devices have failed. `lost`: the manager may have missed that one is well."""
    for device in list(pilot.devices.values()):
        quarantine.reported(manager, device, faults.get(device.id, device.facts.fault if lost else device.reported))


def _fault(manager: Manager, pilot: Pilot, id: str, reason: str) -> None:
    """A device failed its probe, or is well again."""
    device = pilot.devices.get(DeviceId(id))
    if device is None:
        manager.state.refuse("fault of a device that the pilot does not have")
        return
    quarantine.reported(manager, device, reason)
