"""Track open maps (one function called for many inputs), and forecast when the calls of a session are done.

The rate of a context is the number of calls that end per second. It is measured if enough calls have ended recently.
Otherwise it is the number of slots divided by the run time. The session needs at least the time of its slowest context,
and at least the device time of all calls divided by the number of devices. The last calls on slow devices may end
later.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.manager.core.deadlines import expected_run_s
from stoker.manager.core.nouns import Client, Context, Gang, Library, LibraryState, MapRecord, PilotState
from stoker.manager.core.per_context import expected_seconds_on_kind
from stoker.manager.core.state import State, forget_oldest
from stoker.protocol import pace
from stoker.protocol.blocks import BlockPhase
from stoker.protocol.ids import RecipeKey
from stoker.protocol.pace import WorkPace
from stoker.protocol.status import MapStatus
from stoker.protocol.to_manager import MapReport

MAX_OPEN_MAPS = 1000  # Maximum number of unfinished maps per program that the manager remembers


def record_map_report(state: State, client: Client, report: MapReport) -> None:
    known = client.maps.get(report.map)
    if report.over:
        client.maps.pop(report.map, None)
    elif known is None:
        client.maps[report.map] = MapRecord(report, state.now, WorkPace(state.now))
        forget_oldest(client.maps, max_records=MAX_OPEN_MAPS)
    else:
        before = known.report
        # do not count the time of the load before the first results
        if report.done > report.kept and before.done == before.kept:
            context = state.contexts.get(report.context)
            here = context.libraries.values() if context is not None else ()
            ready = (library.ready_at for library in here if library.state is LibraryState.READY)
            known.pace.record_wait(max(known.began_at, min(ready, default=known.began_at)))
        known.pace.add((report.done - report.kept) - (before.done - before.kept), state.now)
        known.report = report
    _update_unsent_call_count(state, report.context)


def recount_unsent_calls(state: State, client: Client) -> None:
    for key in {record.report.context: None for record in client.maps.values()}:
        _update_unsent_call_count(state, key)


def _update_unsent_call_count(state: State, key: RecipeKey) -> None:
    context = state.contexts.get(key)
    if context is not None:
        counts = [record.report.unsent for _, record in _open_maps(state) if record.report.context == key]
        context.unsent = None if not counts else -1 if min(counts) < 0 else sum(counts)


def _open_maps(state: State) -> Iterator[tuple[Client, MapRecord]]:
    for client in state.clients.values():
        if client.maps and not client.gone:
            for record in client.maps.values():
                yield client, record


def _count_unsubmitted_calls(state: State, context: Context) -> int:
    key = context.recipe.key
    return sum(max(0, record.report.unsent) for _, record in _open_maps(state) if record.report.context == key)


def list_map_statuses(state: State) -> tuple[MapStatus, ...]:
    return tuple(_build_map_status(state, client, record) for client, record in _open_maps(state))


def _build_map_status(state: State, client: Client, record: MapRecord) -> MapStatus:
    report, now = record.report, state.now
    left_s = record.pace.left_s(report.total - report.done, now) if report.total >= 0 else None
    context = state.contexts.get(report.context)
    return MapStatus(
        function=report.name, client=client.number, context=context.recipe.name if context is not None else "",
        total=report.total, done=report.done, kept=report.kept, rate=record.pace.per_second(now), left_s=left_s or 0.0,
    )  # fmt: skip


_MIN_RECENT_CALLS_PER_SLOT = 2  # A measured rate is used if at least this many calls per slot have ended recently
_MIN_SECONDS_AFTER_FIRST_RESULT = 5.0  # A measured rate is used from this many seconds after the first result
_PRESENT_STATES = (PilotState.HERE, PilotState.CUT)


def estimate_session_time_left(state: State) -> tuple[float, float]:
    """Return the seconds that all calls need once a pilot has joined, and the seconds until a pilot joins; 0 =
    unknown.
    """
    if not state.calls:
        return 0.0, 0.0
    devices, pilot_in_s = _count_present_devices(state), 0.0
    if not devices:
        pilot_in_s = _seconds_until_first_pilot(state)
        devices = _count_expected_devices(state)
    longest = device_s = 0.0
    for context in state.contexts.values():
        if not (open_calls := _count_open_calls(state, context)):
            continue
        left_s = seconds_until_context_done(state, context)
        if not left_s:
            return 0.0, pilot_in_s
        longest = max(longest, left_s)
        rate, libraries = _estimate_rate(state, context)
        device_s += open_calls / rate * libraries * context.recipe.needs.devices if rate else left_s
    return max(longest, device_s / max(1, devices)), pilot_in_s


def seconds_until_context_done(state: State, context: Context) -> float:
    open_calls = _count_open_calls(state, context)
    rate, _ = _estimate_rate(state, context)
    maps = (record.report for _, record in _open_maps(state))
    has_unknown_length = any(each.total < 0 and each.context == context.recipe.key for each in maps)
    if open_calls and rate and not has_unknown_length:
        return _seconds_until_library_ready(state, context) + max(
            open_calls / rate, _seconds_until_held_calls_end(state, context)
        )
    return 0.0


def _seconds_until_held_calls_end(state: State, context: Context) -> float:
    """Return the seconds until the last running call ends; 0 if calls wait or the speeds of devices are unknown."""
    if not context.speeds.of or context.queue.count or _count_unsubmitted_calls(state, context):
        return 0.0
    running = [x for x in context.libraries.values() if x.slots == len(x.held) == 1]
    ends_s = (expected_run_s(x, call) - (state.now - call.sent_at) for x in running for call in x.held.values())
    return max(ends_s, default=0.0)


def seconds_until_call_start(state: State, context: Context, before: int) -> float:
    """Return the seconds until a call with `before` calls ahead of it starts; 0 = unknown."""
    rate, _ = _estimate_rate(state, context)
    is_known = rate and context.usable_libraries
    return _seconds_until_library_ready(state, context) + (before + 1) / rate if is_known else 0.0


def count_held_calls(context: Context) -> int:
    """Return the number of calls that the libraries of the context hold. A gang call counts once."""
    return sum(_count_calls_of_library(library) for library in context.libraries.values())


def _count_calls_of_library(library: Library) -> int:
    first = next(iter(library.held.values()), None)
    if first is None or not isinstance(first.holder, Gang):
        return len(library.held)
    holders = (call.holder for call in library.held.values())
    return sum(not isinstance(holder, Gang) or holder.members[0] is library for holder in holders)


def _count_open_calls(state: State, context: Context) -> int:
    return context.queue.count + count_held_calls(context) + _count_unsubmitted_calls(state, context)


def _estimate_rate(state: State, context: Context) -> tuple[float, int]:
    """Return how many calls of the context end per second (0 = unknown), and how many libraries the context has."""
    usable = context.usable_libraries
    ready = [x for x in usable if x.state is LibraryState.READY]
    libraries = ready or usable
    count, slots = len(libraries), sum(x.slots for x in libraries)
    head = context.queue.head()
    gang = head.group.options.gang[0] if head is not None else 1
    if libraries and count < gang:
        return 0.0, count
    if not libraries:
        devices = _count_present_devices(state) or _count_expected_devices(state)
        count = max(1, devices // max(1, context.recipe.needs.devices))
        slots = context.slots * count
    is_measured = pace.seconds_since_first_count(context.rate, now=state.now) >= _MIN_SECONDS_AFTER_FIRST_RESULT
    if ready and is_measured and pace.recent_total(context.rate, now=state.now) >= _MIN_RECENT_CALLS_PER_SLOT * slots:
        return pace.recent_rate_per_second(context.rate, now=state.now), count
    first = (next(iter(x.held.values())) for x in ready if x.held)
    # if a running call takes longer than usual, later calls start later
    longest_s = max((state.now - call.sent_at for call in first), default=0.0)
    run_s = max(context.run_s, longest_s) if context.run_s else 0.0
    if context.speeds.of and run_s > longest_s and libraries:
        runs_s = (expected_seconds_on_kind(context.speeds, context, x.kind) or run_s for x in libraries)
        return sum(x.slots / each_s for x, each_s in zip(libraries, runs_s, strict=True)) / gang, count
    return (slots / gang / run_s if run_s else 0.0), count


def _seconds_until_library_ready(state: State, context: Context) -> float:
    libraries = context.usable_libraries
    if any(library.state is LibraryState.READY for library in libraries):
        return 0.0
    ready_at = (x.started_at + (context.wake_s if x.is_waking else context.load_s) for x in libraries)
    return max(0.0, min(ready_at, default=state.now + context.load_s) - state.now)


def _count_present_devices(state: State) -> int:
    here = (pilot for pilot in state.pilots.values() if pilot.state in _PRESENT_STATES)
    return sum(not device.facts.spare for pilot in here for device in pilot.devices.values())


def _count_expected_devices(state: State) -> int:
    sources = [block.source for block in state.blocks.values() if block.has_expected_pilot]
    known = [sum(not facts.spare for facts in source.devices) or source.source.slots for source in sources]
    return max(1, min((count for count in known if count), default=1))


def _seconds_until_first_pilot(state: State) -> float:
    waits = [
        block.expected_at - state.now
        for block in state.blocks.values()
        if block.has_expected_pilot and block.phase is BlockPhase.PENDING and block.expected_at > state.now
    ]
    return min(waits, default=0.0)
