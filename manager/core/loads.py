"""What is known of loading contexts: what it costs, and how it went. This file alone writes that into contexts.

`LOAD_TRIES` loads of a context that fail in a row, with none between that worked, give it up, as do `LOADS` pilots that
were lost in a row while they loaded it. A pilot that lacks what a load needs is another matter (`fitness`).
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.manager.core import fitness
from stoker.manager.core.events import ContextAdvice
from stoker.manager.core.nouns import Context, Library, Pilot
from stoker.manager.core.state import State
from stoker.protocol.calls import Failure
from stoker.protocol.to_manager import LibraryReady

# A context whose loads have failed this often in a row, with none between that worked, cannot be loaded.
LOAD_TRIES = 2

# Pilots that are lost in a row while they load one context, and do nothing else.
LOADS = 4


def advise(context: Context, by_kind: Mapping[str, ContextAdvice], *, source: str) -> None:
    """Take advice where nothing was measured yet. `source`: where it comes from."""
    if not context.loads and not context.advice:
        context.advised_by = source
    slots = [advice.slots for advice in by_kind.values() if advice.slots]
    if slots and not context.recipe.slots and not context.loads:
        context.slots = min(slots)  # it is not known on which kind of device it will be loaded
    for kind, advice in by_kind.items():
        context.advice.setdefault(kind, advice)
        if not context.load_s:
            context.load_s = advice.load_s


def measured(library: Library, message: LibraryReady) -> None:
    """A load has worked, and cost this."""
    context, facts = library.context, library.devices[0].facts
    seconds = message.start_s + message.load_s + message.fetch_s
    context.loads += 1
    context.load_s = seconds
    context.load_total_s += seconds
    # Of a GPU's library only device memory counts: host memory is none of the GPU's.
    context.resident_bytes = message.resident_bytes if facts.on_host else message.device_bytes
    peak_bytes = message.peak_bytes if facts.on_host else message.device_bytes
    before = context.advice.get(facts.kind)
    context.advice[facts.kind] = ContextAdvice(
        seconds, 0.0, context.resident_bytes, peak_bytes, context.run_s, 0.0, slots=library.slots,
        steps=before.steps if before is not None else None,
    )  # fmt: skip


def said_slots(context: Context, slots: int) -> None:
    """A library of a context has said how many calls it runs at once: others will run as many."""
    context.slots = slots


def worked(library: Library) -> None:
    """A library has loaded its context: what went wrong before is forgiven."""
    context = library.context
    context.load_failures = context.cut_loads = 0
    context.lost_loads.clear()
    context.last_failure = None
    context.failed_on.pop(library.pilot.id, None)
    fitness.forgive(library.pilot, context.recipe.key)


def failed(library: Library, failure: Failure) -> bool:
    """A load has failed. True if that was once too often."""
    context = library.context
    context.load_failures += 1
    context.last_failure = failure
    context.failed_on[library.pilot.id] = context.failed_on.get(library.pilot.id, 0) + 1
    return gave_up(context)


def gave_up(context: Context) -> bool:
    """Whether loads of a context have failed so often in a row that it is given up."""
    return context.load_failures >= LOAD_TRIES


def pilot_lacks(context: Context, failure: Failure) -> None:
    """A load has failed for what its pilot lacks."""
    context.last_failure = failure


def cut_off(library: Library, now: float) -> None:
    """A load was under way when the walltime of its pilot was over."""
    context = library.context
    context.cut_loads += 1
    context.cut_after_s = max(context.cut_after_s, now - library.started_at)


def lost_with(context: Context, pilot: Pilot) -> None:
    """A pilot was lost while it loaded a context and did nothing else."""
    context.lost_loads.append(pilot)


def back(state: State, pilot: Pilot) -> None:
    """A pilot that counted as lost has come back."""
    for context in state.contexts.values():
        if pilot in context.lost_loads:
            context.lost_loads.remove(pilot)


def lost_pilots(context: Context) -> list[Pilot]:
    """The pilots that a context has taken along when it was loaded, if that is certain and once too often."""
    counted = [x for x in context.lost_loads if x.loss is not None and not x.loss.explained]
    if len(counted) < LOADS or not all(pilot.loss_settled for pilot in counted):
        return []
    context.lost_loads.clear()
    return counted


def clean_slate(state: State, context: Context) -> None:
    """Whatever went wrong before, the next call that comes has the context tried anew."""
    context.load_failures = context.cut_loads = 0
    context.failed_on.clear()
    for pilot in state.pilots.values():
        fitness.forgive(pilot, context.recipe.key)


def forget_pilots(state: State) -> None:
    """Forget failures on pilots that are gone."""
    for context in state.contexts.values():
        for name in [name for name in context.failed_on if name not in state.pilots]:
            del context.failed_on[name]
