"""The whole session at one moment, for `stoker status`, progress bars and programs."""

from __future__ import annotations

from stoker.manager.core import block_words, fitness, losses, maps, object_report, outlook, own_blocks
from stoker.manager.core.nouns import Context, Device, Library, Pilot
from stoker.manager.core.phases import LibraryState, PilotState
from stoker.manager.core.state import State
from stoker.manager.core.story import waits_for
from stoker.protocol import pace, to_client
from stoker.protocol.status import ContextStatus, DeviceStatus, LibraryStatus, PilotStatus, StoryLine
from stoker.units import show_line


def status(state: State) -> to_client.Status:
    """Everything that `stoker status` shows."""
    queued = sum(context.queue.count for context in state.contexts.values())
    left = outlook.of_session(state)
    refused = dict(state.refused)
    by_pilots = sum(pilot.refused_frames for pilot in state.pilots.values())
    if by_pilots:
        refused["frames refused by pilots"] = by_pilots
    return to_client.Status(
        session=state.session,
        uptime_s=state.now - state.started_at,
        queued=queued,
        running=len(state.calls) - queued,
        done=state.done - state.failures - state.cancelled,
        failed=state.failures,
        rate=pace.recent_per_second(state.rate, now=state.now),
        left_s=left.left_s,
        pilots=tuple(_pilot(state, p) for p in state.pilots.values()),
        libraries=tuple(_library(state, x) for x in state.libraries.values()),
        contexts=tuple(_context(state, x) for x in state.contexts.values()),
        blocks=own_blocks.standing(state),
        lost_pilots=state.lost_pilots,
        rerun_calls=state.rerun_calls,
        refused=refused,
        cancelled=state.cancelled,
        gone_pilots=state.pilots_gone,
        emptied_blocks=own_blocks.emptied(state),
        jobs=tuple(block_words.tell(state.now, block) for block in state.blocks.values()),
        trouble=_trouble(state),
        objects=object_report.statuses(state),
        ended_blocks=dict(state.ended_blocks),
        losses=losses.by_reason(state),
        pilot_in_s=left.pilot_in_s,
        maps=maps.statuses(state),
        notices=tuple(StoryLine(at, text) for text, at in state.notices.items()),
    )


def _trouble(state: State) -> dict[str, str]:
    said = {name: source.trouble or block_words.failing(source) for name, source in state.sources.items()}
    said["factory"] = state.factory_trouble
    said["peers"] = object_report.trouble(state)
    said |= fitness.troubles(state)
    for pilot in state.pilots.values():
        if pilot.troubles:
            said[pilot.id] = "; ".join(filter(None, (*pilot.troubles, said.get(pilot.id, ""))))
    return {name: text for name, text in said.items() if text}


def device_seconds(state: State) -> dict[str, float]:
    """Seconds that devices have been here, by tier: `cold` (no context is hot on it) and `warm`. Whoever pays for the
    devices pays for their sum."""
    seconds = dict(state.tier_seconds)
    for pilot in state.pilots.values():
        for device in pilot.devices.values():
            seconds[device.tier] = seconds.get(device.tier, 0.0) + state.now - device.tier_since
    return seconds


def _pilot(state: State, pilot: Pilot) -> PilotStatus:
    return PilotStatus(
        pilot=pilot.id,
        host=pilot.host,
        block=pilot.block,
        state=pilot.state.value,
        devices=tuple(_device(d) for d in pilot.devices.values()),
        folder=pilot.folder,
        ended=pilot.ended,
        rate=pace.recent_per_second(pilot.rate, now=state.now),
        ends_in_s=max(0.0, pilot.ends_at - state.now) if pilot.ends_at else 0.0,
        source=pilot.source,
        objects=len(state.transfers.peers[pilot.id].has) if pilot.id in state.transfers.peers else 0,
        draining=pilot.notes[-1][1] if pilot.state is PilotState.DRAINING else "",
    )


def _device(device: Device) -> DeviceStatus:
    facts = device.facts
    return DeviceStatus(
        device.id, facts.kind, facts.memory_bytes, device.promised_bytes, tuple(device.libraries), device.fault,
        facts.cores,
    )  # fmt: skip


def _library(state: State, library: Library) -> LibraryStatus:
    return LibraryStatus(
        library=library.id,
        recipe=library.context.recipe.name,
        state=library.state.value,
        phase=object_report.phase(state, library) if library.state is LibraryState.LOADING else "",
        pilot=library.pilot.id,
        devices=tuple(d.id for d in library.devices),
        running=min(len(library.held), library.slots),
        served=library.served,
        memory_bytes=library.memory_bytes,
        device_bytes=library.device_bytes,
        loading_s=state.now - library.started_at if library.state is LibraryState.LOADING else 0.0,
        line=library.line if library.state is LibraryState.LOADING else "",
        slots=library.slots,
        batch=library.batch,
    )


def _context(state: State, context: Context) -> ContextStatus:
    states = [library.state for library in context.libraries.values()]
    return ContextStatus(
        key=context.recipe.key,
        name=context.recipe.name,
        hot=states.count(LibraryState.READY),
        loading=states.count(LibraryState.LOADING),
        queued=context.queue.count,
        running=outlook.held(context),
        loads=context.loads,
        ended=context.ended,
        load_s=context.load_s,
        load_total_s=context.load_total_s,
        run_s=context.run_s,
        run_total_s=context.run_total_s,
        memory_bytes=context.resident_bytes,
        waits_for=show_line(waits_for(state, context)) if context.queue.count else "",
        last_failure=show_line(context.last_failure.message) if context.last_failure is not None else "",
        arguments=context.recipe.arguments,
        rate=pace.recent_per_second(context.rate, now=state.now),
        left_s=outlook.of_context(state, context),
        served=context.served,
    )
