"""Prose of pages that code writes: numbers in it are computed, so lines are filled when the page is written."""

from __future__ import annotations

import textwrap

WIDTH = 119


def paragraph(text: str, *, bullet: bool = False) -> str:
    """The text in lines of the pages' width. `bullet`: as an item of a list."""
    before, after = ("- ", "  ") if bullet else ("", "")
    return textwrap.fill(
        " ".join(text.split()), WIDTH, initial_indent=before, subsequent_indent=after, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def head(*columns: str) -> list[str]:
    """The first two lines of a table."""
    return [row(*columns), f"|{'---|' * len(columns)}"]
