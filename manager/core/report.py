"""Answer `stoker status` and `stoker calls` without a loop over all calls."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

from stoker.manager.core import ending, object_plan, outlook, story
from stoker.manager.core.nouns import Call, Context, Device, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.state import State
from stoker.manager.core.story import describe_wait
from stoker.protocol import pace, to_client
from stoker.protocol.calls import ListedCall, ListedState
from stoker.protocol.ids import format_call_id, format_library_id
from stoker.protocol.status import ContextStatus, DeviceStatus, LibraryStatus, PilotStatus, StoryLine
from stoker.protocol.to_client import Calls
from stoker.units import first_words, show_line

_MAX_SHOWN_GROUPS, _MAX_SHOWN_LONG_CALLS = 20, 10  # Maximum numbers of failure groups and of long calls in a status


def build_session_status(state: State) -> to_client.Status:
    queued = sum(context.queue.count for context in state.contexts.values())
    left_s, pilot_in_s = outlook.estimate_session_time_left(state)
    refused = dict(state.refused)
    by_pilots = sum(pilot.refused_frames for pilot in state.pilots.values())
    if by_pilots:
        refused["frames refused by pilots"] = by_pilots
    return to_client.Status(
        session=state.session, uptime_s=state.now - state.started_at, queued=queued, running=len(state.calls) - queued,
        done=state.done - state.failures - state.cancelled, failed=state.failures,
        rate=pace.recent_rate_per_second(state.rate, now=state.now), left_s=left_s,
        pilots=tuple(_build_pilot_status(state, p) for p in state.pilots.values()),
        libraries=tuple(_build_library_status(state, x) for x in state.libraries.values()),
        contexts=tuple(_build_context_status(state, x) for x in state.contexts.values()),
        blocks=story.describe_program_blocks(state),
        lost_pilots=state.lost_pilots, rerun_calls=state.rerun_calls, refused=refused, cancelled=state.cancelled,
        gone_pilots=state.pilots_gone, emptied_blocks=story.list_emptied_program_blocks(state),
        jobs=tuple(story.build_block_status(state.now, block) for block in state.blocks.values()),
        trouble=_describe_troubles(state),
        objects=object_plan.list_object_statuses(state), ended_blocks=dict(state.ended_blocks),
        losses={reason.value: count for reason, count in state.losses.items() if count}, pilot_in_s=pilot_in_s,
        maps=outlook.list_map_statuses(state), notices=tuple(StoryLine(at, text) for text, at in state.notices.items()),
        excluded_nodes=tuple(node for source in state.sources.values() for node in state.excluded_nodes(source)),
        failure_groups=ending.list_failure_groups(state)[:_MAX_SHOWN_GROUPS],
        longest=tuple(_list_running_calls(state, _MAX_SHOWN_LONG_CALLS)),
        slowest=ending.list_slowest_calls(state),
    )  # fmt: skip


def _describe_troubles(state: State) -> dict[str, str]:
    said = {name: source.trouble or story.describe_source_failure(source) for name, source in state.sources.items()}
    said["factory"] = state.factory_trouble
    said["peers"] = object_plan.warn_of_unreachable_peers(state)
    for pilot in state.pilots.values():
        unfit = dict.fromkeys(why for until, why in pilot.unfit_until.values() if state.now < until)
        said[pilot.id] = "; ".join((*pilot.troubles, *unfit))
    return {name: text for name, text in said.items() if text}


def device_seconds_by_tier(state: State) -> dict[str, float]:
    seconds = dict(state.tier_seconds)
    for pilot in state.pilots.values():
        for device in pilot.devices.values():
            seconds[device.tier] = seconds.get(device.tier, 0.0) + state.now - device.tier_since
    return seconds


def _build_pilot_status(state: State, pilot: Pilot) -> PilotStatus:
    return PilotStatus(
        pilot=pilot.id, host=pilot.host, block=pilot.block, state=pilot.state.value,
        devices=tuple(_build_device_status(d) for d in pilot.devices.values()), folder=pilot.folder, ended=pilot.ended,
        rate=pace.recent_rate_per_second(pilot.rate, now=state.now),
        ends_in_s=max(0.0, pilot.ends_at - state.now) if pilot.ends_at else 0.0, source=pilot.source,
        objects=len(state.transfers.peers[pilot.id].has) if pilot.id in state.transfers.peers else 0,
        draining=pilot.notes[-1][1] if pilot.state is PilotState.DRAINING else "",
    )  # fmt: skip


def _build_device_status(device: Device) -> DeviceStatus:
    facts = device.facts
    return DeviceStatus(
        device.id, facts.kind, facts.memory_bytes, device.promised_bytes, tuple(device.libraries), device.fault,
        facts.cores,
    )  # fmt: skip


def _build_library_status(state: State, library: Library) -> LibraryStatus:
    return LibraryStatus(
        library=library.id, recipe=library.context.recipe.name, state=library.state.value,
        phase=object_plan.describe_loading_phase(state, library) if library.state is LibraryState.LOADING else "",
        pilot=library.pilot.id, devices=tuple(d.id for d in library.devices),
        running=min(len(library.held), library.slots), served=library.served, memory_bytes=library.memory_bytes,
        device_bytes=library.device_bytes,
        loading_s=state.now - library.started_at if library.state is LibraryState.LOADING else 0.0,
        line=library.last_output_line if library.state is LibraryState.LOADING else "",
        slots=library.slots, batch=library.batch,
    )  # fmt: skip


def _build_context_status(state: State, context: Context) -> ContextStatus:
    states = [library.state for library in context.libraries.values()]
    return ContextStatus(
        key=context.recipe.key, name=context.recipe.name, hot=states.count(LibraryState.READY),
        asleep=states.count(LibraryState.ASLEEP), wake_s=context.wake_s,
        loading=states.count(LibraryState.LOADING), queued=context.queue.count,
        running=outlook.count_held_calls(context),
        loads=context.loads, ended=context.ended, load_s=context.load_s, load_total_s=context.load_total_s,
        run_s=context.run_s, run_total_s=context.run_total_s, memory_bytes=context.resident_bytes,
        waits_for=show_line(describe_wait(state, context)) if context.queue.count else "",
        last_failure=show_line(context.last_failure.message) if context.last_failure is not None else "",
        arguments=context.recipe.arguments, rate=pace.recent_rate_per_second(context.rate, now=state.now),
        left_s=outlook.seconds_until_context_done(state, context), served=context.served,
        speeds=story.list_slower_kinds(context), refused_offers=dict(context.refusals),
    )  # fmt: skip


MAX_LISTED_CALLS = 1000  # Maximum number of calls of each state in a list
_MAX_EXAMINED = 10_000  # Maximum number of queue entries that are examined for a list
# First words of the last note of a failed call
FAILURE_NOTES = ("raised an exception in your code", "ended without a result")
_CANCELLATION_NOTE = "ended without a result (cancelled)"


def list_calls(state: State, *, limit: int, only: ListedState | None) -> Calls:
    limit = max(0, min(limit, MAX_LISTED_CALLS))
    lists = (
        (ListedState.RUNNING, _list_running_calls(state, limit)),
        (ListedState.WAITING, _list_waiting_calls(state, limit)),
        (ListedState.FAILED, _list_failed_calls(state)),
    )
    calls = [call for kind, listed in lists if only in (None, kind) for call in islice(listed, limit)]
    waiting = sum(context.queue.count for context in state.contexts.values())
    return Calls(
        state.session, len(state.calls) - waiting, waiting, state.failures, tuple(calls),
        ending.list_failure_groups(state),
    )  # fmt: skip


def _list_running_calls(state: State, limit: int) -> Iterator[ListedCall]:
    longest = heapq.nsmallest(limit, _iterate_held_calls(state, limit), key=lambda held: (held[1].sent_at, held[1].id))
    for ahead, call in longest:
        where = tuple(f"{member.pilot.id}/{format_library_id(member.id)}" for member in call.libraries)
        yield _build_listed_call(state, call, ListedState.RUNNING, state.now - call.sent_at, where=where, ahead=ahead)


def _iterate_held_calls(state: State, limit: int) -> Iterator[tuple[int, Call]]:
    for library in state.libraries.values():
        for position, call in enumerate(islice(library.held.values(), limit)):
            if call.libraries[0] is library:
                yield max(0, position - library.slots + 1), call


def _list_waiting_calls(state: State, limit: int) -> Iterator[ListedCall]:
    heads = [
        context.queue.first_calls(limit, max_examined=_MAX_EXAMINED)
        for context in state.contexts.values()
        if context.queue.count
    ]
    for call in heapq.merge(*heads, key=lambda call: call.group.context.queue.sort_key(call)):
        yield _build_listed_call(state, call, ListedState.WAITING, state.now - call.submitted_at)


def _list_failed_calls(state: State) -> Iterator[ListedCall]:
    for call in reversed(state.failed_calls.values()):
        at, how = next(((at, text) for at, text in reversed(call.notes) if text.startswith(FAILURE_NOTES)), (0.0, ""))
        if how and not how.startswith(_CANCELLATION_NOTE):
            yield _build_listed_call(state, call, ListedState.FAILED, state.now - at, error=first_words(how))


def _build_listed_call(
    of: State, call: Call, state: ListedState, since_s: float, *, where: tuple[str, ...] = (), ahead: int = 0,
    error: str = "",
) -> ListedCall:  # fmt: skip
    report, forecast = of.reports.get(call.id) or of.printed_progress.get(call.id), of.forecasts.get(call.id)
    due_at = call.group.options.objective.deadline_at
    return ListedCall(
        format_call_id(call.id), call.group.function.name, call.group.context.recipe.name, state, since_s, where, ahead,
        error, *((report.done, report.total, report.metric) if report is not None else (0.0, 0.0, 0.0)),
        due_in_s=due_at - of.now if due_at else None,
        ends_in_s=forecast.ends_at - of.now if forecast is not None else None,
    )  # fmt: skip
