"""The fastest matrix products, decode attention and token draws for this processor.

On a CPU, oneDNN keeps a reordered copy of the weights. PyTorch's linear layer would reorder the weights at every call
(docs/decisions/058). On a processor without `bfloat16` instructions, this copy is `float32`.

A draw returns the first token at which the sum of probabilities exceeds the request's next random number. Tokens are in
the order of the vocabulary, or with `top_p` likeliest first. Each request has a random generator on the host.
(`torch.where` with a Python number would copy the number to the device and wait.)
"""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from stoker.contexts.inference.adapter import (
    FinishReason,
    GenerationRequest,
    ModelTexts,
    NewToken,
    Sampling,
    ScoredPromptToken,
    TokenLikelihood,
    WrittenText,
)
from stoker.contexts.inference.peft_adapters import Adapter
from stoker.contexts.inference.token_rules import apply_token_rules, build_token_rules


def uses_matrix_tiles() -> bool:
    """True if PyTorch uses the processor's matrix registers (Intel's AMX)."""
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(asked and asked())


def has_fast_bfloat16() -> bool:
    asked = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return asked is None or platform.machine() not in ("x86_64", "AMD64") or bool(asked()) or uses_matrix_tiles()


_EXPECTED_ROWS = 64


def packed_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes that suit a packed copy of the weights on a CPU, fastest first; empty if none does."""
    if dtype == torch.bfloat16 and not has_fast_bfloat16():
        return torch.float32, dtype
    return (dtype,) if dtype in (torch.float32, torch.bfloat16) else ()


class PackedLinear:
    """Linear layers with the same input, as one matrix product if that is faster. `copy_dtype`: dtype of a reordered
    copy of the weights; None for no copy.
    """

    def __init__(self, layers: Sequence[Any], *, copy_dtype: torch.dtype | None) -> None:
        self._layers = list(layers)
        self._packed: Any = None
        self._fused: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self.packed_bytes = 0
        weight = self._layers[0].weight
        self._converts_to_float32 = copy_dtype is not None and copy_dtype != weight.dtype
        if copy_dtype is not None and weight.device.type == "cpu":
            self._pack_weights(copy_dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers to inputs `[rows, in]`. Return their outputs side by side, `[rows, out]`."""
        if self._packed is not None:  # use this for one row too, although slower: results must not depend on the batch
            wide = x.float() if self._converts_to_float32 else x
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(wide, self._packed, self._bias, "none", [], "")
            return product.to(x.dtype)
        if self._fused is not None:
            return linear(x, self._fused, self._bias)
        if len(self._layers) == 1:
            return linear(x, self._layers[0].weight, self._layers[0].bias)
        return torch.cat([linear(x, layer.weight, layer.bias) for layer in self._layers], dim=-1)

    def fuse_weights(self) -> None:
        """Store all weights in one tensor, and make the layers' weights views of it."""
        if len(self._layers) == 1 or self._packed is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._fused = torch.cat([layer.weight.data for layer in self._layers])
            parts = self._fused.split([len(layer.weight) for layer in self._layers])
            for layer, part in zip(self._layers, parts, strict=True):
                layer.weight.data = part
            self._bias = self._joined_bias(self._fused.dtype)

    def release_fused_weights(self) -> None:
        if self._fused is not None:  # packed layers are not fused, and must keep their bias
            self._fused = self._bias = None

    def _joined_bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        if all(layer.bias is None for layer in self._layers):
            return None
        parts = [
            layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias.detach()
            for layer in self._layers
        ]
        return torch.cat(parts).to(dtype)

    def _pack_weights(self, dtype: torch.dtype) -> None:
        weight = torch.cat([layer.weight.detach() for layer in self._layers]).to(dtype)
        self._bias = self._joined_bias(dtype)
        try:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)
        except (AttributeError, RuntimeError):  # PyTorch lacks oneDNN, or oneDNN does not support this processor
            return
        self.packed_bytes = weight.nbytes


DecodeAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of queries `[rows, heads, size]`, keys and values `[rows, key heads, tokens, size]`, and a mask `[rows, 1,
1, tokens]` of 0 and minus infinity. Returns `[rows, heads * size]`. A row's result never depends on other rows.
"""


def choose_decode_attention(dtype: torch.dtype, device: Any) -> DecodeAttention:
    if device.type != "cpu":
        return ON_GPU
    if dtype == torch.float32:
        return attend_by_matrix_products
    if uses_matrix_tiles():
        return attend_with_shared_keys
    return attend_by_matrix_products if has_fast_bfloat16() else attend_with_grouped_queries


def attend_with_shared_keys(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Call PyTorch's kernel, which shares a key among the heads of its group."""
    out = scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)
    return out.reshape(len(q), -1)


def attend_with_grouped_queries(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Call PyTorch's kernel with each group's heads arranged as several queries of one head."""
    rows, key_heads, _, size = keys.shape
    out = scaled_dot_product_attention(q.view(rows, key_heads, -1, size), keys, values, attn_mask=mask)
    return out.reshape(rows, -1)


def attend_by_matrix_products(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    rows, key_heads, _, size = keys.shape
    grouped = q.view(rows, key_heads, -1, size)
    scores = torch.matmul(keys, grouped.transpose(2, 3)).transpose(2, 3).contiguous()
    chances = scores.mul_(size**-0.5).add_(mask).softmax(dim=-1)
    return torch.matmul(chances, values).reshape(rows, -1)


ON_GPU: DecodeAttention = attend_with_grouped_queries
"""Attention on a GPU. It avoids `enable_gqa`, with which PyTorch would copy keys and values for each head."""


NOT_FINITE = "the model's logits for the next token are not finite"


class TokenSampler:
    def __init__(self, sampling: Sampling) -> None:
        self.temperature = sampling.temperature
        self.top_p = sampling.top_p
        self._random = random.Random(combine_seed_pair(sampling.seed)) if sampling.temperature else None

    @property
    def is_greedy(self) -> bool:
        return self._random is None

    def next_random_number(self) -> float:
        return 0.0 if self._random is None else self._random.random()


def combine_seed_pair(seed: tuple[int, int]) -> int:
    return (seed[0] * 1_000_003 + seed[1]) % 2**63


def sample_tokens(logits: torch.Tensor, draws: torch.Tensor, *, nucleus: bool) -> torch.Tensor:
    """Return a token for each row of logits `[rows, vocabulary]`, or -1 if the logits are not finite. `draws`:
    `float64` `[3, rows]` with temperature (above 0), `top_p` (with `nucleus`) and random number.
    """
    temperatures, top_p, numbers = (row[:, None] for row in draws)
    wide = logits.double()
    chances = torch.softmax((wide - wide.amax(dim=-1, keepdim=True)) / temperatures, dim=-1)
    order = None
    if nucleus:
        chances, order = chances.sort(dim=-1, descending=True, stable=True)
        chances = chances.masked_fill(chances.cumsum(dim=-1) - chances >= top_p, 0.0)  # keeps the likeliest token
    sums = chances.cumsum(dim=-1)
    total = sums[:, -1:]
    place = torch.searchsorted(sums, numbers * total, right=True).clamp(max=logits.shape[-1] - 1)
    tokens = place if order is None else order.gather(-1, place)
    return tokens.masked_fill(~total.isfinite(), -1)[:, 0]


def sample_or_argmax_tokens(draws: list[TokenSampler], logits: torch.Tensor) -> list[int | Exception]:
    greedy = any(draw.is_greedy for draw in draws)
    found: list[int | Exception] = [*find_likeliest_tokens(logits)] if greedy else [-1] * len(draws)
    for nucleus in (False, True):
        rows = [at for at, draw in enumerate(draws) if not draw.is_greedy and (draw.top_p < 1) == nucleus]
        if not rows:
            continue
        options = [(draws[at].temperature, draws[at].top_p, draws[at].next_random_number()) for at in rows]
        table = torch.tensor(options, dtype=torch.float64, device=logits.device).T
        tokens = sample_tokens(logits[rows], table, nucleus=nucleus).tolist()
        for at, token in zip(rows, tokens, strict=True):
            found[at] = token if token >= 0 else ValueError(NOT_FINITE)
    return found


def find_likeliest_tokens(logits: torch.Tensor) -> list[int]:
    """Return the likeliest token of each row. Split the rows on CPUs, where `argmax` is slow in half precision."""
    rows, size = logits.shape
    parts = next((parts for parts in (64, 48, 40, 32, 16) if size % parts == 0), 1)
    if logits.device.type != "cpu" or parts == 1:
        return list(logits.float().argmax(dim=-1).tolist())
    split = logits.view(rows, parts, size // parts)
    part = split.amax(dim=-1).float().argmax(dim=-1)
    inside = split[torch.arange(rows), part].float().argmax(dim=-1)
    return list((part * (size // parts) + inside).tolist())


# ---- texts

_MAX_LOGITS_AT_ONCE = 8_000_000
_LARGE_VOCABULARY = 262_144


def positions_scored_at_once(vocabulary: int) -> int:
    """Return the number of prompt positions to score together. Their logits need about 32 MB."""
    return max(1, _MAX_LOGITS_AT_ONCE // (vocabulary or _LARGE_VOCABULARY))


class PromptScores:
    """The log-likelihoods of a prompt's tokens. `most`: number of likeliest tokens to list at each position. `before`:
    length of the soft prompt.
    """

    def __init__(self, prompt: Sequence[int], *, most: int, before: int = 0) -> None:
        self._most = most
        self._before = before
        self._tokens = [ScoredPromptToken(token) for token in prompt]

    @property
    def tokens(self) -> tuple[ScoredPromptToken, ...]:
        return tuple(self._tokens)

    def score_following_tokens(self, start: int, logits: torch.Tensor) -> None:
        """Score the tokens that follow the positions from `start`. `logits`: `[positions, vocabulary]`."""
        first = start + 1 - self._before
        skipped = max(0, 1 - first)  # the first token and tokens of a soft prompt have no likelihood
        tokens = [each.token for each in self._tokens[first + skipped : max(0, first + len(logits))]]
        if not tokens:
            return
        rows = logits[skipped : skipped + len(tokens)].float()
        total = rows.logsumexp(dim=-1, keepdim=True)
        own = rows.gather(-1, torch.tensor(tokens, device=rows.device)[:, None]) - total
        chances, likeliest = rows.topk(min(self._most, rows.shape[-1]))
        found = zip(tokens, own[:, 0].tolist(), likeliest.tolist(), (chances - total).tolist(), strict=True)
        for at, (token, logprob, ids, logprobs) in enumerate(found, start=first + skipped):
            self._tokens[at] = ScoredPromptToken(token, logprob, tuple(map(TokenLikelihood, ids, logprobs)))


class RequestText:
    """A request and its text so far. `ids`: tokens of the soft prompt (all 0), the prompt and the text. `scores`: None
    unless the request wants log-likelihoods of its prompt.
    """

    def __init__(self, request: GenerationRequest, texts: ModelTexts, *, adapter: Adapter | None = None) -> None:
        self.request = request
        self.adapter = adapter
        self.written = WrittenText(texts, request)
        self.draw = TokenSampler(request.sampling)
        self.rules = build_token_rules(request, texts)
        self.ids = [0] * (adapter.virtual_tokens if adapter is not None else 0) + list(request.prompt)
        self.prompt_tokens = len(self.ids)
        self.scores: PromptScores | None = None
        if most := request.sampling.prompt_logprobs:
            self.scores = PromptScores(request.prompt, most=most, before=self.prompt_tokens - len(request.prompt))

    @property
    def is_capturable(self) -> bool:
        has_matrices = self.adapter is not None and bool(self.adapter.matrices)
        return not self.request.sampling.logprobs and self.rules is None and not has_matrices

    def prefix_cache_key(self, length: int | None = None) -> tuple[int, ...]:
        ids = self.ids[:length]
        return tuple(ids) if self.adapter is None else self.adapter.prefix_cache_key(ids)

    def add_token(self, token: int | Exception, logits: torch.Tensor | None) -> NewToken:
        id, most = self.request.id, self.request.sampling.logprobs
        prompt = self.scores.tokens if self.scores is not None else ()
        self.scores, is_last = None, False
        if not self.request.sampling.max_new_tokens and not isinstance(token, Exception):
            return NewToken(id, -1, finish=FinishReason.LENGTH, prompt=prompt)
        if self.rules is not None:
            is_last = isinstance(token, int) and self.rules.record_token(token)
            if failure := self.rules.failure:
                return NewToken(id, -1, finish=FinishReason.STOP, error=str(failure), option=failure.option)
        if isinstance(token, Exception):
            return NewToken(id, -1, finish=FinishReason.STOP, error=f"no token could be drawn: {token}")
        self.ids.append(token)
        text = self.written.add(token, is_last=is_last)
        logprob, likeliest = log_likelihoods_of(token, logits, most=most) if most and logits is not None else (None, ())
        return NewToken(id, token, text, self.written.finish, logprob, likeliest, prompt=prompt)


def choose_next_tokens(writings: Sequence[RequestText], logits: torch.Tensor) -> list[int | Exception]:
    """Return each request's next token, or an exception. May change `logits` if no request needs likelihoods."""
    ruled = [at for at, writing in enumerate(writings) if writing.rules is not None]
    draws = [writing.draw for writing in writings]
    if not ruled:
        return sample_or_argmax_tokens(draws, logits)
    rules = [writing.rules for writing in writings if writing.rules is not None]
    found: dict[int, int | Exception] = {}
    plain = [at for at, writing in enumerate(writings) if writing.rules is None]
    if plain:
        found.update(zip(plain, sample_or_argmax_tokens([draws[at] for at in plain], logits[plain]), strict=True))
    if plain or any(writing.request.sampling.logprobs for writing in writings):
        logits = logits[ruled]  # copy the rows, because the rules must not change likelihoods
    tokens = sample_or_argmax_tokens([draws[at] for at in ruled], apply_token_rules(rules, logits))
    found.update(zip(ruled, tokens, strict=True))
    return [found[at] for at in range(len(writings))]


def log_likelihoods_of(token: int, logits: torch.Tensor, *, most: int) -> tuple[float, tuple[TokenLikelihood, ...]]:
    steps = torch.log_softmax(logits.float(), dim=-1)
    found, tokens = steps.topk(min(most, len(steps)))
    likeliest = tuple(TokenLikelihood(int(id), float(chance)) for id, chance in zip(tokens, found, strict=True))
    return float(steps[token]), likeliest
