from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import msgspec
import pytest

import stoker
from stoker.contexts.recipe import ContextOptions
from stoker.manager.executor.apps import OPTIONS
from stoker.manager.executor.executor import StokerExecutor
from stoker.manager.executor.options import KEYS
from stoker.site import Advice, Environment, Pilot, Policy, Provider, Session, Site

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "options.md").read_text()
ROW = re.compile(r"^\| `([a-z_]+)` \| .* \| `(tests/[\w/]+\.py)::(test_\w+)` \|$", re.MULTILINE)


def parameters(function: object) -> set[str]:
    return {name for name in inspect.signature(function).parameters if name != "self"}  # type: ignore[arg-type]


def settings(struct: type[msgspec.Struct]) -> set[str]:
    fields = msgspec.structs.fields(struct)
    return {field.encode_name for field in fields if not isinstance(field.type, type) or not _is_table(field.type)}


def _is_table(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct)


REAL = {
    "@app": set(OPTIONS),
    "Resource specification": set(KEYS),
    "@context": parameters(ContextOptions.__init__),
    "stoker.map": parameters(stoker.map),
    "stoker.stream": parameters(stoker.stream),
    "stoker.amap": parameters(stoker.amap),
    "stoker.load": parameters(stoker.load),
    "StokerExecutor": parameters(StokerExecutor.__init__),
    "Site file": settings(Site),
    "Site file: [provider]": settings(Provider),
    "Site file: [pilot]": settings(Pilot),
    "Site file: [session]": settings(Session),
    "Site file: [policy]": settings(Policy),
    "Site file: [environment]": settings(Environment),
    "Site file: [advice]": settings(Advice),
}


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/options.md has no section {title}"
    return found[1]


@pytest.mark.parametrize("title", REAL)
def test_table_has_exactly_all_options(title: str) -> None:
    rows = [name for name, _, _ in ROW.findall(section(title))]
    assert len(rows) == len(set(rows))
    assert set(rows) == REAL[title]


def test_every_section_of_the_options_page_is_checked() -> None:
    assert set(re.findall(r"^## (.*)$", PAGE, re.MULTILINE)) == set(REAL)


@pytest.mark.parametrize("file", sorted({file for _, file, _ in ROW.findall(PAGE)}))
def test_tests_named_on_the_page_exist(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    named = {test for _, of, test in ROW.findall(PAGE) if of == file}
    assert named <= there, f"{file} has no {', '.join(sorted(named - there))}"
