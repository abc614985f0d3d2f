"""How long the texts of an encoder may be: what its config, its tokenizer and its folder say of it. Pure but for the
files of a folder; it needs no GPU library, so that a login node can check a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.contexts.sentence_facts import sentence_facts

SHORTEST_RUNTIME = 3
"""Tokens of a runtime at the least: the two that most tokenizers put around a text, and one of the text."""
_NO_LIMIT = 1_000_000
"""A tokenizer that names a longer text than this has no limit."""
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert"})
"""Models whose positions begin behind that of the padding token."""


def longest_text(*, model_type: str, positions: int, padding: int, tokenizer: int, sentences: int) -> int:
    """The most tokens of a text; 0 = any number.

    `positions`: of the model, 0 = it does not say. `padding`: the id of its padding token. `tokenizer`: what the
    tokenizer names as the longest text. `sentences`: what a sentence-transformers folder does, 0 = nothing.
    """
    if positions and model_type in _OFFSET_POSITIONS:
        positions -= padding + 1
    limits = (sentences, positions, tokenizer if tokenizer < _NO_LIMIT else 0)
    return min((limit for limit in limits if limit > 0), default=0)


def longest_input(path: str, *, writes: bool = False) -> int:
    """The most tokens that the model at a path reads, as its files say: an encoder's, or with `writes` a language
    model's, in a folder or in a checkpoint's folder. 0 if they do not say it, and for a GGUF file or a hub name."""
    there = Path(path)
    folder = str(there if there.is_dir() else there.parent)
    if there.suffix == ".gguf" or not there.exists():
        return 0
    if not writes:
        return longest_of_folder(folder)
    config = _object(folder, "config.json")
    text = config.get("text_config")
    within = text if isinstance(text, dict) else {}
    return _whole(config.get("max_position_embeddings")) or _whole(within.get("max_position_embeddings"))


def longest_of_folder(folder: str) -> int:
    """`longest_text` of the model in a folder, as far as its files say it; 0 for a name on the model hub."""
    config, tokenizer = _object(folder, "config.json"), _object(folder, "tokenizer_config.json")
    return longest_text(
        model_type=str(config.get("model_type", "")),
        positions=_whole(config.get("max_position_embeddings")),
        padding=_whole(config.get("pad_token_id")),
        tokenizer=_whole(tokenizer.get("model_max_length")),
        sentences=sentence_facts(lambda name: _text(folder, name)).longest,
    )


def _whole(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _object(folder: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(_text(folder, name) or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(folder: str, name: str) -> str | None:
    try:
        return Path(folder, name).read_text()
    except (OSError, UnicodeDecodeError):
        return None
