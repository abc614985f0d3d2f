"""One profile, from its options to its table."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import stoker
from stoker.apps.common.calls import Stopped, session_line, stop_on_signals
from stoker.apps.model_profile.functions import MeasuredModel, measure_steps
from stoker.apps.model_profile.tables import grid, show_error
from stoker.console import Screen
from stoker.contexts import Recipe, state_folder
from stoker.sessions import facts_of, sent_call
from stoker.units import show_seconds

if TYPE_CHECKING:
    from stoker.sessions import AppCallFuture

INTERRUPTED = 130
_LOOK_S = 0.5
_PARTS = 100


def run(model: str, *, dtype: str, quick: bool, site: str, session: str, screen: Screen, json: bool) -> int:
    """Measures the model. 0; 130 after Ctrl-C. Raises StokerError for a model that cannot be loaded or measured."""
    recipe = stoker.causal_lm(model, dtype=dtype)
    with stop_on_signals():
        try:
            found = _measured(recipe, quick=quick, site=site, session=session, screen=screen)
        except Stopped:
            screen.line("stopped: nothing was measured to its end, and nothing is kept")
            return INTERRUPTED
    profile, kept = found.profile, str(state_folder() / "performance.sqlite") if found.kept else ""
    if json:
        screen.json({"model": recipe.name, "recipe": recipe.key, "kept": kept, **profile})
        return 0
    for line in _report(recipe, profile, kept=kept):
        screen.line(line)
    return 0


def _measured(recipe: Recipe, *, quick: bool, site: str, session: str, screen: Screen) -> MeasuredModel:
    with stoker.load(site or None, session=session or None, progress=False) as loaded:
        screen.line(session_line(loaded))
        ask = facts_of(loaded, {recipe.key})
        with screen.progress(total=_PARTS, done=0, noun="profile", facts=ask) as progress:
            future = measure_steps.with_options(context=recipe)(quick)
            for done in _parts_done(future):
                progress.advance(done - progress.done)
        found: MeasuredModel = future.result()
        return found


def _parts_done(future: AppCallFuture) -> Iterator[int]:
    """How many hundredths the call has done, until it ends."""
    while True:
        try:
            future.exception(timeout=_LOOK_S)
            return
        except concurrent.futures.TimeoutError:
            call = sent_call(future)
            said = call.progress if call is not None else None
            if said is not None and said.total:
                yield int(_PARTS * said.done / said.total)


def _report(recipe: Recipe, profile: dict[str, Any], *, kept: str) -> list[str]:
    times = profile["times"]
    facts = [f"engine {profile['engine']} on {profile['device']}", show_seconds(profile["took_s"])]
    facts += [f"{profile['left_out']} samples left out"] if profile["left_out"] else []
    return [
        " · ".join([recipe.name, *facts]),
        "",
        "decode: milliseconds of a step, by requests that write and their mean length in tokens",
        *grid(times["decode"], rows="requests"),
        f"  error  {show_error(times['decode_error'])}",
        "",
        "prefill: milliseconds of a step, by tokens that it reads and how many tokens each attends to in the mean",
        *grid(times["prefill"], rows="tokens"),
        f"  error  {show_error(times['prefill_error'])}",
        "",
        f"  kept in  {kept}" if kept else "  not kept: the session did not take it in time",
    ]
