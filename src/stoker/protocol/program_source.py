"""What a program leaves of its sources in the session's folder, for the advisor: a file for each function and loader.

The text of a source file lies beside it once, by its digest. The manager reads neither: it names functions and recipes
by their keys, and the advisor, which runs on the same machine, looks them up.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

LONGEST_TEXT = 1_000_000
"""A source file of more characters is not left."""

Plain = str | int | float | bool | None


class ProgramSource(msgspec.Struct, frozen=True):
    """The source around a function or a loader: `function` is its dotted name in the text, `file` where the text came
    from (empty: a notebook, a prompt), `folder` the program's own folder, below which its modules may be read. Of a
    loader, `arguments` are those that are plain values, by parameter."""

    text: str
    function: str
    file: str = ""
    folder: str = ""
    arguments: dict[str, Plain] = {}


def source_file(sources: Path, key: str) -> Path:
    """Where the source of a function or a recipe of this key is. `sources`: the session's folder for them."""
    return sources / f"{key}.json"


def text_file(sources: Path, digest: str) -> Path:
    """Where the text of this digest is."""
    return sources / f"{digest}.text"


def read_source(sources: Path, key: str) -> tuple[ProgramSource, str] | None:
    """A source and its text; None where there is none, or it cannot be read."""
    try:
        source = msgspec.json.decode(source_file(sources, key).read_bytes(), type=ProgramSource)
        return source, text_file(sources, source.text).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
