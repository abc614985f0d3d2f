"""Additional options of a request with vLLM's names, and the valid values."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

STRUCTURES = ("json_schema", "regex", "choice", "grammar")
"""Options for the form of a text. A request has at most one of them."""


class OptionRefused(ValueError):
    """An engine does not support an option of a request."""

    def __init__(self, option: str, why: str) -> None:
        super().__init__(why)
        self.option = option

    def __reduce__(self) -> tuple[Any, ...]:
        return OptionRefused, (self.option, str(self))


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_whole(token) and _is_number(bias, -1e4, 1e4) for token, bias in value.items()
    )


ENGINE_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "regex": (_is_text, "a regular expression"),
    "choice": (
        lambda value: isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_text, value)),
        "a list of texts, none empty",
    ),
    "grammar": (_is_text, "a grammar as text"),
    "top_k": (lambda value: _is_whole(value, -1), "a whole number, -1 or more"),
    "min_p": (lambda value: _is_number(value, 0, 1), "a number from 0 to 1"),
    "repetition_penalty": (lambda value: _is_number(value, 1e-3, 1e3), "a number above 0"),
    "frequency_penalty": (lambda value: _is_number(value, -2, 2), "a number from -2 to 2"),
    "presence_penalty": (lambda value: _is_number(value, -2, 2), "a number from -2 to 2"),
    "logit_bias": (_is_bias, "a dictionary of token ids with numbers"),
    "min_tokens": (_is_whole, "a whole number, 0 or more"),
    "ignore_eos": (lambda value: isinstance(value, bool), "True or False"),
    "stop_token_ids": (
        lambda value: isinstance(value, list | tuple) and all(map(_is_whole, value)), "a list of token ids",
    ),
}  # fmt: skip
"""By name: a check of the value, and the valid values in words."""


def check_options(options: Sequence[tuple[str, Any]], *, json_schema: str = "") -> None:
    """Raise OptionRefused for an unknown name, an invalid value, or two forms of one text."""
    for name, value in options:
        if name not in ENGINE_OPTIONS:
            near = difflib.get_close_matches(name, ENGINE_OPTIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ENGINE_OPTIONS)}"
            raise OptionRefused(name, f"{name} is not an option of an engine; {hint}")
        fits, shape = ENGINE_OPTIONS[name]
        if not fits(value):
            raise OptionRefused(name, f"{name} must be {shape}, not {value!r}")
    forms = ["json_schema"] * bool(json_schema) + [name for name in dict(options) if name in STRUCTURES]
    if len(forms) > 1:
        raise OptionRefused(forms[1], f"a text can follow one of {' and '.join(forms)}; give one of them")
