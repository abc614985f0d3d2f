"""Write the record of `make gpu` as a page."""

from __future__ import annotations

from typing import Any


def render(record: dict[str, Any]) -> str:
    what = "**A rehearsal: no GPU was used, the numbers say nothing of one.**\n\n" if record["rehearsal"] else ""
    statuses = ", ".join(f"{count} {status}" for status, count in record["counts"].items())
    summary = f"{record['machine']}. Commit {record['commit']}. {record['seconds']:.0f} s in all: {statuses}.\n"
    bars, columns = _bars(record.get("bars", [])), ["| part | | seconds | |", "|---|---|---:|---|"]
    lines = [f"# GPU run of {record['date']}\n", *bars, f"{what}{summary}", *columns]
    lines += [f"| {it['name']} | {it['status']} | {it['seconds']:.1f} | {_cell(it['why'])} |" for it in record["parts"]]
    for part in record["parts"]:
        if part["numbers"]:
            lines += ["", f"## {part['name']}: {part['title']}", "", "| what | value |", "|---|---:|"]
            lines += [f"| {_cell(name)} | {_cell(_value(value))} |" for name, value in part["numbers"].items()]
    return "\n".join(lines) + "\n"


def _bars(bars: list[dict[str, str]]) -> list[str]:
    if not bars:
        return []
    rows = [f"| {_cell(it['bar'])} | {it['wanted']} | {_cell(it['measured'])} | {it['met']} |" for it in bars]
    return ["| bar | wanted | measured | met |", "|---|---|---|---|", *rows, ""]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:300]


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
