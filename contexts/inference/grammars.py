"""Grammars of requests, compiled by llguidance for one tokenizer: JSON schemas, regular expressions, lists of texts.

The thread of the call compiles the grammar and computes the first tokens. Thus the engine's thread does not wait, and a
grammar without any valid text is refused early. llguidance stops a compilation or a step at a work limit.
"""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

from stoker.contexts.inference.adapter import Sampling
from stoker.contexts.inference.options import OptionRefused

_MOST_COMPILED = 128
_MOST_CHARACTERS = 500_000
_SHOWN_CHARACTERS = 300
_LIMITS: dict[str, Any] = {"verbose_errors": False}
"""Changes to llguidance's limits, which are about one second for a compilation and 20 ms for a token."""
_SPACES = r"[ \t]?|\r?\n[ \t]{0,40}"
"""White space between the parts of a JSON text, limited because small models repeat white space."""


class Grammars:
    """The compiled grammars that were used most recently. Thread-safe."""

    def __init__(self, tokenizer: Any, *, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._compiled = functools.lru_cache(_MOST_COMPILED)(self._compile)

    def matcher(self, sampling: Sampling) -> Any:
        """Return an `LLMatcher` at the start of the text, or None without a grammar. Raises OptionRefused."""
        if sampling.structure is None:
            return None
        option, value = sampling.structure
        form = value if isinstance(value, str) else json.dumps(list(value))
        return self._compiled(option, form).deep_copy()

    def _compile(self, option: str, form: str) -> Any:
        if len(form) > _MOST_CHARACTERS:
            why = f"the {_WORDS[option]} has {len(form):,} characters; at most {_MOST_CHARACTERS:,} are allowed"
            raise OptionRefused(option, why)
        try:
            reader = self._reader
        except ImportError as error:
            why = f"a {_WORDS[option]} needs the package llguidance ({error}); pip install 'stoker[models]'"
            raise OptionRefused(option, why) from error
        except Exception as error:
            why = f"llguidance cannot read this model's tokenizer, so its texts follow no {_WORDS[option]}"
            raise OptionRefused(option, f"{why}: {_shortened(error)}") from error
        import llguidance

        try:
            named: Any = option
            if option == "json_schema":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(form, defaults={"whitespace_pattern": _SPACES})
            else:
                grammar = llguidance.grammar_from(named, form)
            limits: Any = llguidance.LLParserLimits(**_LIMITS)
            matcher = llguidance.LLMatcher(reader, grammar, log_level=0, limits=limits)
            first = matcher.deep_copy()
            first.compute_bitmask()
            why = matcher.get_error() or first.get_error()
        except Exception as error:
            why = str(error)
        if why:
            what = "no text follows it" if why.startswith("NoExtension") else _shortened(why)
            raise OptionRefused(option, f"the {_WORDS[option]} cannot be compiled: {what}")
        return matcher

    @functools.cached_property
    def _reader(self) -> Any:
        from llguidance.hf import from_tokenizer

        if self._ends:
            return from_tokenizer(self._tokenizer, eos_token=sorted(self._ends))
        ending = copy.deepcopy(self._tokenizer)  # llguidance needs an end token, so add one that the model lacks
        ending.add_special_tokens({"eos_token": "<|stoker end|>"})
        return from_tokenizer(ending)


_WORDS = {"json_schema": "JSON schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def _shortened(why: object) -> str:
    text = " ".join(str(why).split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
