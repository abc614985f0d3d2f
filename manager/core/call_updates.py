"""What pilots say of calls that have not ended: given back, how far they are, made to leave."""

from __future__ import annotations

import msgspec

from stoker.manager.core import call_records, feeding, gangs, holding, indexing, libraries, placing, sending
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Gang, Library
from stoker.manager.core.phases import LibraryState
from stoker.protocol import to_client
from stoker.protocol.bounds import is_sound
from stoker.protocol.calls import CallProgress
from stoker.protocol.ids import ClientId
from stoker.protocol.to_manager import CallsProgress, CallsReturned


def returned(manager: Manager, library: Library, message: CallsReturned) -> None:
    """A library gives calls back that it has not begun, or refuses them."""
    state = manager.state
    back: list[Call] = []
    for id in message.calls:
        call = holding.take_out(library, id)
        if call is not None:
            back.append(call)
            if message.need_function:
                sending.lost_function(library, call.group)
        elif not holding.slot_is_free(library, id):
            state.refuse("return of a call that the library does not hold")
    indexing.relist(manager, library)
    if message.refused:
        library.required_bytes = message.required_bytes
        if not all(call.offered for call in back):  # what was no offer is refused by a library that is about to end
            libraries.stop(manager, library, reason=message.refused)
        for call in back:
            placing.retry(manager, call, why=f"refused by lib-{library.id} on {library.pilot.id}: {message.refused}")
    else:
        holding.gave_back(library)
        holding.requeue(manager, back, why=f"taken back from lib-{library.id}, which had not begun it")
    if not library.held and library.state is LibraryState.READY and not message.refused:
        feeding.pull(manager, library)


def progress(manager: Manager, library: Library, message: CallsProgress) -> None:
    """Running calls say how far they are."""
    state = manager.state
    by_client: dict[ClientId, list[CallProgress]] = {}
    for report in message.reports:
        if not is_sound(report.done, report.total):
            state.refuse("progress of a call that cannot be")
            continue
        call = library.held.get(report.call)
        if call is None:
            if report.call not in library.zombies:
                state.refuse("progress of a call that the library does not hold")
            continue
        if isinstance(call.holder, Gang):
            if call.holder.members[0] is not library:  # every rank may report; the first one's counts
                continue
            gangs.progress(manager, call, call.holder, report)
        call_records.report(state, report)
        if report.state:
            call.spec = msgspec.structs.replace(call.spec, progress=report.state)
        by_client.setdefault(call.group.client.id, []).append(report)
    for id, reports in by_client.items():
        client = state.clients[id]
        if client.connected:
            manager.tell(client, to_client.ProgressReports(reports))


def evicted(manager: Manager, library: Library, progress: CallProgress) -> None:
    """A call has made room, and goes on elsewhere from what it left."""
    call = holding.take_out(library, progress.call)
    if call is None:
        if not holding.slot_is_free(library, progress.call):
            manager.state.refuse("eviction of a call that the library does not hold")
    else:
        if progress.state:
            call.spec = msgspec.structs.replace(call.spec, progress=progress.state)
        call_records.report(manager.state, progress)
    indexing.relist(manager, library)
    if call is not None:
        why = f"evicted from lib-{library.id} with its progress kept ({progress.done:g} done)"
        placing.retry(manager, call, why=why)
    feeding.pull(manager, library)
