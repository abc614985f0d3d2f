"""The times of steps in a file of measurements: a row a cell, so that several writers only need to take turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from stoker.contexts.step_times import MOST_SAMPLES, StepCell, StepError, StepTimes, power_of

SCHEMA = """
CREATE TABLE IF NOT EXISTS steps (
    recipe TEXT NOT NULL, kind TEXT NOT NULL, stage TEXT NOT NULL, tokens_power INTEGER NOT NULL,
    length_power INTEGER NOT NULL, tokens REAL NOT NULL, length REAL NOT NULL, value REAL NOT NULL,
    count INTEGER NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (recipe, kind, stage, tokens_power, length_power)
) WITHOUT ROWID;
"""
ADD = f"""
INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (recipe, kind, stage, tokens_power, length_power) DO UPDATE SET
    tokens = tokens + (excluded.tokens - tokens) * excluded.count / (count + excluded.count),
    length = length + (excluded.length - length) * excluded.count / (count + excluded.count),
    value = value + (excluded.value - value) * excluded.count / (count + excluded.count),
    count = min({MOST_SAMPLES}, count + excluded.count), at = excluded.at
"""
READ = "SELECT kind, stage, tokens, length, value, count FROM steps WHERE recipe = ? ORDER BY kind, tokens, length"
_ERROR = " error"
"""Behind a stage's name: the row holds how far its table is off."""


def rows_of(times: StepTimes, recipe: str, kind: str, *, at: float) -> Iterator[tuple[Any, ...]]:
    """The values of `ADD` for all that is known."""
    for stage, cells in (("prefill", times.prefill), ("decode", times.decode)):
        for cell in cells:
            place = power_of(cell.tokens), power_of(cell.length)
            yield recipe, kind, stage, *place, cell.tokens, cell.length, cell.seconds, cell.count, at
    for stage, error in (("prefill", times.prefill_error), ("decode", times.decode_error)):
        if error.count:
            yield recipe, kind, stage + _ERROR, 0, 0, 0.0, 0.0, error.mean, error.count, at


def times_of(rows: Iterable[tuple[Any, ...]]) -> dict[str, StepTimes]:
    """What `READ` has found, by device kind."""
    cells: dict[str, dict[str, list[StepCell]]] = {}
    errors: dict[tuple[str, str], StepError] = {}
    for kind, stage, tokens, length, value, count in rows:
        of_kind = cells.setdefault(kind, {})
        if stage.endswith(_ERROR):
            errors[kind, stage.removesuffix(_ERROR)] = StepError(value, count)
        else:
            of_kind.setdefault(stage, []).append(StepCell(tokens, length, value, count))
    return {
        kind: StepTimes(
            tuple(found.get("prefill", ())), tuple(found.get("decode", ())),
            errors.get((kind, "prefill"), StepError()), errors.get((kind, "decode"), StepError()),
        )
        for kind, found in cells.items()
    }  # fmt: skip
