"""Rules for the next token of a request, as in vLLM: biases, then penalties, the grammar, `min_p` and `top_k`.

All numbers are `float32` on the device of the logits. The thread of the call compiles the grammar, so that the engine's
thread does not wait. It also computes the first tokens, to refuse a grammar without any valid text early.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.contexts.inference.adapter import GenerationRequest, ModelTexts, Sampling
from stoker.contexts.inference.options import ENGINE_OPTIONS, STRUCTURES, OptionRefused

_FIRST_CAPACITY = 64


class TokenRules:
    def __init__(self, request: GenerationRequest, *, ends: Sequence[int], matcher: Any) -> None:
        sampling = request.sampling
        options = dict(sampling.engine_options)
        self.matcher = matcher
        self.failure: OptionRefused | None = None
        self.form = sampling.structure[0] if sampling.structure else ""
        draws = sampling.temperature > 0
        self.top_k = max(options.get("top_k", 0), 0) if draws else 0
        min_p = options.get("min_p", 0) if draws else 0
        self.margin = sampling.temperature * math.log(min_p) if min_p else -math.inf
        """Minimum logit relative to the highest logit, from `min_p`; -inf without `min_p`."""
        bias = options.get("logit_bias", {})
        self.biased = np.array(list(bias), dtype=np.int64)
        self.biases = np.array(list(bias.values()), dtype=np.float32)
        self.ends = np.array(ends, dtype=np.int64)
        self.left = int(options.get("min_tokens", 0))  # tokens to write before the text may end
        self.repetition = float(options.get("repetition_penalty", 1))
        self.frequency = float(options.get("frequency_penalty", 0))
        self.presence = float(options.get("presence_penalty", 0))
        self.seen: SeenTokens | None = None
        if self.repetition != 1 or self.frequency or self.presence:
            self.seen = SeenTokens(request.prompt if self.repetition != 1 else ())

    def record_token(self, token: int) -> bool:
        """Record a written token. Return True if the grammar allows no further token."""
        self.left = max(0, self.left - 1)
        if self.seen is not None:
            self.seen.add(token)
        if self.matcher is None:
            return False
        if not self.matcher.consume_token(token):
            self.set_failure()
        return bool(self.matcher.is_stopped())

    def set_failure(self) -> None:
        why = self.matcher.get_error() or "no token may follow"
        self.failure = OptionRefused(self.form, f"the text cannot be continued within its {self.form}: {why}")


class SeenTokens:
    """The distinct tokens of a prompt and of the generated text, with their counts in the generated text."""

    def __init__(self, prompt: Sequence[int]) -> None:
        known = list(dict.fromkeys(prompt))
        self._places = {token: place for place, token in enumerate(known)}
        self._tokens = np.zeros(len(known) + _FIRST_CAPACITY, dtype=np.int64)
        self._tokens[: len(known)] = known
        self._counts = np.zeros(len(self._tokens), dtype=np.float32)

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token
        self._counts[place] += 1

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._places)]


_RULE_OPTIONS = frozenset(ENGINE_OPTIONS) - {*STRUCTURES, "ignore_eos", "stop_token_ids"}


def build_token_rules(request: GenerationRequest, texts: ModelTexts) -> TokenRules | None:
    """Return the rules of a request; None without rules. Raises OptionRefused."""
    sampling = request.sampling
    if sampling.structure is None and not _RULE_OPTIONS.intersection(name for name, _ in sampling.engine_options):
        return None
    matcher = texts.grammars.create_matcher(sampling) if texts.grammars is not None else None
    if matcher is None and sampling.structure is not None:
        raise OptionRefused(sampling.structure[0], "this engine has no tokenizer, so it does not support grammars")
    ends = sorted(end for end in sampling.all_end_tokens(texts.ends) if not 0 < texts.vocabulary <= end)
    return TokenRules(request, ends=ends, matcher=matcher)


def apply_token_rules(rules: Sequence[TokenRules], logits: torch.Tensor) -> torch.Tensor:
    """Apply the rules of each row to `logits`, which may change. Return `float32`; -inf forbids a token."""
    logits = logits.float()
    _apply_biases(rules, logits)
    _apply_penalties(rules, logits)
    _apply_grammar_masks(rules, logits)
    _apply_min_p_and_top_k(rules, logits)
    return logits


def _apply_biases(rules: Sequence[TokenRules], logits: torch.Tensor) -> None:
    if biased := [row for row, rule in enumerate(rules) if len(rule.biased)]:
        biases = np.concatenate([rules[row].biases for row in biased])
        logits[_logit_indices(biased, [rules[row].biased for row in biased], logits)] += _to_tensor(biases, logits)
    if short := [row for row, rule in enumerate(rules) if rule.left and len(rule.ends)]:
        logits[_logit_indices(short, [rules[row].ends for row in short], logits)] = -torch.inf


def _apply_penalties(rules: Sequence[TokenRules], logits: torch.Tensor) -> None:
    some = [(row, rule, rule.seen) for row, rule in enumerate(rules) if rule.seen is not None]
    if not some:
        return
    sizes = [len(seen.tokens) for _, _, seen in some]
    places = _logit_indices([row for row, _, _ in some], [seen.tokens for _, _, seen in some], logits)
    numbers = [(rule.repetition, rule.frequency, rule.presence) for _, rule, _ in some]
    repetition, frequency, presence = _to_tensor(
        np.repeat(np.array(numbers, dtype=np.float32).T, sizes, axis=1), logits
    )
    counts = _to_tensor(np.concatenate([seen.counts for _, _, seen in some]), logits)
    found = logits[places]
    found = torch.where(found > 0, found / repetition, found * repetition)
    logits[places] = found - frequency * counts - presence * (counts > 0)


def _apply_grammar_masks(rules: Sequence[TokenRules], logits: torch.Tensor) -> None:
    held = [(row, rule, rule.matcher) for row, rule in enumerate(rules) if rule.matcher is not None]
    if not held:
        return
    masks = np.frombuffer(b"".join(matcher.compute_bitmask() for _, _, matcher in held), dtype=np.uint8)
    masks = masks.reshape(len(held), -1)
    for mask, (_, rule, matcher) in zip(masks, held, strict=True):
        if not mask.any() or matcher.is_error():
            rule.set_failure()
    words = logits.shape[1]
    if masks.shape[1] * 8 < words:  # a model may have more logits than its tokenizer has tokens
        masks = np.pad(masks, ((0, 0), (0, -(-words // 8) - masks.shape[1])))
    forbidden = _to_tensor(np.unpackbits(~masks, axis=1, count=words, bitorder="little").view(np.bool_), logits)
    if len(held) == len(rules):
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        rows = _to_tensor(np.array([row for row, _, _ in held]), logits)
        logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)


def _apply_min_p_and_top_k(rules: Sequence[TokenRules], logits: torch.Tensor) -> None:
    cutting = [row for row, rule in enumerate(rules) if rule.top_k or rule.margin > -math.inf]
    if not cutting:
        return
    some = logits[cutting]
    margins = _to_tensor(np.array([rules[row].margin for row in cutting], dtype=np.float32), logits)[:, None]
    least = some.amax(dim=-1, keepdim=True) + margins
    most = [min(rules[row].top_k or 1, logits.shape[1]) for row in cutting]
    if any(rules[row].top_k for row in cutting):
        places = _to_tensor(np.array(most), logits)[:, None] - 1
        kth = some.topk(max(most), dim=-1).values.gather(-1, places)
        counts = _to_tensor(np.array([rules[row].top_k > 0 for row in cutting]), logits)[:, None]
        least = torch.where(counts, torch.maximum(least, kth), least)
    logits[cutting] = some.masked_fill(some < least, -torch.inf)


def _logit_indices(
    rows: Sequence[int], tokens: Sequence[NDArray[np.int64]], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    repeated = np.repeat(np.array(rows, dtype=np.int64), [len(each) for each in tokens])
    return _to_tensor(repeated, like), _to_tensor(np.concatenate(tokens), like)


def _to_tensor(array: NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)


# ---- grammars

_MAX_COMPILED = 128
_MAX_CHARACTERS = 500_000
_MAX_ERROR_CHARACTERS = 300
_LLGUIDANCE_LIMITS: dict[str, Any] = {"verbose_errors": False}
"""Parser settings that differ from llguidance's defaults, which allow about 1 s to compile and 20 ms per token."""
_JSON_WHITE_SPACE = r"[ \t]?|\r?\n[ \t]{0,40}"
"""Allowed white space between the parts of a JSON text, limited because small models repeat white space."""


class Grammars:
    """The compiled grammars that were used most recently. Thread-safe."""

    def __init__(self, tokenizer: Any, *, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._compiled = functools.lru_cache(_MAX_COMPILED)(self._compile)

    def create_matcher(self, sampling: Sampling) -> Any:
        """Return a new `LLMatcher` at the start of the text; None if no grammar is requested. Raises OptionRefused."""
        if sampling.structure is None:
            return None
        option, value = sampling.structure
        form = value if isinstance(value, str) else json.dumps(list(value))
        return self._compiled(option, form).deep_copy()

    def _compile(self, option: str, form: str) -> Any:
        word = "JSON schema" if option == "json_schema" else option
        if len(form) > _MAX_CHARACTERS:
            why = f"the {word} has {len(form):,} characters; at most {_MAX_CHARACTERS:,} are allowed"
            raise OptionRefused(option, why)
        try:
            reader = self._llguidance_tokenizer
        except ImportError as error:
            why = f"a {word} needs the package llguidance ({error}); pip install 'stoker[models]'"
            raise OptionRefused(option, why) from error
        except Exception as error:
            why = f"llguidance cannot read this model's tokenizer, so its texts cannot follow a {word}"
            raise OptionRefused(option, f"{why}: {_shorten_error(error)}") from error
        import llguidance

        try:
            named: Any = option
            if option == "json_schema":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(
                    form, defaults={"whitespace_pattern": _JSON_WHITE_SPACE}
                )
            else:
                grammar = llguidance.grammar_from(named, form)
            limits: Any = llguidance.LLParserLimits(**_LLGUIDANCE_LIMITS)
            matcher = llguidance.LLMatcher(reader, grammar, log_level=0, limits=limits)
            first = matcher.deep_copy()
            first.compute_bitmask()
            why = matcher.get_error() or first.get_error()
        except Exception as error:
            why = str(error)
        if why:
            what = "no text follows it" if why.startswith("NoExtension") else _shorten_error(why)
            raise OptionRefused(option, f"the {word} cannot be compiled: {what}")
        return matcher

    @functools.cached_property
    def _llguidance_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        if self._ends:
            return from_tokenizer(self._tokenizer, eos_token=sorted(self._ends))
        ending = copy.deepcopy(self._tokenizer)  # llguidance needs an end token, and this model has none, so add one
        ending.add_special_tokens({"eos_token": "<|stoker end|>"})
        return from_tokenizer(ending)


def _shorten_error(why: object) -> str:
    text = " ".join(str(why).split())
    return text if len(text) <= _MAX_ERROR_CHARACTERS else f"{text[:_MAX_ERROR_CHARACTERS]}..."
