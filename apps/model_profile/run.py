"""Measure a model's profile and print its tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import stoker
from stoker.apps.common.calls import measure_on_device
from stoker.apps.model_profile.functions import MeasuredModel, measure_steps
from stoker.contexts import Recipe, state_folder
from stoker.units import show_seconds

_MOST_COLUMNS = 12
_WIDTH = 8

Cell = tuple[float, float, float, int]
"""A cell of a table: tokens that an engine step reads, tokens that each attends to, seconds, number of samples."""


def format_grid(cells: Sequence[Cell], *, rows: str) -> list[str]:
    """Return a table of milliseconds per step. `rows` names the first column. Wide tables show every second column."""
    found = {(_round_log2(tokens), _round_log2(length)): seconds for tokens, length, seconds, _ in cells}
    columns = sorted({length for _, length in found})
    while len(columns) > _MOST_COLUMNS:
        columns = columns[::-1][::2][::-1]
    lines = [f"  {rows:>12}" + "".join(f"{_format_power_of_two(column):>{_WIDTH}}" for column in columns)]
    for tokens in sorted({tokens for tokens, _ in found}):
        row = [found.get((tokens, column)) for column in columns]
        lines.append(
            f"  {_format_power_of_two(tokens):>12}"
            + "".join(f"{_format_milliseconds(value):>{_WIDTH}}" for value in row)
        )
    return lines


def format_prediction_error(error: Sequence[float]) -> str:
    mean, count = error
    return (
        f"{100 * mean:.1f} % over {count:.0f} other workloads" if count else "not known: there was no time to compare"
    )


def _format_milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "·"
    ms = 1000 * seconds
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:,.0f}"


def _round_log2(value: float) -> int:
    return round(math.log2(value)) if value > 1 else 0


def _format_power_of_two(power: int) -> str:
    return f"{1 << power:,}"


def measure_model(model: str, *, dtype: str, quick: bool, site: str, session: str, json: bool) -> int:
    """Measure the model. Return 0, or 130 after Ctrl-C. Raises StokerError if the model cannot be measured."""
    recipe = stoker.causal_lm(model, dtype=dtype)

    def format_profile(found: MeasuredModel) -> tuple[dict[str, Any], list[str]]:
        kept = str(state_folder() / "performance.sqlite") if found.kept else ""
        summary = {"model": recipe.name, "recipe": recipe.key, "kept": kept, **found.profile}
        return summary, _format_report(recipe, found.profile, kept=kept)

    return measure_on_device(measure_steps, recipe, quick, site=site, session=session, json=json, show=format_profile)


def _format_report(recipe: Recipe, profile: dict[str, Any], *, kept: str) -> list[str]:
    times = profile["times"]
    facts = [f"engine {profile['engine']} on {profile['device']}", show_seconds(profile["took_s"])]
    facts += [f"{profile['left_out']} samples left out"] if profile["left_out"] else []
    return [
        " · ".join([recipe.name, *facts]),
        "",
        "decode: milliseconds of a step, by requests that write and their mean length in tokens",
        *format_grid(times["decode"], rows="requests"),
        f"  error  {format_prediction_error(times['decode_error'])}",
        "",
        "prefill: milliseconds of a step, by its tokens and the mean number of tokens that each token attends to",
        *format_grid(times["prefill"], rows="tokens"),
        f"  error  {format_prediction_error(times['prefill_error'])}",
        "",
        f"  kept in  {kept}" if kept else "  not kept: the session did not store it in time",
    ]
