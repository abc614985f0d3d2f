"""Compute the bars of `make gpu` from a record, and write the record as a page."""

from __future__ import annotations

from functools import partial
from typing import Any

Numbers = dict[str, Any]
ENGINES = ("graphs", "eager")
"""Engines of Stoker. Bars judge the fastest engine."""
OF_LIMIT = "of the bandwidth limit"
OF_PINNED = "of pinned bandwidth"
WEIGHTS_ALONE = "weights alone"
"""Loads of weights alone, without tokenizer, structure and CUDA start."""
FULL_OF_NONE = "full / none, inferences/s"
MET = "objectives met, share"


def bars(record: dict[str, Any]) -> list[dict[str, str]]:
    parts, rehearsal = {part["name"]: part for part in record["parts"]}, bool(record["rehearsal"])

    def row(bar: str, wanted: str, measured: str, met: bool | None) -> dict[str, str]:
        verdict = "not measured" if met is None else "rehearsal" if rehearsal else "met" if met else "missed"
        return {"bar": bar, "wanted": wanted, "measured": measured, "met": verdict}

    rows = [row("site suite", "every promise that can be tried holds", *_site(parts.get("site")))]
    for part, bar, wanted, at_least, measure in (
        ("decode", "decode, batch 1, of the memory-bandwidth limit", "0.5 or more", 0.5, partial(_decode, batch=1)),
        ("decode", "decode, batch 64, of the memory-bandwidth limit", "0.7 or more", 0.7, partial(_decode, batch=64)),
        ("load", "load from a snapshot, of pinned host-to-device bandwidth", "0.5 or more", 0.5, _snapshot),
        ("slinfer", "requests in time, slinfer / exclusive", "more than 1", 1.0, _slinfer),
        ("awareness", "inferences a second, full / none", "5 or more", 5.0, _awareness),
    ):
        value, how = measure(parts.get(part, {}).get("numbers", {}))
        if value is None:
            rows.append(row(bar, wanted, "", None))
        else:
            met = value > at_least if wanted.startswith("more") else value >= at_least
            rows.append(row(bar, wanted, f"{value:.2f}{f' ({how})' if how else ''}", met))
    return rows


def _site(part: dict[str, Any] | None) -> tuple[str, bool | None]:
    if part is None or not part["numbers"]:
        return "", None
    counts = ", ".join(f"{part['numbers'].get(each, 0)} {each}" for each in ("holds", "fails", "not tried"))
    if part["status"] == "running":
        return f"{counts} so far", None
    return f"{counts} ({part['status']})", part["status"] == "ok"


def _decode(numbers: Numbers, *, batch: int) -> tuple[float | None, str]:
    keys = {engine: f"{engine}, batch {batch}: {OF_LIMIT}" for engine in ENGINES}
    found = [(numbers[key], engine) for engine, key in keys.items() if key in numbers]
    return max(found) if found else (None, "")


def _snapshot(numbers: Numbers) -> tuple[float | None, str]:
    warm = [f"from a snapshot, warm{more}" for more in ("", ", again")]
    alone, whole = (
        [numbers[key] for what in warm if (key := f"{what}{more}: {OF_PINNED}") in numbers]
        for more in (f", {WEIGHTS_ALONE}", "")
    )
    if not whole:
        return None, ""
    if not alone:
        return max(whole), "the whole load, files in the page cache"
    return max(alone), f"{WEIGHTS_ALONE}, files in the page cache; {max(whole):.2f} of the whole load"


def _slinfer(numbers: Numbers) -> tuple[float | None, str]:
    mine, other = (numbers.get(f"{policy}: {MET}") for policy in ("slinfer", "exclusive"))
    if mine is None or other is None:
        return None, ""
    ratio = mine / other if other else float("inf") if mine else 0.0
    return ratio, f"{100 * mine:.0f} % and {100 * other:.0f} %"


def _awareness(numbers: Numbers) -> tuple[float | None, str]:
    return numbers.get(FULL_OF_NONE), ""


def render(record: dict[str, Any]) -> str:
    what = "**A rehearsal: no GPU was used, the numbers say nothing of one.**\n\n" if record["rehearsal"] else ""
    statuses = ", ".join(f"{count} {status}" for status, count in record["counts"].items())
    summary = f"{record['machine']}. Commit {record['commit']}. {record['seconds']:.0f} s in all: {statuses}.\n"
    bars, columns = _bar_rows(record.get("bars", [])), ["| part | | seconds | |", "|---|---|---:|---|"]
    lines = [f"# GPU run of {record['date']}\n", *bars, f"{what}{summary}", *columns]
    lines += [f"| {it['name']} | {it['status']} | {it['seconds']:.1f} | {_cell(it['why'])} |" for it in record["parts"]]
    for part in record["parts"]:
        if part["numbers"]:
            lines += ["", f"## {part['name']}: {part['title']}", "", "| what | value |", "|---|---:|"]
            lines += [f"| {_cell(name)} | {_cell(_value(value))} |" for name, value in part["numbers"].items()]
    return "\n".join(lines) + "\n"


def _bar_rows(bars: list[dict[str, str]]) -> list[str]:
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
