"""The longest input, pooling and normalization of an encoder, read from the files of its folder.

It imports no GPU library, so a login node can check a recipe.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

# ---- sentence facts


POOLINGS = ("mean", "cls", "last")
_NAMES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
}
_MODULES = ("Transformer", "Pooling", "Normalize")
"""The modules that are supported here."""

Read = Callable[[str], str | None]
"""The text of a model's file by its name; None if the model has no such file."""


class SentenceFacts(msgspec.Struct, frozen=True):
    """`pooling` is one of POOLINGS, `longest` the most tokens of a text (0 = it does not say). `trouble`: why the
    model's own pooling cannot be done here; empty if it can."""

    pooling: str = "mean"
    longest: int = 0
    trouble: str = ""


def sentence_facts(read: Read) -> SentenceFacts:
    """Return the facts of a model whose files `read` reads. A model without such files pools by the mean."""
    modules = _object(read("modules.json"), list)
    types = [str(each.get("type", "")).rpartition(".")[2] for each in modules or () if isinstance(each, dict)]
    other = [name for name in types if name not in _MODULES]
    trouble = f"its modules.json lists {', '.join(other)}, which is not computed here" if other else ""
    folder = "1_Pooling"
    for each, name in zip(modules or (), types, strict=False):
        if name == "Pooling":
            folder = str(each.get("path") or folder)
    pooling, more = _pooling(_object(read(f"{folder}/config.json"), dict))
    longest = (_object(read("sentence_bert_config.json"), dict) or {}).get("max_seq_length")
    return SentenceFacts(pooling, longest if type(longest) is int and longest > 0 else 0, trouble or more)


def _pooling(config: dict[str, Any] | None) -> tuple[str, str]:
    """Return the pooling that the settings name, and the settings that are not supported here."""
    if config is None:
        return "mean", ""
    asked = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    named = config.get("pooling_mode")
    asked = asked or ([named] if isinstance(named, str) else list(named or ()))
    known = [_NAMES[name] for name in asked if name in _NAMES]
    if len(asked) == len(known) == 1:
        return known[0], ""
    return (
        "mean",
        f"its pooling is {' and '.join(map(str, asked)) or 'not named'}, and not one of {', '.join(POOLINGS)}",
    )


def _object(text: str | None, kind: type[Any]) -> Any:
    """Parse JSON of this kind; None for a file that is missing or damaged."""
    try:
        found = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, kind) else None


# ---- encoder facts


SHORTEST_RUNTIME = 3
"""Tokens of a runtime at the least: the two that most tokenizers put around a text, and one of the text."""
_NO_LIMIT = 1_000_000
"""A tokenizer that names a longer text than this has no limit."""
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert"})
"""Models whose positions begin behind that of the padding token."""


def longest_text(*, model_type: str, positions: int, padding: int, tokenizer: int, sentences: int) -> int:
    """Return the most tokens of a text; 0 = unlimited. `positions`: of the model, 0 = unknown. `padding`: the id of its
    padding token. `tokenizer`: the tokenizer's longest text. `sentences`: the limit of a sentence-transformers folder,
    0 = none."""
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
    config = _json_file(folder, "config.json")
    text = config.get("text_config")
    within = text if isinstance(text, dict) else {}
    return _whole(config.get("max_position_embeddings")) or _whole(within.get("max_position_embeddings"))


def longest_of_folder(folder: str) -> int:
    """Return `longest_text` of the model in a folder, as far as its files state it; 0 for a name on the model hub."""
    config, tokenizer = _json_file(folder, "config.json"), _json_file(folder, "tokenizer_config.json")
    return longest_text(
        model_type=str(config.get("model_type", "")),
        positions=_whole(config.get("max_position_embeddings")),
        padding=_whole(config.get("pad_token_id")),
        tokenizer=_whole(tokenizer.get("model_max_length")),
        sentences=sentence_facts(lambda name: _text(folder, name)).longest,
    )


def _whole(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _json_file(folder: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] | None = _object(_text(folder, name), dict)
    return found or {}


def _text(folder: str, name: str) -> str | None:
    try:
        return Path(folder, name).read_text()
    except (OSError, UnicodeDecodeError):
        return None
