"""Check which source files write the state of the pilot core, and which file reads the manager's orders."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import get_args

from source_writes import written

from stoker.protocol.to_pilot import ToPilot

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "pilot" / "core"

WRITERS: dict[str, dict[str, str]] = {
    "library": {
        "arguments": "running",
        "has_limits": "running",
        "held_calls": "running",
        "orders_waiting_for_arguments": "running",
        "served": "running",
        "piece_windows": "running",
        "postponed_orders": "running",
        "is_killed": "lifecycle",
        "stage": "lifecycle",
        "has_process": "memory",
        "unconfirmed_sizes": "memory",
        "asleep_bytes": "sleeping",
        "awake_bytes": "sleeping",
        "wake_bytes": "sleeping",
        "has_pins": "starting",
        "paths": "starting",
    },
    "state": {
        "claims": "memory",
        "ends_at": "presence",
        "exit_code": "lifecycle",
        "ended_libraries": "lifecycle",
        "leaving": "lifecycle",
        "libraries": "lifecycle starting",
        "loss": "lifecycle",
        "reported_objects": "objects presence reactor",
        "wants": "objects",
    },
}
"""The fields of calls, memory, objects and exit, with the files that write each field."""

LEDGER = {"reserve": "memory", "release": "memory", "resize": "limits memory sleeping"}
"""Methods that change reserved device memory, with the files that call them."""


def writers(noun: str) -> dict[str, str]:
    """Return the files that write each listed field of `library` or `state`."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in CORE.glob("*.py"):
        for field, owner, _ in written(ast.parse(path.read_text())):
            if owner.rpartition(".")[2] == noun and field in WRITERS[noun]:
                found[field].add(path.stem)
    return {field: " ".join(sorted(files)) for field, files in found.items()}


def test_each_field_is_written_only_in_the_listed_files() -> None:
    assert {noun: writers(noun) for noun in WRITERS} == WRITERS


def test_device_memory_ledger_is_changed_only_by_listed_files() -> None:
    called = defaultdict(set)
    for path in CORE.glob("*.py"):
        for method in re.findall(r"ledger\.([a-z_]+)\(", path.read_text()):
            if path.stem != "state" and method in LEDGER:
                called[method].add(path.stem)
    assert {method: " ".join(sorted(files)) for method, files in called.items()} == LEDGER


def kinds_asked_for(tree: ast.AST) -> set[str]:
    """Return the names in class patterns and `isinstance` calls."""
    asked: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.MatchClass):
            asked.append(node.cls)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            asked += ast.walk(node.args[1])
    names = {one.attr for one in asked if isinstance(one, ast.Attribute)}
    return names | {one.id for one in asked if isinstance(one, ast.Name)}


def test_only_one_file_checks_the_type_of_manager_orders() -> None:
    orders = {kind.__name__ for kind in get_args(ToPilot)}
    files = [path for place in ("pilot", "manager/sim") for path in (ROOT / place).rglob("*.py")]
    found = {path: asked for path in files if (asked := kinds_asked_for(ast.parse(path.read_text())) & orders)}
    assert found.pop(CORE / "reactor.py") == orders, "that file handles every order"
    assert found == {}, "these files also check the kind of order"
