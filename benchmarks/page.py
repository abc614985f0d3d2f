"""Write the page of `make bench`: a chart of every bar.

A line shows median and range relative to the bar on a logarithmic scale; right of the vertical line is better.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.harness import Facts, spread
from benchmarks.tables import Line, Table, Verdict

_WIDTH, _HEIGHT, _DOUBLINGS = 360, 16, 3.0
_COLORS = {Verdict.MET: "#2c7fb8", Verdict.MISSED: "#d95f0e", Verdict.TOO_FEW: "#999999", Verdict.NOT_JUDGED: "#999999"}
_STYLE = """body { font: 14px/1.4 sans-serif; margin: 2em auto; max-width: 72em; color: #222 }
table { border-collapse: collapse } td, th { padding: 3px 10px; text-align: left; vertical-align: middle }
tr + tr td { border-top: 1px solid #ddd } .missed { color: #d95f0e; font-weight: bold } small { color: #666 }"""


class Judged(NamedTuple):
    table: str
    line: Line
    verdict: Verdict


def judge_lines(tables: Iterable[Table], *, quick: bool = False) -> list[Judged]:
    found = [
        Judged(table.name, line, line.verdict(quick=quick))
        for table in tables
        for line in table.lines
        if line.bar is not None
    ]
    return sorted(found, key=lambda one: one.verdict is Verdict.MET)


def write(tables: Sequence[Table], failed: Sequence[str], facts: Facts, *, quick: bool = False) -> str:
    every = judge_lines(tables, quick=quick)
    counts = {verdict: sum(one.verdict is verdict for one in every) for verdict in _COLORS}
    skipped = [(table.name, table.skipped) for table in tables if table.skipped]
    title = f"{counts[Verdict.MET]} of {len(every)} bars met"
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>',
        f"<h1>{title}</h1>",
        f"<p>{_text(facts.line().replace('`', ''))}</p>",
    ]
    if quick:
        parts.append("<p>A quick run: sizes are too small for any bar, and nothing is judged.</p>")
    for what, names in (("Failed", list(failed)), ("Skipped", [f"{name} ({why})" for name, why in skipped])):
        if names:
            parts.append(f"<p><b>{what}:</b> {_text(', '.join(names))}</p>")
    parts += ["<table>", "<tr><th>benchmark<th>what<th>found<th>wanted<th><th></tr>"]
    parts += [_row(one) for one in every]
    return "\n".join([*parts, "</table>", "<p><small>", _text(_LEGEND), "</small></p></html>", ""])


_LEGEND = (
    "The dot is the median over repeats, the thin line their range, as a part of what is wanted: each doubling is as "
    "wide, and the ends stand for all that lies beyond. To the right of the vertical line is better."
)


def _row(one: Judged) -> str:
    line, bar = one.line, one.line.bar
    numbers = list(line.cells.values())[-1]
    verdict = f'<td class="missed">{one.verdict.value}' if one.verdict is Verdict.MISSED else f"<td>{one.verdict.value}"
    found = _text(spread(numbers, digits=line.last_digits))
    cells = [_text(one.table), _text(line.what), found, str(bar), "".join(_bar_svg(one))]
    return f"<tr><td>{'<td>'.join(cells)}{verdict}</tr>"


def _bar_svg(one: Judged) -> Iterator[str]:
    numbers = [number for number in list(one.line.cells.values())[-1] if math.isfinite(number)]
    yield f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">'
    middle, color = _WIDTH / 2, _COLORS[one.verdict]
    yield f'<line x1="{middle}" x2="{middle}" y1="0" y2="{_HEIGHT}" stroke="#222"/>'
    places = [place for number in numbers if (place := _x_of(one.line, number)) is not None]
    if places:
        y = _HEIGHT / 2
        yield f'<line x1="{min(places):.0f}" x2="{max(places):.0f}" y1="{y}" y2="{y}" stroke="{color}"/>'
        yield f'<circle cx="{statistics.median(places):.0f}" cy="{y}" r="5" fill="{color}"/>'
    yield "</svg>"


def _x_of(line: Line, number: float) -> float | None:
    assert line.bar is not None
    limit = line.bar.at_least if line.bar.at_least is not None else line.bar.at_most
    if limit is None or limit < 0 or number < 0:
        return None
    if not limit or not number:
        better = (number >= limit) if line.bar.at_least is not None else (number <= limit)
        return float(_WIDTH - 8 if better else 8)
    doublings = math.log2(number / limit) * (1 if line.bar.at_least is not None else -1)
    return _WIDTH / 2 + max(-1.0, min(1.0, doublings / _DOUBLINGS)) * (_WIDTH / 2 - 8)


def _text(text: str) -> str:
    return html.escape(text, quote=False)
