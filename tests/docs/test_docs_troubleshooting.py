from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest
from docs.pages import ROOT, text_of

from stoker.config import parse_site
from stoker.errors import ConfigError
from stoker.site import Environment, Pilot, Policy, Provider, Session

TEXT = text_of("docs/troubleshooting.md")
FOLDERS = ("apps", "contexts", "manager", "pilot", "src/stoker", "src/stoker/protocol")
LEAST = 10
"""Minimum characters of a message without variable parts."""


def quoted() -> list[str]:
    found: list[str] = []
    for table in re.findall(r"^\| you read \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE):
        for row in table.splitlines():
            found += re.findall(r"`([^`]+)`", row.split(" | ")[0])
    return found


@functools.cache
def said() -> list[str]:
    """Return every string of the code, with `…` for variable parts."""
    found: list[str] = []
    for folder in FOLDERS:
        files = (ROOT / folder).glob("*.py") if folder == "src/stoker" else (ROOT / folder).rglob("*.py")
        for file in files:
            found += _texts(ast.parse(file.read_text()))
    return found


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    yield from _texts(part)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a program never prints its docstrings
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(\.\d+)?[sdf]", "…", node.value)
        else:
            yield from _texts(node)


def test_page_quotes_at_least_fifty_messages() -> None:
    assert len(quoted()) >= 50


@pytest.mark.parametrize("message", quoted())
def test_message_on_the_page_exists_in_the_code(message: str) -> None:
    assert len(message.replace("…", "").strip()) >= LEAST, "too short to identify the message"
    parts = message.strip("…").split("…")
    pattern, longest = re.compile(".*".join(map(re.escape, parts)), re.DOTALL), max(parts, key=len)
    assert any(longest in text and pattern.search(text) for text in said()), message


def test_advised_settings_exist() -> None:
    tables = {"provider": Provider, "pilot": Pilot, "session": Session, "policy": Policy, "environment": Environment}
    advised = re.findall(r"`\[(\w+)\] (\w+)`", TEXT)
    assert len(advised) >= 10
    for table, setting in advised:
        assert setting in tables[table].__struct_encode_fields__, f"[{table}] {setting}"


def test_common_symptoms_have_sections() -> None:
    headings = " / ".join(re.findall(r"^## (.*)$", TEXT, re.MULTILINE)).lower()
    for symptom in ("pilot is pending", "nothing runs", "a call waits", "device memory", "session is gone"):
        assert symptom in headings


def test_site_file_message_on_the_page_equals_the_real_message() -> None:
    (shown,) = re.findall(r"`(site\.toml: line 4: .*?)`", text_of("docs/clusters.md"))
    with pytest.raises(ConfigError) as caught:
        parse_site('name = "lab"\n\n[pilot]\ndevice = "gpu"\n', file="site.toml")
    assert str(caught.value) == shown
