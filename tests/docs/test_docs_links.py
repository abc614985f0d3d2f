"""Links in the documentation lead somewhere, and what it says of the layout is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = {".git", ".venv", "runs", "runinfo", "node_modules", "build"}
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not SKIPPED & set(path.relative_to(ROOT).parts) and ".pytest_cache" not in path.parts
)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"(https?|mailto):|#", target):
            continue
        there = (path.parent / target.partition("#")[0]).resolve()
        assert there.exists(), f"{path.relative_to(ROOT)} links to {target}"
        assert there.is_relative_to(ROOT), f"{path.relative_to(ROOT)} links out of the repository: {target}"


def test_the_documents_that_everybody_looks_for_are_there() -> None:
    names = {str(path.relative_to(ROOT)) for path in DOCUMENTS}
    assert names >= {"README.md", "ARCHITECTURE.md", "CHANGELOG.md"}


def test_architecture_names_every_package_and_none_that_is_not_there() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(?:stoker\.)?([a-z_.]+)`", row)}
    last = {name.rpartition(".")[2] for name in named}
    for folder in ("manager", "pilot"):
        packages = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
        assert packages <= last, f"ARCHITECTURE.md does not name {packages - last} of {folder}/"
    for name in named:
        short = name.replace(".", "/")
        places = [
            ROOT / short,
            ROOT / "src/stoker" / short,
            ROOT / "src/stoker" / f"{short}.py",
            ROOT / "pilot" / short,
        ]
        assert any(place.exists() for place in places), f"ARCHITECTURE.md names {name}, which is not there"


def test_architecture_is_one_page() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 90


def test_decisions_are_numbered_and_half_a_page() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [int(path.name[:3]) for path in decisions]
    assert len(numbers) == len(set(numbers)) >= 3
    for path in decisions:
        text = path.read_text()
        assert re.match(rf"# (Decision )?0*{int(path.name[:3])}\b", text), path.name
        assert len(text.split()) <= 500, f"{path.name} is longer than half a page"


def test_import_contracts_name_modules_that_exist() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in settings["tool"]["importlinter"]["contracts"]:
        names = [name for layer in contract.get("layers", []) for name in layer.split(" | ")]
        names += contract.get("source_modules", [])
        for name in names:
            path = ROOT / "src" / name.replace(".", "/")
            assert path.exists() or path.with_suffix(".py").exists(), f"{contract['name']}: {name} is not there"
