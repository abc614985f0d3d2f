"""Why a call, pilot, library or context is where it is: what `stoker explain` prints.

Ordinary steps are told from the fields of the nouns; what was out of the ordinary is in their notes. Times are the
manager's, in seconds; the shell turns them into the wall clock's.
"""

from __future__ import annotations

from stoker.manager.core import fitness, object_report
from stoker.manager.core.blocks import failing, in_words
from stoker.manager.core.phases import CallState, LibraryState, PilotState
from stoker.manager.core.sources import Block
from stoker.manager.core.state import Call, Context, Gang, Library, Note, Pilot, State
from stoker.manager.protocol import to_client
from stoker.manager.protocol.blocks import BlockPhase
from stoker.manager.protocol.ids import CLIENT_SHIFT, BlockId, parse_call, show_call, show_library
from stoker.units import show_bytes, show_seconds


def tell(state: State, subject: str) -> to_client.Story:
    """The story of whatever people call by this name; `found` is False when there is nothing of that name."""
    for pilot in (*state.pilots.values(), *reversed(state.gone_pilots.values())):
        if subject in (pilot.id, pilot.host):
            return _story(subject, *_of_pilot(pilot))
    for context in state.contexts.values():
        if subject in (context.recipe.name, context.recipe.key):
            return _story(subject, *_of_context(state, context))
    block = state.blocks.get(BlockId(subject)) or state.past_blocks.get(BlockId(subject))
    if block is not None:
        return _story(subject, *_of_block(state, block))
    if subject.startswith("lib-"):
        library = next((x for x in state.libraries.values() if show_library(x.id) == subject), None)
        if library is not None:
            return _story(subject, *_of_library(library))
    try:
        id = parse_call(subject)
    except ValueError:
        return to_client.Story(subject, False, "no call, pilot, library, context or block of this name", ())
    call = state.calls.get(id) or state.failed.get(id)
    if call is not None:
        return _story(show_call(id), *_of_call(state, call))
    client = state.clients_by_number.get(id >> CLIENT_SHIFT)
    if client is not None and id <= client.last_call:
        return to_client.Story(show_call(id), False, "ended; its story is in the journal", ())
    return to_client.Story(show_call(id), False, "no such call in the session", ())


def _story(subject: str, headline: str, notes: list[Note]) -> to_client.Story:
    lines = tuple(to_client.StoryLine(at, text) for at, text in sorted(notes, key=lambda note: note[0]))
    return to_client.Story(subject, True, headline, lines)


def _of_call(state: State, call: Call) -> tuple[str, list[Note]]:
    group, context = call.group, call.group.context
    what = f"{group.function.name}  wants {context.recipe.name}"
    notes: list[Note] = [(call.submitted_at, "submitted")]
    notes += call.notes or []
    if call.state is not CallState.ENDED and (expected := _expected(state, call)):
        notes.append((state.now, expected))
    if call.state is CallState.WAITING:
        since = show_seconds(state.now - call.submitted_at)
        before = next((n for n, other in enumerate(context.queue) if other is call), 0)
        behind = f"behind {before} calls of {context.recipe.name}; " if before else ""
        notes.append((state.now, f"waits for {since}: {behind}{waits_for(state, context)}"))
        return f"{what}  waiting for {since}", notes
    if call.state is CallState.HELD:
        since = show_seconds(state.now - call.sent_at)
        notes.append((call.sent_at, f"sent to {_where(call)}"))
        ahead = _ahead(call)
        if ahead:
            notes.append((state.now, f"{ahead} calls of that library are before it"))
            return f"{what}  sent {since} ago, {ahead} before it", notes
        report = state.reports.get(call.id)
        done = f", {report.done:g} of {report.total:g} done" if report is not None and report.total else ""
        return f"{what}  running for {since}{done}", notes
    notes.append((call.sent_at or call.submitted_at, "sent to a library" if call.sent_at else "never sent"))
    return f"{what}  ended", notes


def _expected(state: State, call: Call) -> str:
    """What is expected of a call with a deadline, in words; empty if nobody says."""
    due_at, said = call.group.options.objective.deadline_at, state.forecasts.get(call.id)
    if said is None:
        return f"is to be done in {show_seconds(due_at - state.now)}" if due_at > state.now else ""
    left_s = said.ends_at - state.now
    ends = "is expected to end " + (f"in {show_seconds(left_s)}" if left_s >= 1.0 else "any moment")
    if not due_at:
        return ends
    apart = show_seconds(abs(due_at - said.ends_at))
    if not said.in_time:
        return f"{ends}, {apart} too late for its deadline"
    return f"{ends}, {apart} before its deadline" if due_at - said.ends_at >= 1.0 else f"{ends}, about at its deadline"


def _where(call: Call) -> str:
    holder = call.holder
    if isinstance(holder, Gang):
        return "a gang of " + ", ".join(f"{show_library(x.id)} on {x.pilot.id}" for x in holder.members)
    if isinstance(holder, Library):
        devices = ", ".join(d.id for d in holder.devices)
        return f"{show_library(holder.id)} ({devices} of {holder.pilot.id}), where {holder.context.recipe.name} is hot"
    return "nowhere"


def _ahead(call: Call) -> int:
    if not isinstance(call.holder, Library):
        return 0
    position = list(call.holder.held).index(call.id)
    return max(0, position - call.holder.slots + 1)


def waits_for(state: State, context: Context) -> str:
    """What the head of a context's queue waits for, in words."""
    here = [pilot for pilot in state.pilots.values() if pilot.state is PilotState.HERE]
    name, queued = context.recipe.name, context.queue.count
    if not here:
        cut = sum(pilot.state is PilotState.CUT for pilot in state.pilots.values())
        blocks = _blocks(state)
        if cut:
            return f"no pilot is here ({cut} cut off; {blocks})"
        return f"no pilot is here any more ({blocks})" if state.pilots_gone else f"no pilot has joined yet ({blocks})"
    ready = [x for x in context.libraries.values() if x.state is LibraryState.READY]
    loading = [x for x in context.libraries.values() if x.state is LibraryState.LOADING]
    stopping = [x for x in context.libraries.values() if x.state is LibraryState.STOPPING]
    head = context.queue.head()
    gang = head.group.options.gang[0] if head is not None else 1
    if ready and len(ready) < gang:
        more = f", {len(loading)} loading" if loading else ""
        return f"the first of {queued} calls wants {gang} devices at once; {len(ready)} with {name} here{more}"
    if ready:
        plural = "library is" if len(ready) == 1 else "libraries are"
        wait = queued * context.run_s / sum(x.slots for x in ready)
        more = f"; {len(loading)} more loading" if loading else ""
        busy = f"its {len(ready)} hot {plural} busy{more}"
        return f"{queued} calls of {name} are queued, {busy}; all done in about {show_seconds(wait)}"
    if loading:
        first = loading[0]
        usual = f", usually {show_seconds(context.load_s)}" if context.load_s else ""
        devices = ", ".join(f"{x.devices[0].id} of {x.pilot.id}" for x in loading[:3])
        since = show_seconds(state.now - first.started_at)
        return f"{name} is on its way ({object_report.phase(state, first)}) on {devices} for {since}{usual}"
    if stopping:
        return f"a library of {name} is stopping"
    lacking = [why for pilot in here if (why := fitness.unfit(pilot, context.recipe.key, state.now))]
    if lacking:
        return f"{len(lacking)} of {len(here)} pilots that are here cannot hold {name}: {lacking[0]}"
    if context.last_failure is not None:
        return f"{name} failed to load ({context.last_failure.message}) and will be tried again"
    free = max((d.free_bytes for d in state.devices()), default=0)
    return f"no device has room for {name} beside what is busy there (most free: {show_bytes(free)})"


def _blocks(state: State) -> str:
    """What has become of blocks that should bring pilots."""
    said = [f"block {block}: {what}" for block, what in state.said_blocks.items()]
    said += [f"block {block.id}: {in_words(state.now, block)}" for block in state.blocks.values()]
    for name, source in state.sources.items():
        said += [f"{name}: {text}" for text in (source.trouble, failing(source)) if text]
    if state.factory_trouble:
        said.insert(0, state.factory_trouble)
    more = f", and {len(said) - _SHOWN_BLOCKS} more" if len(said) > _SHOWN_BLOCKS else ""
    return ", ".join(said[:_SHOWN_BLOCKS]) + more or "no block was submitted"


_SHOWN_BLOCKS = 8


def _of_block(state: State, block: Block) -> tuple[str, list[Note]]:
    now, notes = state.now, list(block.notes)
    if block.phase is BlockPhase.ASKED and state.factory_trouble:
        notes.append((now, state.factory_trouble))
    pilots = f", pilots {', '.join(block.pilots)}" if block.pilots else ""
    job = f", job {block.job}" if block.job else ""
    return f"block of source {block.source.source.name}{job}: {in_words(now, block)}{pilots}", notes


def _of_pilot(pilot: Pilot) -> tuple[str, list[Note]]:
    devices = ", ".join(
        f"{d.id} {d.facts.kind} {show_bytes(d.promised_bytes)} of {show_bytes(d.facts.memory_bytes)} promised"
        for d in pilot.devices.values()
    )
    notes = list(pilot.notes)
    for library in pilot.libraries.values():
        notes += [
            (at, f"{show_library(library.id)} ({library.context.recipe.name}): {text}") for at, text in library.notes
        ]
    return f"{pilot.state.value}; {pilot.ended} calls ended there; {devices}", notes


def _of_library(library: Library) -> tuple[str, list[Note]]:
    devices = ", ".join(d.id for d in library.devices)
    head = (
        f"{library.context.recipe.name} on {devices} of {library.pilot.id}: {library.state.value}, "
        f"{library.served} calls served, {len(library.held)} held, {show_bytes(library.memory_bytes)} in use"
    )
    return head, list(library.notes)


def _of_context(state: State, context: Context) -> tuple[str, list[Note]]:
    hot = sum(x.state is LibraryState.READY for x in context.libraries.values())
    head = f"{hot} hot, {context.queue.count} calls queued, {context.ended} ended, {context.loads} loads"
    if context.loads:
        head += f" of {show_seconds(context.load_s)}, {show_bytes(context.resident_bytes)} each"
    notes: list[Note] = []
    for library in context.libraries.values():
        notes += [(at, f"{show_library(library.id)} on {library.pilot.id}: {text}") for at, text in library.notes]
    if context.last_failure is not None:
        notes.append((state.now, f"last failed load: {context.last_failure.message}"))
    if context.queue.count:
        notes.append((state.now, f"its calls wait: {waits_for(state, context)}"))
    return head, notes
