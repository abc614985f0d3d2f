"""Check in the source code that each decision is in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

import stoker.manager.core
import stoker.manager.policies

CORE, POLICIES = (Path(str(package.__file__)).parent for package in (stoker.manager.core, stoker.manager.policies))


class Decision(msgspec.Struct, frozen=True):
    """A decision and its file. `fields`: read state. `others`: other files that read the fields, with reasons.
    `namesakes`: owners of unrelated fields.
    """

    place: str
    fields: frozenset[str]
    others: dict[str, str]
    namesakes: frozenset[str] = frozenset()


WALLTIME = Decision(
    "core/deadlines.py",
    frozenset({"ends_at", "longest_walltime_left_s"}),
    {
        "core/pilots.py": "it remembers the most that a pilot has ever had left",
        "core/report.py": "it shows what is left",
    },
    frozenset({"action", "before", "fate", "forecast", "said"}),  # forecasts of the ends of calls
)
FAILED_LOADS = Decision(
    "policies/where_to_load.py",
    frozenset({"failed_loads_by_pilot", "load_failures"}),
    {"core/libraries.py": "it counts failed loads, and says when a context is given up"},
)


def reads(tree: ast.AST, decision: Decision) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=attr, ctx=ast.Load()) if attr in decision.fields:
                name = ast.unparse(owner)
                if name.rpartition(".")[2] not in decision.namesakes:
                    yield f"{name}.{attr}", node.lineno


@cache
def trees() -> dict[str, ast.AST]:
    files = [path for package in (CORE, POLICIES) for path in sorted(package.rglob("*.py"))]
    return {path.relative_to(CORE.parent).as_posix(): ast.parse(path.read_text()) for path in files}


def readers(decision: Decision) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, tree in trees().items():
        for what, line in reads(tree, decision):
            found.setdefault(name, []).append(f"{name}:{line} {what}")
    return found


@pytest.mark.parametrize("decision", [WALLTIME, FAILED_LOADS], ids=lambda decision: decision.place)
def test_each_decision_is_made_in_one_file(decision: Decision) -> None:
    found = readers(decision)
    assert {decision.place, *decision.others} <= set(found), "a file that reads none of it any more stands in the table"
    more = [where for name in found.keys() - {decision.place, *decision.others} for where in found[name]]
    assert not more, f"ask {decision.place}, or give a reason in the table"


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("left = pilot.ends_at - now", ["pilot.ends_at"]),
        ("longest = max(each.longest_walltime_left_s for each in pilots)", ["each.longest_walltime_left_s"]),
        ("fits = library.pilot.ends_at > then", ["library.pilot.ends_at"]),
        ("pilot.ends_at = 0.0", []),
        ("late = fate.ends_at > due_at or self.said.ends_at > due_at", []),
    ],
)
def test_attribute_reads_are_detected_in_every_syntax(source: str, seen: list[str]) -> None:
    assert [what for what, _ in reads(ast.parse(source), WALLTIME)] == seen
