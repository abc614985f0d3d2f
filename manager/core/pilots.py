"""What pilots say, and what is done about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import msgspec

from stoker.manager.core import calls, libraries
from stoker.manager.core.commands import RecordRuns, ToPilot
from stoker.manager.core.events import FromPilot
from stoker.manager.core.state import Call, Context, Device, Gang, Library, LibraryState, Pilot, PilotState
from stoker.manager.protocol import to_client, to_pilot
from stoker.manager.protocol.calls import CallProgress
from stoker.manager.protocol.ids import PilotId
from stoker.manager.protocol.to_manager import (
    CallEvicted,
    CallsEnded,
    CallsProgress,
    CallsReturned,
    Heartbeat,
    LibraryGone,
    LibraryNews,
    LibraryReady,
    LibraryResized,
    PilotHello,
    PilotLeaving,
)
from stoker.manager.protocol.wire import VERSION

if TYPE_CHECKING:
    from stoker.manager.core.core import Core


def frame(core: Core, event: FromPilot) -> None:
    """Take a pilot's frame, unless it was taken before."""
    state = core.state
    pilot = state.pilots.get(event.pilot)
    if pilot is None:
        if not event.messages or not isinstance(event.messages[0], PilotHello):
            state.refuse("frame of a pilot that has not said hello")
            return
    elif not pilot.inbox.accept(event.sequence):
        state.refuse("repeated or early frame of a pilot")
        core.say(pilot, to_pilot.Ack(pilot.inbox.last))
        return
    for message in event.messages:
        if type(message) is PilotHello:
            pilot = _hello(core, event.pilot, message)
        if pilot is None:
            return
        _message(core, pilot, message)
    if event.sequence and pilot is not None:
        core.say(pilot, to_pilot.Ack(event.sequence))


def _message(core: Core, pilot: Pilot, message: object) -> None:
    state = core.state
    match message:
        case CallsEnded():
            library = _of(core, pilot, message.library)
            if library is not None:
                libraries.ended(core, library, message.ends)
        case Heartbeat():
            _heartbeat(core, pilot, message)
        case PilotHello():
            pass
        case PilotLeaving():
            lost(core, pilot.id, message.reason, counted=False)
        case LibraryNews():
            library = _of(core, pilot, message.library)
            if library is not None:
                library.phase = message.phase
                library.notes.append((state.now, message.phase.value))
        case LibraryReady():
            library = _of(core, pilot, message.library)
            if library is not None:
                libraries.ready(core, library, message)
        case LibraryGone():
            library = _of(core, pilot, message.library)
            if library is not None:
                libraries.gone(core, library, message)
        case CallsReturned():
            library = _of(core, pilot, message.library)
            if library is not None:
                _returned(core, library, message)
        case CallsProgress():
            _progress(core, message)
        case CallEvicted():
            library = _of(core, pilot, message.library)
            if library is not None:
                _evicted(core, library, message.progress)
        case LibraryResized():
            library = _of(core, pilot, message.library)
            if library is not None and message.device_memory_bytes <= library.promised_bytes:
                libraries.promise(library, message.device_memory_bytes)
                core.supply_changed = True
        case _:
            assert_never(message)  # type: ignore[arg-type]


def _of(core: Core, pilot: Pilot, id: int) -> Library | None:
    library = pilot.libraries.get(id)  # type: ignore[call-overload]
    if library is None:
        core.state.refuse("message of a library that the pilot does not have")
    found: Library | None = library
    return found


def _hello(core: Core, id: PilotId, message: PilotHello) -> Pilot | None:
    state = core.state
    wrong = ""
    if message.protocol != VERSION or message.session != state.session:
        wrong = f"this is session {state.session}, protocol {VERSION}"
    elif state.ending:
        wrong = f"the session is over: {state.ending}"
    elif id in state.pilots and state.pilots[id].state is PilotState.GONE:
        wrong = "you were given up as lost, and your calls run elsewhere"
    if wrong:
        state.refuse("pilot that is not wanted")
        core.out.append(ToPilot(id, to_pilot.PilotRefused(wrong)))
        return None
    pilot = state.pilots.get(id)
    if pilot is None:
        pilot = state.pilots[id] = Pilot(
            id, host=message.host, pid=message.pid, block=message.block, folder=message.folder, now=state.now
        )
        for facts in message.devices:
            pilot.devices[facts.device] = Device(pilot, facts, state.now)
    else:
        pilot.notes.append((state.now, "came back"))
        if pilot.state is PilotState.CUT:
            pilot.state = PilotState.HERE
    pilot.ends_at = state.now + message.ends_in_s if message.ends_in_s else 0.0
    core.say(pilot, to_pilot.PilotWelcome(state.session, core.heartbeat_s, core.lease_s))
    _reconcile(core, pilot, message)
    core.supply_changed = True
    if core.tracked:
        for changes in core.tracked:
            changes.pilots.add(pilot.id)
    return pilot


def _reconcile(core: Core, pilot: Pilot, message: PilotHello) -> None:
    """A pilot that came back has sent what it had left to say; what it does not hold now, it never got or has lost."""
    there = {facts.library: facts for facts in message.libraries}
    for library in list(pilot.libraries.values()):
        facts = there.pop(library.id, None)
        if facts is None:
            libraries.lost(core, library, reason="the pilot came back without it")
            continue
        missing = [call for id, call in library.held.items() if id not in facts.calls]
        for call in missing:
            del library.held[call.id]
        library.zombies.intersection_update(facts.calls)
        library.functions.clear()
        libraries.reclass(core, library)
        alone = [call for call in missing if not isinstance(call.holder, Gang)]
        for call in missing:
            if isinstance(call.holder, Gang):
                calls.withdraw(core, call, running=True)
        if missing:
            calls.requeue(
                core,
                [*alone, *(c for c in missing if c not in alone)],
                why="never reached its library: back in the queue",
            )
        unknown = tuple(id for id in facts.calls if id not in library.held and id not in library.zombies)
        if unknown:
            library.zombies.update(unknown)
            core.say(pilot, to_pilot.CancelCalls(library.id, unknown, running=True))
            libraries.reclass(core, library)
        libraries.pull(core, library)
    for id in there:
        core.say(pilot, to_pilot.StopLibrary(id, "the manager does not know it"))


def cut(core: Core, id: PilotId) -> None:
    """A pilot's connection broke: nothing more is sent there until it is back or given up."""
    pilot = core.state.pilots.get(id)
    if pilot is None or pilot.state is not PilotState.HERE:
        return
    pilot.state = PilotState.CUT
    pilot.notes.append((core.state.now, "its connection broke"))
    for library in pilot.libraries.values():
        libraries.reclass(core, library)


def lost(core: Core, id: PilotId, reason: str, *, counted: bool = True) -> None:
    """A pilot is gone with everything that it held."""
    state = core.state
    pilot = state.pilots.get(id)
    if pilot is None or pilot.state is PilotState.GONE:
        return
    draining = pilot.state is PilotState.DRAINING
    pilot.state = PilotState.GONE
    pilot.notes.append((state.now, f"gone: {reason}"))
    if counted and not draining:
        state.lost_pilots += 1
    for library in list(pilot.libraries.values()):
        libraries.lost(core, library, reason=reason)
    for device in pilot.devices.values():
        libraries.tier(core, device)
    core.supply_changed = True
    if core.tracked:
        for changes in core.tracked:
            changes.pilots.add(pilot.id)


def restarted(core: Core) -> None:
    """The manager is back from its journal: nobody is connected until they say so."""
    for pilot in list(core.state.pilots.values()):
        cut(core, pilot.id)
    for client in core.state.clients.values():
        client.connected = False
    core.sends.clear()


def _heartbeat(core: Core, pilot: Pilot, message: Heartbeat) -> None:
    pilot.cache_bytes = message.cache_bytes
    contexts: dict[str, Context] = {}
    for use in message.libraries:
        library = pilot.libraries.get(use.library)
        if library is not None:
            library.memory_bytes, library.device_bytes = use.memory_bytes, use.device_bytes
            contexts[library.context.recipe.key] = library.context
    if message.refused_frames:
        core.state.refused["frames refused by pilots"] = message.refused_frames
    for group in core.state.groups.values():
        if group.kind_runs and group.context.recipe.key in contexts:
            for kind, (count, seconds) in group.kind_runs.items():
                core.out.append(
                    RecordRuns(group.context.recipe.key, group.function.name, kind, int(count), seconds)  # type: ignore[arg-type]
                )
            group.kind_runs = {}


def _returned(core: Core, library: Library, message: CallsReturned) -> None:
    state = core.state
    back: list[Call] = []
    for id in message.calls:
        call = library.held.pop(id, None)
        if call is not None:
            back.append(call)
            if message.need_function:
                library.functions.discard(call.group.function.key)
        elif id in library.zombies:
            library.zombies.discard(id)
        else:
            state.refuse("return of a call that the library does not hold")
    libraries.reclass(core, library)
    if message.refused:
        for call in back:
            call.holder = None
            call.state = calls.CallState.WAITING
            call.note(state.now, f"refused by lib-{library.id} on {library.pilot.id}: {message.refused}")
            calls.place(core, call)
    elif back:
        back.sort(key=lambda call: call.id)
        calls.requeue(core, back, why=f"taken back from lib-{library.id}, which had not begun it")
    if not library.held and library.state is LibraryState.READY:
        libraries.pull(core, library)


def _progress(core: Core, message: CallsProgress) -> None:
    state = core.state
    by_client: dict[str, list[CallProgress]] = {}
    for report in message.reports:
        call = state.calls.get(report.call)
        if call is None:
            state.refuse("progress of a call that is not there")
            continue
        state.reports.by_call[report.call] = report
        if report.state:
            call.spec = msgspec.structs.replace(call.spec, progress=report.state)
        by_client.setdefault(call.group.client.id, []).append(report)
    for id, reports in by_client.items():
        client = state.clients[id]  # type: ignore[index]
        if client.connected:
            core.tell(client, to_client.Progress(reports))


def _evicted(core: Core, library: Library, progress: CallProgress) -> None:
    call = library.held.pop(progress.call, None)
    library.zombies.discard(progress.call)
    libraries.reclass(core, library)
    if call is None:
        core.state.refuse("eviction of a call that the library does not hold")
        return
    call.spec = msgspec.structs.replace(call.spec, progress=progress.state)
    call.holder = None
    call.state = calls.CallState.WAITING
    call.note(core.state.now, f"evicted from lib-{library.id} with its progress kept ({progress.done:g} done)")
    calls.place(core, call)
    libraries.pull(core, library)
