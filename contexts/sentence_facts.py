"""What a folder of a sentence-transformers model says beyond Transformers: its pooling, and how long texts may be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

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
"""What is done here with a text, too: nothing else may stand in the model's list of modules."""

Read = Callable[[str], str | None]
"""The text of a model's file by its name; None if the model has no such file."""


class SentenceFacts(msgspec.Struct, frozen=True):
    """`pooling` is one of POOLINGS, `longest` the most tokens of a text (0 = it does not say). `trouble`: why the
    model's
    own pooling cannot be done here; empty if it can."""

    pooling: str = "mean"
    longest: int = 0
    trouble: str = ""


def sentence_facts(read: Read) -> SentenceFacts:
    """The facts of a model whose files `read` reads. One without such files pools by the mean."""
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
    """What a pooling's settings ask for, and what of that is not computed here."""
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
    """What JSON says, if it is of this kind; None for a file that is missing or damaged."""
    try:
        found = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, kind) else None
