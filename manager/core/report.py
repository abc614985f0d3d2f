"""Answer `stoker status` and `stoker calls` without a loop over all calls."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

from stoker.manager.core import ending, object_plan, outlook, story
from stoker.manager.core.nouns import Call, Context, Device, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.state import State
from stoker.manager.core.story import waits_for
from stoker.protocol import pace, to_client
from stoker.protocol.calls import ListedCall, ListedState
from stoker.protocol.ids import format_library_id, show_call
from stoker.protocol.status import ContextStatus, DeviceStatus, LibraryStatus, PilotStatus, StoryLine
from stoker.protocol.to_client import Calls
from stoker.units import first_words, show_line

_MOST_GROUPS, _MOST_LONGEST = 20, 10  # Maximum numbers of failure groups and of long calls in a status


def session_status(state: State) -> to_client.Status:
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
        pilots=tuple(_pilot(state, p) for p in state.pilots.values()),
        libraries=tuple(_library(state, x) for x in state.libraries.values()),
        contexts=tuple(_context(state, x) for x in state.contexts.values()), blocks=story.program_block_states(state),
        lost_pilots=state.lost_pilots, rerun_calls=state.rerun_calls, refused=refused, cancelled=state.cancelled,
        gone_pilots=state.pilots_gone, emptied_blocks=story.emptied_program_blocks(state),
        jobs=tuple(story.block_status(state.now, block) for block in state.blocks.values()), trouble=_trouble(state),
        objects=object_plan.object_statuses(state), ended_blocks=dict(state.ended_blocks),
        losses={reason.value: count for reason, count in state.losses.items() if count}, pilot_in_s=pilot_in_s,
        maps=outlook.statuses(state), notices=tuple(StoryLine(at, text) for text, at in state.notices.items()),
        excluded_nodes=tuple(node for source in state.sources.values() for node in state.excluded_nodes(source)),
        failure_groups=ending.list_failure_groups(state)[:_MOST_GROUPS], longest=tuple(_running(state, _MOST_LONGEST)),
        slowest=ending.list_slowest(state),
    )  # fmt: skip


def _trouble(state: State) -> dict[str, str]:
    said = {name: source.trouble or story.source_failure(source) for name, source in state.sources.items()}
    said["factory"] = state.factory_trouble
    said["peers"] = object_plan.unreachable_peers_warning(state)
    for pilot in state.pilots.values():
        unfit = dict.fromkeys(why for until, why in pilot.unfit.values() if state.now < until)
        said[pilot.id] = "; ".join((*pilot.troubles, *unfit))
    return {name: text for name, text in said.items() if text}


def device_seconds_by_tier(state: State) -> dict[str, float]:
    seconds = dict(state.tier_seconds)
    for pilot in state.pilots.values():
        for device in pilot.devices.values():
            seconds[device.tier] = seconds.get(device.tier, 0.0) + state.now - device.tier_since
    return seconds


def _pilot(state: State, pilot: Pilot) -> PilotStatus:
    return PilotStatus(
        pilot=pilot.id, host=pilot.host, block=pilot.block, state=pilot.state.value,
        devices=tuple(_device(d) for d in pilot.devices.values()), folder=pilot.folder, ended=pilot.ended,
        rate=pace.recent_rate_per_second(pilot.rate, now=state.now),
        ends_in_s=max(0.0, pilot.ends_at - state.now) if pilot.ends_at else 0.0, source=pilot.source,
        objects=len(state.transfers.peers[pilot.id].has) if pilot.id in state.transfers.peers else 0,
        draining=pilot.notes[-1][1] if pilot.state is PilotState.DRAINING else "",
    )  # fmt: skip


def _device(device: Device) -> DeviceStatus:
    facts = device.facts
    return DeviceStatus(
        device.id, facts.kind, facts.memory_bytes, device.promised_bytes, tuple(device.libraries), device.fault,
        facts.cores,
    )  # fmt: skip


def _library(state: State, library: Library) -> LibraryStatus:
    return LibraryStatus(
        library=library.id, recipe=library.context.recipe.name, state=library.state.value,
        phase=object_plan.describe_loading_phase(state, library) if library.state is LibraryState.LOADING else "",
        pilot=library.pilot.id, devices=tuple(d.id for d in library.devices),
        running=min(len(library.held), library.slots), served=library.served, memory_bytes=library.memory_bytes,
        device_bytes=library.device_bytes,
        loading_s=state.now - library.started_at if library.state is LibraryState.LOADING else 0.0,
        line=library.line if library.state is LibraryState.LOADING else "", slots=library.slots, batch=library.batch,
    )  # fmt: skip


def _context(state: State, context: Context) -> ContextStatus:
    states = [library.state for library in context.libraries.values()]
    return ContextStatus(
        key=context.recipe.key, name=context.recipe.name, hot=states.count(LibraryState.READY),
        asleep=states.count(LibraryState.ASLEEP), wake_s=context.wake_s,
        loading=states.count(LibraryState.LOADING), queued=context.queue.count,
        running=outlook.count_held_calls(context),
        loads=context.loads, ended=context.ended, load_s=context.load_s, load_total_s=context.load_total_s,
        run_s=context.run_s, run_total_s=context.run_total_s, memory_bytes=context.resident_bytes,
        waits_for=show_line(waits_for(state, context)) if context.queue.count else "",
        last_failure=show_line(context.last_failure.message) if context.last_failure is not None else "",
        arguments=context.recipe.arguments, rate=pace.recent_rate_per_second(context.rate, now=state.now),
        left_s=outlook.seconds_until_context_done(state, context), served=context.served,
        speeds=story.kind_speeds(context), refused_offers=dict(context.refusals),
    )  # fmt: skip


MOST = 1000  # Maximum number of calls of each state in a list of calls
_MOST_EXAMINED = 10_000  # Maximum number of queue entries that are examined for a list of calls
FAILED = ("raised an exception in your code", "ended without a result")  # First words of a failed call's last note
_CANCELLED = "ended without a result (cancelled)"


def list_calls(state: State, *, limit: int, only: ListedState | None) -> Calls:
    limit = max(0, min(limit, MOST))
    lists = (
        (ListedState.RUNNING, _running(state, limit)),
        (ListedState.WAITING, _waiting(state, limit)),
        (ListedState.FAILED, _failed(state)),
    )
    calls = [call for kind, listed in lists if only in (None, kind) for call in islice(listed, limit)]
    waiting = sum(context.queue.count for context in state.contexts.values())
    return Calls(
        state.session, len(state.calls) - waiting, waiting, state.failures, tuple(calls),
        ending.list_failure_groups(state),
    )  # fmt: skip


def _running(state: State, limit: int) -> Iterator[ListedCall]:
    longest = heapq.nsmallest(limit, _held(state, limit), key=lambda held: (held[1].sent_at, held[1].id))
    for ahead, call in longest:
        where = tuple(f"{member.pilot.id}/{format_library_id(member.id)}" for member in call.libraries)
        yield _listed(state, call, ListedState.RUNNING, state.now - call.sent_at, where=where, ahead=ahead)


def _held(state: State, limit: int) -> Iterator[tuple[int, Call]]:
    for library in state.libraries.values():
        for position, call in enumerate(islice(library.held.values(), limit)):
            if call.libraries[0] is library:
                yield max(0, position - library.slots + 1), call


def _waiting(state: State, limit: int) -> Iterator[ListedCall]:
    heads = [
        context.queue.first(limit, looks=_MOST_EXAMINED) for context in state.contexts.values() if context.queue.count
    ]
    for call in heapq.merge(*heads, key=lambda call: call.group.context.queue.rank(call)):
        yield _listed(state, call, ListedState.WAITING, state.now - call.submitted_at)


def _failed(state: State) -> Iterator[ListedCall]:
    for call in reversed(state.failed.values()):
        at, how = next(((at, text) for at, text in reversed(call.notes) if text.startswith(FAILED)), (0.0, ""))
        if how and not how.startswith(_CANCELLED):
            yield _listed(state, call, ListedState.FAILED, state.now - at, error=first_words(how))


def _listed(
    of: State, call: Call, state: ListedState, since_s: float, *, where: tuple[str, ...] = (), ahead: int = 0,
    error: str = "",
) -> ListedCall:  # fmt: skip
    report, forecast = of.reports.get(call.id) or of.printed.get(call.id), of.forecasts.get(call.id)
    due_at = call.group.options.objective.deadline_at
    return ListedCall(
        show_call(call.id), call.group.function.name, call.group.context.recipe.name, state, since_s, where, ahead,
        error, *((report.done, report.total, report.metric) if report is not None else (0.0, 0.0, 0.0)),
        due_in_s=due_at - of.now if due_at else None,
        ends_in_s=forecast.ends_at - of.now if forecast is not None else None,
    )  # fmt: skip
