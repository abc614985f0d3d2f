"""Progress of open maps, and forecasts of when calls are done.

The open maps of programs: their progress, and the calls that they have still to submit.

A map submits its calls as earlier ones end, so the calls that are open say little about when it will be done. Its
program reports its length, its progress, and the number of calls to come (`to_manager.MapReport`): at its start, and
then once a second at most.

When the calls of a session will be done, as far as it can be known: the one forecast that `stoker status` shows.

A context's calls end at a rate. Where its hot libraries have ended some rounds of calls within the last half minute
that rate is measured; where calls are longer than that, or libraries are still loading, it is the number of slots over
what a call has taken lately. Contexts that share devices are served in turn, so the session takes as long as its
slowest context, and at least as long as the device time of all contexts, divided by the devices that are here.

Without a pilot that is here the time counts from when the first one comes, with what the last pilot of its source had;
when that is, only the batch system can say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stoker.manager.core.nouns import (
    Client,
    Context,
    Gang,
    Library,
    LibraryState,
    MapRecord,
    PilotState,
)
from stoker.manager.core.state import State
from stoker.protocol import pace
from stoker.protocol.blocks import BlockPhase
from stoker.protocol.status import MapStatus
from stoker.protocol.to_manager import MapReport

MOST_MAPS = 1000  # A program's open maps that are remembered


def record_map_report(state: State, client: Client, report: MapReport) -> None:
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


# ---- outlook
_ROUNDS = 2  # A measured rate counts once every slot has ended about so many calls within its window

_MEASURED_S = 5.0  # A measured rate counts only this long after the first result

_HERE = (PilotState.HERE, PilotState.CUT)


class Outlook(NamedTuple):
    """Seconds until every open call is done (0 = nothing is open, or it is not known), from when the first pilot is
    here; and seconds until the batch system expects to start one (0 = a pilot is here, or nothing is expected)."""

    left_s: float = 0.0
    pilot_in_s: float = 0.0


def session_outlook(state: State) -> Outlook:
    """When all open calls will be done, and those that open maps have still to submit."""
    if not state.calls:
        return Outlook()
    devices, pilot_in_s = _devices_here(state), 0.0
    if not devices:
        pilot_in_s = _first_pilot_in_s(state)
        devices = _devices_expected(state)
    longest = device_s = 0.0
    for context in state.contexts.values():
        if not (open_calls := _open(state, context)):
            continue
        left_s = context_outlook_s(state, context)
        if not left_s:
            return Outlook(0.0, pilot_in_s)
        longest = max(longest, left_s)
        rate, libraries = _rate(state, context)
        device_s += open_calls / rate * libraries * context.recipe.needs.devices if rate else left_s
    return Outlook(max(longest, device_s / max(1, devices)), pilot_in_s)


def context_outlook_s(state: State, context: Context) -> float:
    """Seconds until every open call of a context is done, if nothing else came between; 0 = not known (a map does not
    know its length), or none is open. Without a pilot: from when the first one comes."""
    open_calls = _open(state, context)
    rate, _ = _rate(state, context)
    if open_calls and rate and not has_unknown_length(state, context):
        return _ready_in_s(state, context) + open_calls / rate
    return 0.0


def start_in_s(state: State, context: Context, before: int) -> float:
    """Seconds until a call starts that waits behind `before` others in its context's queue; 0 = not known."""
    rate, _ = _rate(state, context)
    return _ready_in_s(state, context) + (before + 1) / rate if rate and _libraries(context) else 0.0


def held_calls(context: Context) -> int:
    """Calls that the libraries of a context hold. Each member of a gang holds its call, which counts once."""
    return sum(_held(library) for library in context.libraries.values())


def _held(library: Library) -> int:
    first = next(iter(library.held.values()), None)
    if first is None or not isinstance(first.holder, Gang):
        return len(library.held)
    holders = (call.holder for call in library.held.values())
    return sum(not isinstance(holder, Gang) or holder.members[0] is library for holder in holders)


def _open(state: State, context: Context) -> int:
    """Calls that are to end: those that are here, and those that open maps have still to submit."""
    return context.queue.count + held_calls(context) + unsubmitted(state, context)


def _libraries(context: Context) -> list[tuple[int, LibraryState]]:
    """Slots and state of the libraries that serve a context's calls, or will."""
    return [(library.slots, library.state) for library in context.libraries.values() if library.usable]


def _rate(state: State, context: Context) -> tuple[float, int]:
    """Calls of a context that end a second, and by how many libraries; 0.0 where nothing like it was measured."""
    libraries = _libraries(context)
    ready = [slots for slots, phase in libraries if phase is LibraryState.READY]
    slots = ready or [slots for slots, _ in libraries]
    count = len(slots)
    head = context.queue.head()
    gang = head.group.options.gang[0] if head is not None else 1
    if slots and len(slots) < gang:
        return 0.0, count
    if not slots:
        count = max(1, (_devices_here(state) or _devices_expected(state)) // max(1, context.recipe.needs.devices))
        slots = [context.slots] * count
    is_measured = pace.recent_since_s(context.rate, now=state.now) >= _MEASURED_S
    if ready and is_measured and pace.recent_total(context.rate, now=state.now) >= _ROUNDS * sum(ready):
        return pace.recent_per_second(context.rate, now=state.now), count
    run_s = max(context.run_s, _runs_for_s(state, context)) if context.run_s else 0.0
    return (sum(slots) / gang / run_s if run_s else 0.0), count


def _runs_for_s(state: State, context: Context) -> float:
    """The longest that a call of a context has run by now: one that takes longer than others did will take longer.
    Calls on pilots that are cut off do not count: they may have ended."""
    here = (x for x in context.libraries.values() if x.pilot.state is PilotState.HERE)
    ready = (x for x in here if x.state is LibraryState.READY)
    first = (next(iter(library.held.values())) for library in ready if library.held)
    return max((state.now - call.sent_at for call in first), default=0.0)


def _ready_in_s(state: State, context: Context) -> float:
    """What is still to come of the load that is expected to be done first, if no library of the context is hot."""
    libraries = [library for library in context.libraries.values() if library.usable]
    if any(library.state is LibraryState.READY for library in libraries):
        return 0.0
    begun_at = min((library.started_at for library in libraries), default=state.now)
    return max(0.0, begun_at + context.load_s - state.now)


# ---- pilots that are here, and that are expected
def _devices_here(state: State) -> int:
    """Of pilots that are connected, or may be again in a moment: after a restart of the manager all of them are."""
    here = (pilot for pilot in state.pilots.values() if pilot.state in _HERE)
    return sum(not device.facts.spare for pilot in here for device in pilot.devices.values())


def _devices_expected(state: State) -> int:
    """Devices that the first pilot should bring: as many as the last one of its source had."""
    sources = [block.source for block in state.blocks.values() if block.coming]
    known = [sum(not facts.spare for facts in source.devices) or source.source.slots for source in sources]
    return max(1, min((count for count in known if count), default=1))


def _first_pilot_in_s(state: State) -> float:
    waits = [
        block.expected_at - state.now
        for block in state.blocks.values()
        if block.coming and block.phase is BlockPhase.PENDING and block.expected_at > state.now
    ]
    return min(waits, default=0.0)
