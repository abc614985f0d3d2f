"""Advice has arrived: what each kind of it changes. It fills in what nobody has measured, and overrides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.manager.core import accounting, actions, call_records, loads, verdicts
from stoker.manager.core.events import AdviceArrived, CostAdvice, PaceAdvice, VerdictAdvice
from stoker.manager.core.manager import Manager
from stoker.manager.core.seams import Rounds
from stoker.manager.core.subjects import OfContext, OfFailure, OfFunction, OfPace
from stoker.protocol.bounds import is_sound

Seams = Iterable[tuple[str, Rounds]]


def arrived(manager: Manager, event: AdviceArrived, seams: Seams) -> None:
    """Take advice, and tell the policies of it."""
    about, advice = event.about, event.advice
    if isinstance(about, OfContext) and isinstance(advice, CostAdvice):
        _of_context(manager, about, advice, event.source, seams)
    elif isinstance(about, OfFunction) and isinstance(advice, CostAdvice):
        _of_function(manager, about, advice)
    elif isinstance(about, OfFailure) and isinstance(advice, VerdictAdvice):
        if verdicts.arrived(manager, about, advice):
            for name, seam in seams:
                actions.carry_out(manager, seam.failure_judged(manager.state, about, advice), seam=name)
    elif isinstance(about, OfPace) and isinstance(advice, PaceAdvice):
        _of_pace(manager, about, advice, seams)
    else:
        manager.state.refuse(f"{type(advice).__name__} on a subject that it is not for")


def _of_context(manager: Manager, about: OfContext, advice: CostAdvice, source: str, seams: Seams) -> None:
    context = manager.state.contexts.get(about.recipe)
    if context is None:
        manager.state.refuse("advice on an unknown context")
        return
    loads.advise(context, advice.by_kind, source=source)
    accounting.advise(context, advice.by_kind)
    manager.changed("contexts", context.recipe.key)
    for name, seam in seams:
        actions.carry_out(manager, seam.advised(manager.state, context), seam=name)
    manager.dirty[context] = None


def _of_function(manager: Manager, about: OfFunction, advice: CostAdvice) -> None:
    cost = manager.state.costs.get((about.function, about.recipe))
    context = manager.state.contexts.get(about.recipe)
    if cost is None or context is None:
        return
    if accounting.advise_runs(manager, context, cost, advice.by_kind):
        manager.dirty[context] = None


def _of_pace(manager: Manager, about: OfPace, pace: PaceAdvice, seams: Seams) -> None:
    library = manager.state.libraries.get(about.library)
    call = library.held.get(about.call) if library is not None else None
    if call is None or not is_sound(pace.done, pace.total):
        return
    if pace.done or pace.total:
        call_records.printed(manager, call, pace)
    for name, seam in seams:
        actions.carry_out(manager, seam.pace_told(manager.state, about, pace), seam=name)
