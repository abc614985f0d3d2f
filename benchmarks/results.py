"""`python -m benchmarks.results`: write `benchmarks/results.md` from the records in `benchmarks/records`.

Every table of a record that `python -m benchmarks --json FILE` has written, with its command, commit, machine and load.
A test compares the page with the records, so that no number stands there that nobody measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.facts import Facts
from benchmarks.gpu.page import render
from benchmarks.table import Table, show
from benchmarks.words import paragraph

HERE = Path(__file__).parent
RECORDS, PAGE = HERE / "records", HERE / "results.md"
HEAD = (
    "# Results that have a record\n\n"
    + paragraph("""`python -m benchmarks.results` writes this page from those [records](records) that
    `make bench ARGS="NAME --json FILE"` and `make gpu` have written: each table is what one run found, the median of
    its repeats, then their range. Records that other commands have written are named where [README.md](README.md) has
    their numbers. Pairs run in the order A B B A where a record has a command; the older ones ran A B A B. A benchmark
    that was run on a busy machine and on a quiet one has a record of each: the load stands in its heading.""")
    + "\n"
)


def write() -> str:
    """The page."""
    parts = [HEAD]
    for path in sorted(RECORDS.glob("*.json")):
        found = msgspec.json.decode(path.read_bytes())
        if isinstance(found, dict) and "tables" in found and "facts" in found:
            parts.append(_record(path.name, found))
        elif isinstance(found, dict) and "rehearsal" in found:
            parts.append(_gpu_record(path.name, found))
    return "\n".join(parts)


def _record(name: str, found: dict[str, Any]) -> str:
    facts = found["facts"]
    said = msgspec.convert(facts, Facts).line() if isinstance(facts, dict) else ", ".join(facts)
    tables = msgspec.convert(found["tables"], list[Table])
    lines = [_deeper(line) for table in tables for line in show(table)]
    heading = f"## {', '.join(table.name for table in tables)}: load {_load(facts)}"
    return "\n".join([heading, "", paragraph(f"Record [{name}](records/{name}): {said}."), "", *lines])


def _gpu_record(name: str, found: dict[str, Any]) -> str:
    """What `make gpu` has left."""
    head, *lines = render(found).splitlines()
    return "\n".join([f"#{head}, record [{name}](records/{name})", *(_deeper(line) for line in lines), ""])


def _deeper(line: str) -> str:
    return f"#{line}" if line.startswith("## ") else line


def _load(facts: dict[str, Any] | list[str]) -> str:
    """What the machine had to do before."""
    if isinstance(facts, dict):
        return f"{msgspec.convert(facts, Facts).load[0]}"
    return next((one.removeprefix("load before ") for one in facts if one.startswith("load before ")), "unknown")


if __name__ == "__main__":
    PAGE.write_text(write())
    sys.stdout.write(f"{PAGE}\n")
