"""One profile, from its options to its table."""

from __future__ import annotations

from typing import Any

import stoker
from stoker.apps.common.calls import Stopped, session_line, stop_on_signals
from stoker.apps.common.measuring import measure
from stoker.apps.model_profile.functions import MeasuredModel, measure_steps
from stoker.apps.model_profile.tables import grid, show_error
from stoker.console import Screen
from stoker.contexts import Recipe, state_folder
from stoker.units import show_seconds

INTERRUPTED = 130


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
        found: MeasuredModel = measure(loaded, measure_steps, recipe, quick, screen=screen)
        return found


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
