"""Instructions that ship, which a new bank begins with, and one made from a task's own targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SHIPPED_PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"

_MOST_WORDS = 8
_LONGEST_WORD = 40


def instruction(targets: Sequence[str]) -> str:
    """What to say to a model that is to write such targets: their few words, if they are few, else nothing special."""
    words = list(dict.fromkeys(target.strip() for target in targets))
    if len(words) <= _MOST_WORDS and all(len(word) <= _LONGEST_WORD for word in words):
        return f"Answer with one of these: {', '.join(sorted(words))}."
    return "Read the text and write the answer that it asks for."
