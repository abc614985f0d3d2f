"""Shipped policies and baselines are built from parts: none touches what another one keeps to itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.baselines.loading import ROOT
from stoker.manager import policies

FILES = sorted([*Path(policies.__file__).parent.rglob("*.py"), *(ROOT / "benchmarks" / "baselines").glob("*.py")])


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def trespasses(text: str) -> Iterator[str]:
    """Private names of other classes that a module uses: of its own base classes, or of any object but self."""
    tree = ast.parse(text)
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        nodes = list(ast.walk(kind))
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        used = [node for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)]
        own |= {node.attr for node in used if isinstance(node.ctx, ast.Store)}
        for node in used:
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not of_self or node.attr not in own:
                yield f"{kind.name}: {ast.unparse(node)}"
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        yield from (
            f"{function.name}: {ast.unparse(node)}"
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and is_private(node.attr)
        )


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_no_policy_uses_what_is_private_to_another(file: Path) -> None:
    assert list(trespasses(file.read_text())) == []


@pytest.mark.parametrize(
    "body", ["return self._base()", "return other._x", "return super()._base()"], ids=["inherited", "other", "super"]
)
def test_a_trespass_is_found(body: str) -> None:
    assert list(trespasses(f"class Mine(Base):\n    def ask(self, other):\n        {body}\n"))
