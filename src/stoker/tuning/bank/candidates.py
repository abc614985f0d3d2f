"""Read prompts for the bank from a file, or make one from a job's targets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NewType

import msgspec

from stoker.datafile import read_rows, text_field
from stoker.errors import ConfigError

Key = NewType("Key", str)
"""32 hex digits of the hash of a prompt."""


def hash_prompt(text: str) -> Key:
    """Return the key of a text without surrounding whitespace."""
    return Key(hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).hexdigest())


class Candidate(msgspec.Struct, frozen=True):
    """A prompt and its origin. A tuned prompt also has its task, and its quality on this task (`metric`, `value`)."""

    text: str
    source: str = ""
    name: str = ""
    licence: str = ""
    task: str = ""
    metric: str = ""
    value: float | None = None
    """Value of the metric on held-out data."""
    tuned_at: float | None = None
    """Time of the tuning in seconds since the epoch."""

    @property
    def key(self) -> Key:
        """Key of the prompt's text."""
        return hash_prompt(self.text)


def read_candidates(path: Path) -> list[Candidate]:
    """Return the prompts in a file, in order, without duplicates.

    Args:
        path: A `.jsonl`, `.jsonl.xz`, `.csv` or `.parquet` file with the field `text`, and optionally `source`, `name`,
            `licence`, `task`.

    Raises:
        ConfigError: A row has no text, or the file has no rows. Facts: file and line.
    """
    found: dict[Key, Candidate] = {}
    for row in read_rows(path):
        origin = {name: str(row.fields.get(name) or "") for name in ("source", "name", "licence", "task")}
        one = Candidate(text_field(row, "text", file=path).strip(), **origin)  # type: ignore[arg-type]
        found.setdefault(one.key, one)
    if not found:
        raise ConfigError(f"{path}: has no prompts", file=str(path))
    return list(found.values())


SHIPPED_PROMPTS = Path(__file__).parents[1] / "data" / "prompts.jsonl"

_MOST_WORDS = 8
_LONGEST_WORD = 40


def make_instruction(targets: Sequence[str]) -> str:
    """Return an instruction to generate texts like `targets`. It lists the targets if they are few and short."""
    words = list(dict.fromkeys(target.strip() for target in targets))
    if len(words) <= _MOST_WORDS and all(len(word) <= _LONGEST_WORD for word in words):
        return f"Answer with one of these: {', '.join(sorted(words))}."
    return "Read the text and write the answer that it asks for."
