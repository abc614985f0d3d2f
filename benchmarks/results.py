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
from benchmarks.table import Table, show
from benchmarks.words import paragraph

HERE = Path(__file__).parent
RECORDS, PAGE = HERE / "records", HERE / "results.md"
HEAD = (
    "# Results that have a record\n\n"
    + paragraph("""`python -m benchmarks.results` writes this page from
    [records](records): each table is what one run of `make bench` found, the median of its repeats, then their range.
    Pairs run in the order A B B A where a record has a command; the older ones ran A B A B.""")
    + "\n"
)


def write() -> str:
    """The page."""
    parts = [HEAD]
    for path in sorted(RECORDS.glob("*.json")):
        found = msgspec.json.decode(path.read_bytes())
        if isinstance(found, dict) and "tables" in found and "facts" in found:
            parts.append(_record(path.name, found))
    return "\n".join(parts)


def _record(name: str, found: dict[str, Any]) -> str:
    facts = found["facts"]
    said = msgspec.convert(facts, Facts).line() if isinstance(facts, dict) else ", ".join(facts)
    tables = msgspec.convert(found["tables"], list[Table])
    lines = [line for table in tables for line in show(table)]
    return "\n".join([paragraph(f"Record [{name}](records/{name}): {said}."), "", *lines])


if __name__ == "__main__":
    PAGE.write_text(write())
    sys.stdout.write(f"{PAGE}\n")
