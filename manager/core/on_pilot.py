"""A pilot that was given up comes back: what it still holds is worth keeping.

A broken connection is taken for a lost pilot after a second, because calls should not wait for a node that is dead.
Often it was the network. The pilot has kept its contexts hot and its calls running meanwhile, so it is taken back as it
is: its libraries are the manager's again; a call of its that still waits in the queue goes on there as if nothing had
happened; one that runs elsewhere by now may finish here as well, and whichever ends first ends the call. What its
frames say that were not acknowledged is still to come, and counts.

A pilot that left by itself, or was told to go, does not come back (`kept` is None).

A pilot came back: what the manager thinks is there, against what is there.

The hello of a pilot that reconnects says what it held before the frames that were not acknowledged; those follow, and
end what they end. So whatever it does not list, it never got or has lost; and whatever it was told while it was cut
off, it must be told again.

Heartbeats, and which of them tell something new.

A pilot is alive with each heartbeat; most say nothing else. The shell journals a heartbeat only if it tells something
new: the core then takes it as any event. No other heartbeat reaches the core, so a replay decides as the manager did.
Memory counts as new when it has moved by a sixteenth, so that a page more or less changes nothing.

What pilots say, and what is done about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from stoker.manager.core import (
    block_orders,
    blocks,
    dispatch,
    ending,
    gangs,
    holding,
    libraries,
    objects,
    on_library,
    pilots,
    queues,
    registry,
    sending,
)
from stoker.manager.core.events import FromPilot, ToPilot
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, CallState, Device, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.state import JOURNAL_LOST, State
from stoker.protocol import bounds, to_manager, to_pilot
from stoker.protocol.ids import CallId, DeviceId, LibraryId, PilotId
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
    LibraryFacts,
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
from stoker.protocol.to_pilot import CancelCalls, Exit, StopLibrary
from stoker.protocol.wire import why_not

# ---- rejoin


def rejoin(manager: Manager, pilot: Pilot, message: PilotHello) -> Pilot:
    """Take back a pilot that was given up, with the libraries that it still has."""
    state, kept = manager.state, pilot.kept or {}
    pilots.pilot_rejoins(manager, pilot)
    blocks.undo_loss(manager, pilot)
    block_orders.pilot_rejoined(manager, pilot)
    pilots.drop_kept(pilot)
    pilot.note(state.now, "came back after it had been given up")
    libraries.devices_back(manager, pilot)
    for facts in message.libraries:
        before = kept.get(facts.library)
        if before is not None:
            libraries.readmit_library(manager, *before)
    return pilot


# ---- reconcile


def reconcile(manager: Manager, pilot: Pilot, message: PilotHello) -> None:
    """Make the manager's picture of a pilot true, and the pilot do what it was told meanwhile."""
    there = {facts.library: facts for facts in message.libraries}
    for library in list(pilot.libraries.values()):
        if library.id not in there or there[library.id].recipe != library.context.recipe.key:
            libraries.lose_library(manager, library, reason="it came back without the library")
    for id, facts in there.items():
        if id not in pilot.libraries and pilots.adopt_library(manager, pilot, facts, message) is None:
            manager.say(pilot, StopLibrary(id, "the manager does not know it"))
    libraries_here = list(pilot.libraries.values())
    _requeue_missing(manager, libraries_here, there)
    for library in libraries_here:
        _library(manager, library, there[library.id])
    for library in libraries_here:  # not before the picture of all is true: a gang may begin on several of them
        if pilot.libraries.get(library.id) is library:
            _go_on(manager, library, there[library.id])
    if pilot.state is PilotState.DRAINING:
        manager.say(pilot, Exit("it was told to drain", drain=True))


def _unknown(manager: Manager, library: Library, id: CallId) -> None:
    """A call is in a library that does not hold it, as far as the manager knows. One that waits goes on there: its
    pilot had been given up, or the journal has lost where it was sent. One that was never submitted is an orphan."""
    call = manager.state.calls.get(id)
    if call is None:
        if pilots.is_unheard_of(manager.state, id):
            pilots.take_orphan(manager, library, id)
        else:
            holding.drop(manager, library, id, running=False)
    elif call.state is CallState.WAITING and holding.may_go_on(library, call):
        queues.leave_queue(manager, call)
        holding.resume(manager, library, call, why="it has run there all the time: it goes on")
    else:  # it runs elsewhere by now; of a gang, the whole begins again
        is_gang = call.group.options.gang[1] > 1
        holding.drop(manager, library, id, running=is_gang, of_gang=is_gang)


def _requeue_missing(manager: Manager, here: list[Library], there: dict[LibraryId, LibraryFacts]) -> None:
    """Calls that never reached their libraries go back to their queues. Of a gang several members may lack it: they are
    all known before it is taken apart, or one of them would be told to drop what it has not, after it begins again."""
    missing: dict[Call, Library] = {}
    for library in here:
        for call in holding.now_holds(library, set(there[library.id].calls)):
            missing.setdefault(call, library)
    for call, library in missing.items():
        holding.requeue(manager, (call,), why=f"never reached lib-{library.id}: back in the queue")


def _library(manager: Manager, library: Library, facts: LibraryFacts) -> None:
    """Make the manager's picture of one library true. It is given nothing yet."""
    listed = set(facts.calls)
    unknown = [id for id in facts.calls if id not in library.held and id not in library.zombies]
    holding.now_occupies(library, listed)
    sending.forget_sent_functions(library)
    libraries.set_slots(library, facts.slots)
    for running in (False, True):
        orphans = manager.state.orphans
        again = tuple(CallId(id) for id, flag in library.zombies.items() if flag is running and id not in orphans)
        if again:
            manager.say(library.pilot, CancelCalls(library.id, again, running))
    for id in unknown:
        _unknown(manager, library, id)
    gangs.remind_of_rank0(manager, library)
    libraries.resize_again(manager, library)
    queues.relist_library(manager, library)


def _go_on(manager: Manager, library: Library, facts: LibraryFacts) -> None:
    """Tell a library to end, if it was told so before; else have it serve its queue."""
    if library.state is LibraryState.STOPPING:
        manager.say(library.pilot, StopLibrary(library.id, "it was told to stop"))
    elif library.state is LibraryState.LOADING and facts.ready:
        on_library.library_hot(manager, library)
    else:
        dispatch.feed_library(manager, library)


# ---- heartbeats


_PART = 16
"""A memory measurement counts as new if it differs from the last one by a 16th of it,"""
_LEAST_BYTES = 16 << 20
"""and by at least this much."""
RECORD_S = 5.0
"""Costs of runs are recorded no more often than this."""


def is_heartbeat(event: FromPilot) -> bool:
    """True if a frame is one heartbeat that is not numbered: losing it loses no other frame."""
    return not event.sequence and len(event.messages) == 1 and type(event.messages[0]) is Heartbeat


def must_be_recorded(state: State, event: FromPilot, now: float) -> bool:
    """True if a heartbeat (see `is_heartbeat`) changes what the core knows, or runs are to be recorded with it."""
    pilot, message = state.pilots.get(event.pilot), event.messages[0]
    if pilot is None or type(message) is not Heartbeat:
        return False
    if state.unrecorded and now - state.recorded_at >= RECORD_S:
        return True
    if message.refused_frames != pilot.refused_frames or _moved(pilot.cache_bytes, message.cache_bytes):
        return True
    for use in message.libraries:
        library = pilot.libraries.get(use.library)
        if library is not None and (
            _moved(library.memory_bytes, use.memory_bytes) or _moved(library.device_bytes, use.device_bytes)
        ):
            return True
    return False


def _moved(before: int, after: int) -> bool:
    return before != after and abs(after - before) >= max(_LEAST_BYTES, before // _PART)


def take_heartbeat(manager: Manager, pilot: Pilot, message: Heartbeat) -> None:
    """A heartbeat that tells something new: what a pilot has measured."""
    pilot.cache_bytes = message.cache_bytes
    pilot.refused_frames = message.refused_frames
    for use in message.libraries:
        library = pilot.libraries.get(use.library)
        if library is not None:
            libraries.record_use(
                library, memory_bytes=use.memory_bytes, device_bytes=use.device_bytes, now=manager.state.now
            )
    ending.record_runs(manager)


# ---- pilots


MOST_HELLOS = 4
"""A pilot is asked so often in a row for a newer hello."""


def on_pilot_frame(manager: Manager, event: FromPilot) -> None:
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
    pilots.pilot_lost(manager, pilot.id, f"it said what cannot be: {wrong}", may_return=False)


def _message(manager: Manager, pilot: Pilot, message: to_manager.FromPilot) -> None:
    if type(message) is CallsEnded:  # nearly all are: they need not pass the rest
        library = pilot.libraries.get(message.library)
        if library is not None:
            on_library.calls_ended(manager, library, message.ends)
            return
    match message:
        case Heartbeat():
            take_heartbeat(manager, pilot, message)
        case PilotLeaving(reason=reason, loss=loss):
            pilots.pilot_lost(manager, pilot.id, reason, loss=loss, may_return=False)
        case PilotHello():
            manager.state.refuse("hello in the middle of a frame")
        case DeviceFault(device=device, reason=reason):
            _fault(manager, pilot, device, reason)
        case WalltimeUpdate(ends_in_s=ends_in_s):
            pilots.note_walltime(manager, pilot, ends_in_s)
            pilots.supply_changed(manager, pilot)
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
            objects.objects_wanted(manager, pilot, refs)
        case ObjectsHere(arrivals=arrivals):
            for arrival in arrivals:
                objects.object_arrived(manager, pilot, arrival)
        case ObjectsGone(names=names):
            objects.objects_gone(manager, pilot, names)
        case FetchFailed():
            objects.fetch_failed(manager, pilot, message)
        case SnapshotHere():
            libraries.snapshot_made(manager, pilot, message)
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
            on_library.calls_ended(manager, library, ends)
        case CallsReturned():
            on_library.calls_returned(manager, library, message)
        case CallsProgress():
            on_library.calls_progressed(manager, library, message)
        case CallEvicted():
            on_library.call_evicted(manager, library, message.progress)
        case GangMeets(call=call, address=address):
            gangs.rank0_listens(manager, library, call, address)
        case LibraryUpdate(phase=phase, line=line):
            if phase is not library.phase or not line:
                library.note(manager.state.now, phase.value)
            library.phase, library.line = phase, line
        case LibraryReady():
            on_library.library_ready(manager, library, message)
        case LibraryGone():
            on_library.library_gone(manager, library, message)
        case LibraryResized():
            libraries.resized(manager, library, message)
        case CallYielded():
            manager.state.refuse("pieces in a frame that is journalled")
        case LibraryBatch():
            on_library.engine_batch_report(manager, library, message)
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
        pilot = rejoin(manager, gone, message)
    elif pilot is None:
        pilot = Pilot(id, host=message.host, pid=message.pid, block=message.block, folder=message.folder, now=state.now)
        pilots.pilot_joins(manager, pilot)
        for facts in message.devices:
            pilot.devices[facts.device] = Device(pilot, facts, state.now)
        pilot.troubles, pilot.lacks = message.troubles, message.lacks
        said = [*message.troubles, *(f"{facts.device}: {facts.fault}" for facts in message.devices if facts.fault)]
        pilot.note(state.now, *dict.fromkeys(said))
        block_orders.pilot_joined(manager, pilot)
    else:
        pilot.note(state.now, "came back")
        pilots.pilot_reconnects(pilot)
    lost = pilot.inbox.skip_to(message.acknowledged)
    if lost:
        state.notice(JOURNAL_LOST)
    pilots.note_numbers(state, message)
    pilots.note_walltime(manager, pilot, message.ends_in_s)
    objects.pilot_joined(manager, pilot, message)
    manager.say(
        pilot,
        to_pilot.PilotWelcome(state.session, manager.heartbeat_s, manager.lease_s, again=lost, hello=message.number),
    )
    reconcile(manager, pilot, message)
    _faults(manager, pilot, message.faults, lost=lost)
    pilots.supply_changed(manager, pilot)
    return pilot


def _is_stale(pilot: Pilot, message: PilotHello) -> bool:
    """True if a hello speaks of the time before frames that were taken, because their acknowledgement has not reached
    the pilot. It is older than the manager's records then: a library that has ended would seem to live, and a call that
    was given back to run. The frames are not taken twice, so nothing would put that right."""
    return pilot.hellos_asked < MOST_HELLOS and not pilot.inbox.has_hole and message.acknowledged < pilot.inbox.last


def manager_restarted(manager: Manager) -> None:
    """The manager is back from its journal: nobody is connected until they say so."""
    pilots.skip_numbers(manager.state)
    for pilot in manager.state.pilots.values():
        pilots.pilot_disconnected(manager, pilot.id)
    for client in manager.state.clients.values():
        client.connected = False
        client.known_ends = client.first_unacked + len(client.unacked)
    registry.ask_advice_again(manager)


# ---- what they tell


def _faults(manager: Manager, pilot: Pilot, faults: Mapping[DeviceId, str], *, lost: bool) -> None:
    """A pilot says in its hello which devices have failed. `lost`: the manager may have missed that one is well."""
    for device in list(pilot.devices.values()):
        pilots.device_reported(manager, device, faults.get(device.id, device.facts.fault if lost else device.reported))


def _fault(manager: Manager, pilot: Pilot, id: str, reason: str) -> None:
    """A device failed its probe, or is well again."""
    device = pilot.devices.get(DeviceId(id))
    if device is None:
        manager.state.refuse("fault of a device that the pilot does not have")
        return
    pilots.device_reported(manager, device, reason)
