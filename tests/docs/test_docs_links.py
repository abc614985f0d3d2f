from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from docs.pages import ROOT, anchors, links, text_of

SKIPPED = {"runs", "runinfo", "node_modules", "build"}
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part in SKIPPED or part.startswith(".") for part in path.relative_to(ROOT).parts)
)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_have_a_target(path: Path) -> None:
    for target in links(path.read_text()):
        if re.match(r"(https?|mailto):", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{path.relative_to(ROOT)} links to {target}"
        assert there.is_relative_to(ROOT), f"{path.relative_to(ROOT)} links out of the repository: {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there.read_text()), f"{path.relative_to(ROOT)} links to {target}"


def test_every_page_is_linked_from_the_index_and_the_readme() -> None:
    """A link to a folder counts for all its pages."""
    pages = {path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")}
    for start in ("README.md", "docs/README.md"):
        reached: set[Path] = set()
        ahead = [ROOT / start]
        while ahead:
            path = ahead.pop()
            if path in reached:
                continue
            reached.add(path)
            targets = [target.partition("#")[0] for target in links(path.read_text())]
            there = [(path.parent / target).resolve() for target in targets if target and "://" not in target]
            ahead += [each for each in there if each.suffix == ".md"]
            ahead += [page for each in there if each.is_dir() for page in each.glob("*.md")]
        assert pages <= reached, f"no link from {start} leads to {sorted(pages - reached)}"


def test_api_page_names_every_public_name() -> None:
    directives = set(re.findall(r"^::: (\S+)$", text_of("docs/api.md"), re.MULTILINE))
    names = {f"stoker.{name}" for name in importlib.import_module("stoker").__all__ if name != "__version__"}
    assert directives == names | {f"stoker.{module}" for module in ("tuning", "sessions", "console", "planning")}


def test_navigation_of_the_site_names_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))


def test_architecture_names_exactly_the_existing_packages() -> None:
    packages_table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Packages\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", packages_table, re.MULTILINE)
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


def _files_named(text: str) -> list[str]:
    folder, files = "", []
    for name, colon in re.findall(r"`([\w/]+(?:/|\.py))`(:?)", text):
        if name.endswith("/"):
            folder = name if colon else folder
        else:
            files.append(name if "/" in name else folder + name)
    return files


# The maximum number of files that a newcomer should read for each topic.
WALKS = {
    "From `stoker.map` to the library and back": 17,
    "From a new pilot to its first hot context": 23,
    "From a tuning job to its placement": 13,
}


@pytest.mark.parametrize("title", WALKS)
def test_reading_path_for_newcomers_is_short(title: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    walk = text.partition(f"### {title}\n")[2].partition("\n#")[0]
    steps = [_files_named(step) for step in re.findall(r"^\d+\. .*$", walk, re.MULTILINE)]
    files = [file for step in steps for file in step]
    assert len(steps) >= 4
    assert all(steps), f"a step of {title!r} names no file"
    assert not [file for file in files if not (ROOT / file).is_file()]
    assert len(set(files)) == len(files), "a walk names each file once"
    assert len(files) <= WALKS[title], f"{title}: {len(files)} files"


def test_files_in_the_where_is_it_table_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("## Where is it?\n")[2].partition("\n#")[0]
    rows = [row for row in text.splitlines() if row.startswith("| ")][1:]
    assert len(rows) == 8
    for row in rows:
        files = [name for name in re.findall(r"`([\w/]+\.py)`", row) if "/" in name]
        assert files, row
        assert not [file for file in files if not (ROOT / file).is_file()], row


def test_decisions_are_numbered_and_half_a_page_long() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [int(path.name[:3]) for path in decisions]
    assert len(numbers) == len(set(numbers)) >= 3
    for path in decisions:
        text = path.read_text()
        assert re.match(rf"# (Decision )?0*{int(path.name[:3])}\b", text), path.name
        assert len(text.split()) <= 500, f"{path.name} is longer than half a page"
