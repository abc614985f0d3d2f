"""The open maps of programs: their progress, and the calls that they have still to submit.

A map submits its calls as earlier ones end, so the calls that are open say little about when it will be done. Its
program reports its length, its progress, and the number of calls to come (`to_manager.MapReport`): at its start, and
then once a second at most.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.manager.core.client import Client, MapRecord
from stoker.manager.core.nouns import Context
from stoker.manager.core.phases import LibraryState
from stoker.manager.core.state import State
from stoker.protocol.status import MapStatus
from stoker.protocol.to_manager import MapReport

MOST_MAPS = 1000
"""A program's open maps that are remembered."""


def reported(state: State, client: Client, report: MapReport) -> None:
    """A map says how far it is."""
    known = client.maps.get(report.map)
    if report.over:
        client.maps.pop(report.map, None)
        return
    if known is None:
        if len(client.maps) >= MOST_MAPS:
            del client.maps[next(iter(client.maps))]
        client.maps[report.map] = MapRecord(report, now=state.now)
        return
    if report.done > report.kept and known.report.done == known.report.kept:  # results begin when its model is hot
        known.pace.wait(max([known.began_at, *_hot_since(state, report.context)]))
    known.pace.add((report.done - report.kept) - (known.report.done - known.report.kept), state.now)
    known.report = report


def _hot_since(state: State, key: str) -> list[float]:
    """When the first library of a context became ready; empty if none is."""
    context = state.contexts.get(key)
    libraries = context.libraries.values() if context is not None else ()
    ready = [library.ready_at for library in libraries if library.state is LibraryState.READY]
    return [min(ready)] if ready else []


def open_maps(state: State) -> Iterator[tuple[Client, MapRecord]]:
    """The maps of programs that are here."""
    for client in state.clients.values():
        if client.maps and not client.gone:
            for record in client.maps.values():
                yield client, record


def unsubmitted(state: State, context: Context) -> int:
    """Calls of a context that maps have still to submit, as far as these know their lengths."""
    key = context.recipe.key
    return sum(max(0, record.report.unsent) for _, record in open_maps(state) if record.report.context == key)


def has_unknown_length(state: State, context: Context) -> bool:
    """True if an open map of this context does not know how many items it has: then there is no forecast."""
    key = context.recipe.key
    return any(record.report.total < 0 and record.report.context == key for _, record in open_maps(state))


def statuses(state: State) -> tuple[MapStatus, ...]:
    """Every open map."""
    return tuple(_status(state, client, record) for client, record in open_maps(state))


def _status(state: State, client: Client, record: MapRecord) -> MapStatus:
    report, now = record.report, state.now
    left_s = record.pace.left_s(report.total - report.done, now) if report.total >= 0 else None
    context = state.contexts.get(report.context)
    return MapStatus(
        function=report.name,
        client=client.number,
        context=context.recipe.name if context is not None else "",
        total=report.total,
        done=report.done,
        kept=report.kept,
        rate=record.pace.per_second(now),
        left_s=left_s or 0.0,
    )
