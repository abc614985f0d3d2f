"""What was measured, as people read it: a row for the tokens that a step reads, a column for what they attend to."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MOST_COLUMNS = 12
_WIDTH = 8

Cell = tuple[float, float, float, int]
"""Tokens that a step reads, tokens that each attends to, seconds, and how many samples those are the mean of."""


def grid(cells: Sequence[Cell], *, rows: str) -> list[str]:
    """Milliseconds a step. `rows` names the first column; with many columns every second one is shown."""
    found = {(_power(tokens), _power(length)): seconds for tokens, length, seconds, _ in cells}
    columns = sorted({length for _, length in found})
    while len(columns) > _MOST_COLUMNS:
        columns = columns[::-1][::2][::-1]
    lines = [f"  {rows:>12}" + "".join(f"{_number(column):>{_WIDTH}}" for column in columns)]
    for tokens in sorted({tokens for tokens, _ in found}):
        row = [found.get((tokens, column)) for column in columns]
        lines.append(f"  {_number(tokens):>12}" + "".join(f"{_show_ms(value):>{_WIDTH}}" for value in row))
    return lines


def show_error(error: Sequence[float]) -> str:
    """`4.1 % over 100 other workloads`."""
    mean, count = error
    return (
        f"{100 * mean:.1f} % over {count:.0f} other workloads" if count else "not known: there was no time to compare"
    )


def _show_ms(seconds: float | None) -> str:
    if seconds is None:
        return "·"
    ms = 1000 * seconds
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:,.0f}"


def _power(value: float) -> int:
    return round(math.log2(value)) if value > 1 else 0


def _number(power: int) -> str:
    return f"{1 << power:,}"
