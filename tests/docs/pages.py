"""Parse documentation pages: fenced blocks, commands, headings, links."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
"""User pages. Decisions and the pages of `make reproduce` contain no commands."""
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_PROGRAMS = ("make", "stoker", "cd", "python", "pip", "hf")


@dataclass(frozen=True)
class Block:
    """A fenced block. `number`: index among blocks of one language on the page."""

    page: str
    language: str
    text: str
    number: int


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    counted: dict[str, int] = {}
    found = []
    for _, language, text in _FENCE.findall(text_of(page)):
        found.append(Block(page, language, text, counted.get(language, 0)))
        counted[language] = counted.get(language, 0) + 1
    return found


def programs(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def commands(page: str) -> list[str]:
    """Return the commands in fenced blocks without comments. Commands are lines after `$ `, or all lines of a block
    that starts with a program.
    """
    found = []
    for block in blocks(page):
        if block.language not in ("", "sh", "bash", "console"):
            continue
        lines = block.text.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            found += [line[2:] for line in lines if line.startswith("$ ")]
        elif lines and lines[0].split(" ")[0] in _PROGRAMS:
            found += lines
    return [" ".join(line.partition("  #")[0].partition(" # ")[0].split()) for line in found if line.strip()]


def words(command: str) -> list[str]:
    return shlex.split(command)


def without_fences(text: str) -> str:
    return _FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub and GitLab make them."""
    headings = re.findall(r"^#+ +(.*)$", without_fences(text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", without_fences(text))
