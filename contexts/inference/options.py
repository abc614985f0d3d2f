"""Additional request options, named as in vLLM, and their valid values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from stoker.config_errors import suggest_similar_name

STRUCTURES = ("json_schema", "regex", "choice", "grammar")
"""Options for the form of a text. A request has at most one of them."""


class OptionRefused(ValueError):
    """An engine does not support an option of a request."""

    def __init__(self, option: str, why: str) -> None:
        super().__init__(why)
        self.option = option

    def __reduce__(self) -> tuple[Any, ...]:
        return OptionRefused, (self.option, str(self))


_Text = Annotated[str, Meta(min_length=1)]
_Token = Annotated[int, Meta(ge=0)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]

ENGINE_OPTIONS: dict[str, tuple[Any, str]] = {
    "regex": (_Text, "a regular expression"),
    "choice": (Annotated[list[_Text], Meta(min_length=1)], "a list of non-empty texts"),
    "grammar": (_Text, "a grammar as text"),
    "top_k": (Annotated[int, Meta(ge=-1)], "a whole number, -1 or more"),
    "min_p": (Annotated[float, Meta(ge=0, le=1)], "a number from 0 to 1"),
    "repetition_penalty": (Annotated[float, Meta(ge=1e-3, le=1e3)], "a number above 0"),
    "frequency_penalty": (_Penalty, "a number from -2 to 2"),
    "presence_penalty": (_Penalty, "a number from -2 to 2"),
    "logit_bias": (dict[_Token, Annotated[float, Meta(ge=-1e4, le=1e4)]], "a dictionary of token ids with numbers"),
    "min_tokens": (_Token, "a whole number, 0 or more"),
    "ignore_eos": (bool, "True or False"),
    "stop_token_ids": (list[_Token], "a list of token ids"),
}
"""By option name: the type of the value, and a description of valid values."""


def check_options(options: Sequence[tuple[str, Any]], *, json_schema: str = "") -> None:
    """Raise OptionRefused for an unknown name, an invalid value, or two options for the form of a text."""
    for name, value in options:
        if name not in ENGINE_OPTIONS:
            raise OptionRefused(
                name, f"{name} is not an option of an engine; {suggest_similar_name(name, ENGINE_OPTIONS)}"
            )
        kind, shape = ENGINE_OPTIONS[name]
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise OptionRefused(name, f"{name} must be {shape}, not {value!r}") from None
    forms = ["json_schema"] * bool(json_schema) + [name for name in dict(options) if name in STRUCTURES]
    if len(forms) > 1:
        raise OptionRefused(forms[1], f"a text can follow only one of {' and '.join(forms)}; give one of them")
