"""What the records in `benchmarks/records` do not say of themselves: command, commit, load, or what was changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

_UNKNOWN = ("unknown", "not known")
_NAMES = {"command": ("command",), "commit": ("commit", "commits", "here"), "load": ("load", "load_before")}
"""What each is called in records. `here`: the commit, of records that compare this checkout with another."""


def lacks(record: Any) -> list[str]:
    """What is missing in a record, in words; empty if it has a command, a commit without changes, and a load."""
    said = [(name, value) for name, value in _said(record) if not any(word in str(value) for word in _UNKNOWN)]
    found = [f"no {what}" for what, names in _NAMES.items() if not any(name in names for name, _ in said)]
    commits = [str(value) for name, value in said if name in _NAMES["commit"]]
    if any("-dirty" in commit for commit in commits):
        found.append("measured with changes that are in no commit")
    if any(commit.startswith("after ") for commit in commits):
        found.append("only the commit before it is known")
    return found


def listed(folder: Path) -> dict[str, list[str]]:
    """The names of records that lack something, by what they lack."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.json")):
        if missing := lacks(msgspec.json.decode(path.read_bytes())):
            found.setdefault(", ".join(missing), []).append(path.name)
    return found


def _said(record: Any) -> Iterator[tuple[str, Any]]:
    """Every name and value of a record and its parts. A fact that is a sentence is named by its first word."""
    if isinstance(record, list):
        for each in record:
            yield from _said(each)
    elif isinstance(record, Mapping):
        for name, value in record.items():
            yield name, value
            if name == "facts" and isinstance(value, list):
                yield from (_of_sentence(each) for each in value)
            elif name == "machine" and "load average" in str(value):
                yield "load", value
            else:
                yield from _said(value)


def _of_sentence(text: str) -> tuple[str, str]:
    first, _, rest = text.partition(" ")
    return ("command", text) if text.startswith("`python") else (first, rest)
