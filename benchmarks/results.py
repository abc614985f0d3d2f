"""`python -m benchmarks.results`: write `benchmarks/RESULTS.md` from the records in `benchmarks/records`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.bars import render
from benchmarks.harness import RECORDS, Facts
from benchmarks.tables import Table, head, paragraph, row, show

_UNKNOWN = ("unknown", "not known")
_NAMES = {"command": ("command",), "commit": ("commit", "commits", "here"), "load": ("load", "load_before")}
"""Names of facts in records. `here`: the commit of this checkout, in comparisons."""


def missing_parts(record: Any) -> list[str]:
    """Describe the missing parts of a record."""
    said = [(name, value) for name, value in _facts_in(record) if not any(word in str(value) for word in _UNKNOWN)]
    found = [f"no {what}" for what, names in _NAMES.items() if not any(name in names for name, _ in said)]
    commits = [str(value) for name, value in said if name in _NAMES["commit"]]
    if any("-dirty" in commit for commit in commits):
        found.append("measured with changes that are in no commit")
    if any(commit.startswith("after ") for commit in commits):
        found.append("only the commit before it is known")
    return found


def records_with_gaps(folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.json")):
        if missing := missing_parts(msgspec.json.decode(path.read_bytes())):
            found.setdefault(", ".join(missing), []).append(path.name)
    return found


def _facts_in(record: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(record, list):
        for each in record:
            yield from _facts_in(each)
    elif isinstance(record, Mapping):
        for name, value in record.items():
            yield name, value
            if name == "facts" and isinstance(value, list):
                for text in value:
                    first, _, rest = text.partition(" ")
                    yield ("command", text) if text.startswith("`python") else (first, rest)
            elif name == "machine" and "load average" in str(value):
                yield "load", value
            else:
                yield from _facts_in(value)


PAGE = Path(__file__).parent / "RESULTS.md"
HEAD = (
    "# Results that have a record\n\n"
    + paragraph("""`python -m benchmarks.results` writes this page from those [records](records) that
    `make bench ARGS="NAME --json FILE"` and `make gpu` have written: each table is what one run found, the median of
    its repeats, then their range. Records that other commands have written are named where
    [FINDINGS.md](FINDINGS.md) has their numbers. Pairs run in the order A B B A where a record has a command; the
    older ones ran A B A B. A benchmark that was run twice has a record of each: the load stands in its heading.""")
    + "\n\n"
    + paragraph("""*Runs* is how many numbers a median is of: runs, or pairs of runs; in benchmarks of prompts tasks;
    1 where a line is one number that was made of medians. *Met* is by the median, whatever the range.""")
    + "\n"
)


def write() -> str:
    lacking = [row(what, ", ".join(map(_link, names))) for what, names in records_with_gaps(RECORDS).items()]
    said = "What records lack; all others have a command, a commit and a load:"
    parts = [HEAD, said, "", *head("lacking", "records"), *lacking, ""]
    for path in sorted(RECORDS.glob("*.json")):
        found = msgspec.json.decode(path.read_bytes())
        if isinstance(found, dict) and "tables" in found and "facts" in found:
            parts.append(_record(path.name, found))
        elif isinstance(found, dict) and "rehearsal" in found:
            title, *lines = render(found).splitlines()
            parts += [f"#{title}, record {_link(path.name)}", *map(_one_heading_lower, lines), ""]
    return "\n".join(parts)


def _link(name: str) -> str:
    return f"[{name}](records/{name})"


def _record(name: str, found: dict[str, Any]) -> str:
    facts = found["facts"]
    said = msgspec.convert(facts, Facts).line() if isinstance(facts, dict) else ", ".join(facts)
    tables = msgspec.convert(found["tables"], list[Table])
    lines = [_one_heading_lower(line) for table in tables for line in show(table)]
    heading = f"## {', '.join(table.name for table in tables)}: load {_load(facts)}"
    return "\n".join([heading, "", paragraph(f"Record {_link(name)}: {said}."), "", *lines])


def _one_heading_lower(line: str) -> str:
    return f"#{line}" if line.startswith("## ") else line


def _load(facts: dict[str, Any] | list[str]) -> str:
    if isinstance(facts, dict):
        return f"{msgspec.convert(facts, Facts).load[0]}"
    return next((one.removeprefix("load before ") for one in facts if one.startswith("load before ")), "unknown")


if __name__ == "__main__":
    PAGE.write_text(write())
    sys.stdout.write(f"{PAGE}\n")
