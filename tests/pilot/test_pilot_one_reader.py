from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

from stoker.protocol.to_pilot import ToPilot

ROOT = Path(__file__).resolve().parents[2]
ORDERS = {kind.__name__ for kind in get_args(ToPilot)}
PLACES = ("pilot", "manager/sim")
READER = "pilot/core/reactor.py"


def names_asked_for(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        asked: list[ast.expr] = []
        if isinstance(node, ast.MatchClass):
            asked = [node.cls]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            asked = list(ast.walk(node.args[1]))  # type: ignore[arg-type]
        found |= {one.attr if isinstance(one, ast.Attribute) else one.id for one in asked if _is_name(one)}
    return found


def _is_name(one: ast.AST) -> bool:
    return isinstance(one, ast.Attribute | ast.Name)


def readers() -> dict[str, set[str]]:
    found = {}
    for place in PLACES:
        for path in (ROOT / place).rglob("*.py"):
            asked = names_asked_for(ast.parse(path.read_text())) & ORDERS
            if asked:
                found[str(path.relative_to(ROOT))] = asked
    return found


def test_orders_are_matched_in_one_file() -> None:
    found = readers()
    assert found.pop(READER) == ORDERS, "that file handles every order"
    assert found == {}, "these files also check the kind of order"
