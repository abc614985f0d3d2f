"""Answer `stoker explain`: the history of a call, pilot, library, context or block."""

from __future__ import annotations

import msgspec

from stoker.contexts.inference.adapter import EngineLoad
from stoker.manager.core import blame, object_plan, outlook, queues
from stoker.manager.core.ending import describe_place
from stoker.manager.core.nouns import Call, CallState, Context, Library, LibraryState, Note, Pilot, PilotState
from stoker.manager.core.state import Block, SourceState, State
from stoker.protocol import to_client
from stoker.protocol.blocks import BlockPhase, BlockStatus
from stoker.protocol.ids import (
    CLIENT_SHIFT,
    BlockId,
    PilotId,
    format_block_name,
    format_call_id,
    format_library_id,
    parse_call_id,
)
from stoker.protocol.show_status import READ_JOB, SILENT_S, is_suspended
from stoker.protocol.status import KindSpeed, StoryLine
from stoker.units import show_about, show_bytes, show_line, show_seconds

_UNSTARTED_STATES = ("pending", "unknown", "held")
_ENDED_STATES = ("completed", "failed", "cancelled", "timeout", "missing", "scaled_in")
_RUNNING = "running"


def describe_program_blocks(state: State) -> dict[str, str]:
    came = {pilot.block for pilots in (state.pilots, state.gone_pilots) for pilot in pilots.values()}
    return {
        block: _describe_program_block(state, text, has_joined=block in came)
        for block, text in state.reported_blocks.items()
    }


def list_emptied_program_blocks(state: State) -> tuple[str, ...]:
    here = {pilot.block for pilot in state.pilots.values()}
    left = {pilot.block for pilot in state.gone_pilots.values()} - here
    return tuple(block for block in state.reported_blocks if block in left)


def _find_program_block(state: State, subject: str) -> tuple[str, list[Note]] | None:
    for block, how in describe_program_blocks(state).items():
        if format_block_name(block) == subject:
            pilots = [x for known in (state.gone_pilots, state.pilots) for x in known.values() if x.block == block]
            names = f"pilots {', '.join(pilot.id for pilot in pilots)}" if pilots else "none of its pilots has joined"
            notes = [(at, f"{pilot.id}: {text}") for pilot in pilots for at, text in pilot.notes]
            return f"block that the program started itself: {how}, {names}", notes
    return None


def _describe_program_block(state: State, said: str, *, has_joined: bool) -> str:
    word = said.partition(":")[0]
    if word in _ENDED_STATES:
        return said
    if state.end_reason:
        return "ended with the session" if has_joined or word not in _UNSTARTED_STATES else "ended before a pilot came"
    return _RUNNING if has_joined and word in _UNSTARTED_STATES else said


def build_block_status(now: float, block: Block) -> BlockStatus:
    return BlockStatus(
        block=block.id, source=block.source.source.name, phase=block.phase.value, job=block.job,
        reason=block.release_reason if block.release_reason and not block.reason else block.reason,
        since_s=now - block.phase_since,
        expected_in_s=max(0.0, block.expected_at - now) if block.expected_at else 0.0, pilots=tuple(block.pilots),
        emptied_s=max(0.001, now - block.emptied_at) if block.emptied_at is not None else 0.0,
        leaving=bool(block.release_reason), probes=block.probed_node,
    )  # fmt: skip


def _describe_block_state(now: float, block: Block) -> str:
    words = block.phase.value + (f": {block.reason}" if block.reason else "")
    if block.expected_at > now and block.phase is BlockPhase.PENDING:
        words += f", expected to start in {show_seconds(block.expected_at - now)}"
    silent = block.phase is BlockPhase.RUNNING and block.has_expected_pilot and now - block.phase_since > SILENT_S
    if silent and not is_suspended(block.reason):
        words += f" for {show_seconds(now - block.phase_since)} without a pilot: {READ_JOB}"
    return words


def describe_source_failure(source: SourceState) -> str:
    if source.stop_reason:
        return f"no more jobs are submitted: {source.stop_reason}"
    if source.hold_reason:
        return f"a job was held: {source.hold_reason}"
    if source.failures:
        often = f", {source.failures} times in a row" if source.failures > 1 else ""
        said = (
            "the pilots of its last block were not usable"
            if source.has_unusable_pilots
            else "no pilot of its last block joined"
        )
        return f"{said}{often}: {source.last_failure}"
    if source.short_lived_count > 1:
        said = f"{source.short_lived_count} blocks in a row started pilots that loaded no library"
        return f"{said}: {source.last_failure}"
    return ""


_SHOWN_BLOCKS = 8
_SHOWN_NAMES = 8
# Answer for a successful call, whose history only the journal contains
ENDED_CALL_ANSWER = "ended; its story is in the journal"
_MIN_SHOWN_READER_WAIT_S = 1.0  # Shorter waits of a call for the reader of its pieces are not shown
MAX_PAYLOAD_BYTES = 64_000  # Larger arguments of a call are not part of the answer

_HeadlineAndNotes = tuple[str, list[Note]]


def tell_story(state: State, subject: str) -> to_client.Story:
    """Return the history that `stoker explain` prints. `subject`: name or id, or the unambiguous start of a name."""
    if (told := _find_story_by_name(state, subject)) is not None:
        return _build_story(subject, told)
    try:
        id = parse_call_id(subject)
    except ValueError:
        return _find_story_by_prefix(state, subject)
    call = state.calls.get(id) or state.failed_calls.get(id)
    if call is not None:
        return _build_call_story(state, call)
    number = id >> CLIENT_SHIFT
    client = state.clients_by_number.get(number)
    is_known = number in state.removed_client_numbers or (client is not None and id <= client.last_call)
    return to_client.Story(
        format_call_id(id), False, ENDED_CALL_ANSWER if is_known else "no such call in the session", ()
    )


def _find_story_by_name(state: State, subject: str) -> _HeadlineAndNotes | None:
    for pilots in (state.pilots, state.gone_pilots):
        pilot = pilots.get(PilotId(subject))
        on_host = [each for each in pilots.values() if each.host == subject] if pilot is None else [pilot]
        if len(on_host) == 1:
            return _pilot_headline_and_notes(state, on_host[0])
    for context in state.contexts.values():
        if subject in (context.recipe.name, context.recipe.key, context.recipe.title):
            return _context_headline_and_notes(state, context)
    block = state.blocks.get(BlockId(subject)) or state.past_blocks.get(BlockId(subject))
    if block is not None:
        return _block_headline_and_notes(state, block)
    if (told := _find_program_block(state, subject)) is not None:
        return told
    if subject.startswith("lib-"):
        for libraries in (state.libraries, state.gone_libraries):
            library = next((x for x in libraries.values() if format_library_id(x.id) == subject), None)
            if library is not None:
                return _library_headline_and_notes(library)
    return None


def _find_story_by_prefix(state: State, subject: str) -> to_client.Story:
    contexts = [name for context in state.contexts.values() for name in (context.recipe.name, context.recipe.key)]
    for names in ([*state.pilots, *contexts], list(state.gone_pilots)):
        matches = {name: told for name in names if subject and name.startswith(subject)
                   and (told := _find_story_by_name(state, name)) is not None}  # fmt: skip
        if len(matches) == 1:
            return _build_story(*matches.popitem())
        if matches:
            some = ", ".join(list(matches)[:_SHOWN_NAMES])
            return to_client.Story(subject, False, f"matches {some}; write a longer prefix", ())
    return to_client.Story(subject, False, "no call, pilot, library, context or block of this name", ())


def _build_call_story(state: State, call: Call) -> to_client.Story:
    runs_from = 0
    if isinstance(call.holder, Library):
        runs_from = call.holder.log_position if call.holder.slots == 1 else -1
    story = msgspec.structs.replace(
        _build_story(format_call_id(call.id), _call_headline_and_notes(state, call)),
        waits_for=_why_call_does_not_run(state, call), runs_from=runs_from,
        runs_in=tuple(format_library_id(library.id) for library in call.libraries),
    )  # fmt: skip
    payload = call.spec.payload
    if isinstance(payload, bytes) and len(payload) <= MAX_PAYLOAD_BYTES:
        return msgspec.structs.replace(story, payload=payload)
    size = len(payload) if isinstance(payload, bytes) else payload.size_bytes
    return msgspec.structs.replace(story, arguments=f"({show_bytes(size)} of arguments)")


def _build_story(subject: str, told: _HeadlineAndNotes) -> to_client.Story:
    headline, notes = told
    lines = tuple(StoryLine(at, text) for at, text in sorted(notes, key=lambda note: note[0]))
    return to_client.Story(subject, True, headline, lines)


def _call_headline_and_notes(state: State, call: Call) -> tuple[str, list[Note]]:
    group, context = call.group, call.group.context
    what = f"{group.function.name}  wants {context.recipe.title}"
    notes: list[Note] = [(call.submitted_at, "submitted")]
    notes += call.notes
    expected = _describe_expected_end(state, call) if call.state is not CallState.ENDED else ""
    if expected:
        notes.append((state.now, expected))
    if call.state is CallState.WAITING:
        since = show_seconds(state.now - call.submitted_at)
        before, apart = _count_calls_before(call), blame.describe_why_set_aside(state, call)
        notes.append((state.now, f"waits for {since}: {_why_call_does_not_run(state, call)}"))
        starts_in_s = 0.0 if apart else outlook.seconds_until_call_start(state, context, before)
        if starts_in_s and not expected:
            notes.append((state.now, f"is expected to start in about {show_about(starts_in_s)}"))
        return f"{what}  waiting for {since}", notes
    if call.state is CallState.HELD:
        since = show_seconds(state.now - call.sent_at)
        if call.holder is not None:
            notes.append((call.sent_at, f"sent to {describe_place(call.holder)}"))
        ahead = _count_calls_ahead_in_library(call)
        if ahead:
            notes.append((state.now, _why_call_does_not_run(state, call)))
            return f"{what}  sent {since} ago, {ahead} before it", notes
        report = state.reports.get(call.id) or state.printed_progress.get(call.id)
        done = f", {report.done:g} of {report.total:g} done" if report is not None and report.total else ""
        return f"{what}  running for {since}{done}{_describe_stream(state, call)}", notes
    if not call.sent_at:
        notes.append((call.submitted_at, "the call was not sent to a library"))
    return f"{what}  ended", notes


def _describe_stream(state: State, call: Call) -> str:
    facts = state.streams.get(call.id)
    if facts is None:
        return ""
    said = f", {facts.sent:,} piece{'s' * (facts.sent != 1)} sent"
    if not call.group.client.connected:
        return f"{said}; its program is disconnected"
    if facts.waits_since is not None and state.now - facts.waits_since >= _MIN_SHOWN_READER_WAIT_S:
        return f"{said}; it has waited for its reader for {show_seconds(state.now - facts.waits_since)}"
    return said


def _why_call_does_not_run(state: State, call: Call) -> str:
    if call.state is CallState.WAITING:
        before = _count_calls_before(call)
        behind = f"behind {_show_call_count(before)} of the same context; " if before else ""
        return blame.describe_why_set_aside(state, call) or behind + describe_wait(state, call.group.context)
    ahead = _count_calls_ahead_in_library(call) if call.state is CallState.HELD else 0
    return f"{ahead} {'call is' if ahead == 1 else 'calls are'} before it in that library" if ahead else ""


def _count_calls_before(call: Call) -> int:
    return next((n for n, other in enumerate(call.group.context.queue) if other is call), 0)


def _describe_expected_end(state: State, call: Call) -> str:
    due_at, said = call.group.options.objective.deadline_at, state.forecasts.get(call.id)
    if said is None:
        return f"is due in {show_seconds(due_at - state.now)}" if due_at > state.now else ""
    left_s = said.ends_at - state.now
    ends = "is expected to end " + (f"in {show_seconds(left_s)}" if left_s >= 1.0 else "any moment")
    if not due_at:
        return ends
    apart = show_seconds(abs(due_at - said.ends_at))
    if not said.in_time:
        return f"{ends}, {apart} too late for its deadline"
    return f"{ends}, {apart} before its deadline" if due_at - said.ends_at >= 1.0 else f"{ends}, about at its deadline"


def _count_calls_ahead_in_library(call: Call) -> int:
    if not isinstance(call.holder, Library):
        return 0
    return max(0, list(call.holder.held).index(call.id) - call.holder.slots + 1)


def describe_wait(state: State, context: Context) -> str:
    here = [pilot for pilot in state.pilots.values() if pilot.state is PilotState.HERE]
    name = context.recipe.title if context.recipe.loader else "a library without a context"
    if not here:
        cut = sum(pilot.state is PilotState.CUT for pilot in state.pilots.values())
        blocks = _describe_blocks(state)
        if cut:
            return f"no pilot is connected ({cut} cut off; {blocks})"
        last = next(reversed(state.gone_pilots.values()), None)
        if last is None:
            ever = "no pilot is connected any more" if state.pilots_gone else "no pilot has joined yet"
            return f"{ever} ({blocks})"
        at, what = last.notes[-1]
        ago = f"{show_seconds(state.now - at)} ago: {what.removeprefix('gone: ')}"
        return f"no pilot is connected any more (the last one, {last.id}, {ago}; {blocks})"
    able: dict[LibraryState, list[Library]] = {kind: [] for kind in LibraryState}
    for library in queues.libraries_serving_context(context):
        able[library.state].append(library)
    ready, loading, asleep = (able[x] for x in (LibraryState.READY, LibraryState.LOADING, LibraryState.ASLEEP))
    head = context.queue.head()
    gang = head.group.options.gang[0] if head is not None else 1
    if ready and len(ready) < gang:
        more = f", {len(loading)} loading" if loading else ""
        return f"the next call needs {gang} devices at once; {len(ready)} are hot{more}"
    if ready:
        more = f"; {len(loading)} more loading" if loading else ""
        kept = [x.pilot for x in ready if x.pilot.reserved_for is not None]
        if len(kept) == len(ready) and kept[0].reserved_for is not None:
            alone = format_call_id(kept[0].reserved_for.id)
            return f"{kept[0].id} is kept for {alone}, which must run alone (stoker explain {alone}){more}"
        free = sum(library.id in context.idle for library in ready)
        if gang > 1 and free:
            return f"the next call needs {gang} devices at once; {free} of {len(ready)} hot libraries are free{more}"
        if slower := _why_wait_for_faster_library(context, ready):
            return slower + more
        which = f" of {context.recipe.name} and of longer runtimes" if context.variants else ""
        if len(ready) == 1:
            return (
                f"{'the' if which else 'its'} library{which} runs other calls{more}{_describe_library_limit(context)}"
            )
        return f"all {len(ready)} libraries{which} run other calls{more}{_describe_library_limit(context)}"
    if loading:
        first = loading[0]
        usual_s = context.wake_s if first.is_waking else context.load_s
        usual = f", usually {show_seconds(usual_s)}" if usual_s else ""
        devices = ", ".join(f"{x.devices[0].id} of {x.pilot.id}" for x in loading[:3])
        since = show_seconds(state.now - first.started_at)
        phase = object_plan.describe_loading_phase(state, first)
        doing = "wakes" if first.is_waking else f"is starting ({phase})"
        return f"{name} {doing} on {devices} for {since}{usual}"
    if asleep:
        first = asleep[0]
        where = f"{first.devices[0].id} of {first.pilot.id}"
        doing = (
            f"is asleep on {where}, and waits for room there"
            if first.has_confirmed_sleep
            else f"falls asleep on {where}"
        )
        return f"{name} {doing}"
    if able[LibraryState.STOPPING]:
        return f"a library of {name} is stopping{_describe_library_limit(context)}"
    lacking = [why for pilot in here if (why := blame.why_pilot_is_unfit(pilot, context.recipe.key, state.now))]
    if lacking:
        return f"{len(lacking)} of {len(here)} connected pilots cannot load {name}: {lacking[0]}"
    if context.last_failure is not None:
        return f"{name} failed to load ({show_line(context.last_failure.message)}) and will be tried again"
    faults = [device.fault for pilot in here for device in pilot.devices.values() if device.fault]
    if faults and not any(True for _ in state.devices()):
        return f"no pilot has a device that can be used: {faults[0]}"
    kinds = context.recipe.needs.kinds
    if kinds and not any(device.facts.kind in kinds for device in state.devices()):
        wanted = f"no pilot has a device of a kind that {name} needs ({', '.join(kinds)})"
        return f"{wanted}; {_describe_blocks(state)}" if state.blocks or state.sources else wanted
    free = max((d.free_bytes for d in state.devices()), default=0)
    return f"no device has room for {name} next to its busy libraries (most free: {show_bytes(free)})"


def _why_wait_for_faster_library(context: Context, ready: list[Library]) -> str:
    """Return why a call waits for a fast library although slower libraries are free; empty if it does not."""
    speeds = context.speeds
    free = [x for x in ready if x.id in context.idle]
    fastest = max((speeds.speed_of_kind(x.kind) for x in ready), default=1.0)
    if not free or len(free) == len(ready) or any(speeds.speed_of_kind(x.kind) >= fastest for x in free):
        return ""
    kinds = ", ".join({x.kind: None for x in free})
    return f"a library on a faster device should end the call sooner than the {len(free)} free libraries ({kinds})"


def list_slower_kinds(context: Context) -> tuple[KindSpeed, ...]:
    speeds, runs = context.speeds, context.by_kind
    fastest = max(speeds.of, key=lambda kind: (speeds.of[kind], kind), default="")
    return tuple(
        KindSpeed(kind, speed, fastest, runs[kind].runs if kind in runs else 0, speeds.is_measured(kind))
        for kind, speed in sorted(speeds.of.items())
        if speed < 1.0
    )


def _describe_library_limit(context: Context) -> str:
    most = context.limits.most
    return f"; max_libraries = {most} allows no more" if 0 < most <= len(context.libraries) else ""


def _describe_blocks(state: State) -> str:
    said = [f"block {format_block_name(block)}: {what}" for block, what in describe_program_blocks(state).items()]
    own = (block for block in state.blocks.values() if not block.probed_node)
    said += [f"block {block.id}: {_describe_block_state(state.now, block)}" for block in own]
    for name, source in state.sources.items():
        said += [f"{name}: {text}" for text in (source.trouble, describe_source_failure(source)) if text]
    if state.factory_trouble:
        said.insert(0, state.factory_trouble)
    more = f", and {len(said) - _SHOWN_BLOCKS} more" if len(said) > _SHOWN_BLOCKS else ""
    return ", ".join(said[:_SHOWN_BLOCKS]) + more or "no block was submitted"


def _show_call_count(count: int) -> str:
    return f"{count:,} call{'s' * (count != 1)}"


def _block_headline_and_notes(state: State, block: Block) -> tuple[str, list[Note]]:
    now, notes = state.now, list(block.notes)
    if block.phase is BlockPhase.ASKED and state.factory_trouble:
        notes.append((now, state.factory_trouble))
    pilots = f", pilots {', '.join(block.pilots)}" if block.pilots else ""
    job = f", job {block.job}" if block.job else ""
    return f"block of source {block.source.source.name}{job}: {_describe_block_state(now, block)}{pilots}", notes


def _pilot_headline_and_notes(state: State, pilot: Pilot) -> tuple[str, list[Note]]:
    devices = ", ".join(
        f"{d.id} {d.facts.kind} {show_bytes(d.promised_bytes)} of {show_bytes(d.facts.memory_bytes)} promised"
        for d in pilot.devices.values()
    )
    notes = list(pilot.notes)
    gone = [library for library in state.gone_libraries.values() if library.pilot is pilot]
    for library in (*gone, *pilot.libraries.values()):
        whose = f"{format_library_id(library.id)} ({library.context.recipe.title})"
        notes += [(at, f"{whose}: {text}") for at, text in library.notes]
    return f"{pilot.state.value}; {_show_call_count(pilot.ended)} ended there; {devices}", notes


def _library_headline_and_notes(library: Library) -> tuple[str, list[Note]]:
    devices = ", ".join(d.id for d in library.devices)
    busy = f", {min(len(library.held), library.slots)} of {library.slots} slots taken" if library.slots > 1 else ""
    head = (
        f"{library.context.recipe.title} on {devices} of {library.pilot.id}: {library.state.value}, "
        f"{_show_call_count(library.served)} served, {len(library.held)} held{busy}, "
        f"{show_bytes(library.memory_bytes)} in use"
    )
    batch = [(library.batch_at, _describe_batch(library.batch))] if library.batch is not None else []
    return head, [*library.notes, *batch]


def _describe_batch(load: EngineLoad) -> str:
    rows = f"{load.running} of {load.rows} rows" if load.rows else f"{load.running} row{'s' * (load.running != 1)}"
    waiting = f", {load.waiting} {'waits' if load.waiting == 1 else 'wait'}" if load.waiting else ""
    mean = f"; mean {load.mean_rows_per_decode_step:.1f} over {load.decode_steps:,} steps" if load.decode_steps else ""
    speed = f"; {load.tokens_per_s:,.0f} tokens/s" if load.busy_s else ""
    return f"batch: {rows} running{waiting}{mean}{speed}"


def _context_headline_and_notes(state: State, context: Context) -> tuple[str, list[Note]]:
    hot = sum(x.state is LibraryState.READY for x in context.libraries.values())
    loads = f"{context.loads} load{'s' * (context.loads != 1)}"
    asleep = sum(x.state is LibraryState.ASLEEP for x in context.libraries.values())
    standing = f"{hot} hot, {asleep} asleep" if asleep else f"{hot} hot"
    head = f"{standing}, {_show_call_count(context.queue.count)} queued, {context.ended:,} ended, {loads}"
    if context.loads:
        head += f" of {show_seconds(context.load_s)}, {show_bytes(context.resident_bytes)} each"
        head += f"; a wake took {show_seconds(context.wake_s)}" if context.wake_s else ""
    elif context.advised_by and context.load_s:
        head += f"; a load is expected to take {show_about(context.load_s)}, according to {context.advised_by}"
    notes: list[Note] = []
    gone = [library for library in state.gone_libraries.values() if library.context is context]
    for library in (*gone, *context.libraries.values()):
        notes += [(at, f"{format_library_id(library.id)} on {library.pilot.id}: {text}") for at, text in library.notes]
    notes += [(state.now, each.text) for each in list_slower_kinds(context)]
    if context.refusals:
        cases = ", ".join(f"{count:,} {case}" for case, count in sorted(context.refusals.items()))
        notes.append((state.now, f"offers that pilots refused: {cases}"))
    if context.sleep_failure:
        notes.append((state.now, f"its libraries no longer sleep: {context.sleep_failure}"))
    if context.last_failure is not None:
        notes.append((state.now, f"last failed load: {context.last_failure.message}"))
    if context.queue.count:
        notes.append((state.now, f"its calls wait: {describe_wait(state, context)}"))
    return head, notes
