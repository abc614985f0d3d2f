"""Run a causal model over rows of token ids that share a prefix, and compute log-likelihoods of labels.

Rows are padded on the right. Except for rounding, a row's results do not depend on the batch. One forward pass reads a
prompt and all its labels. A mask lets each label attend only to the prompt and to itself (tree attention of SpecInfer,
arXiv:2305.09781).

The keys and values (KV) of common prefixes are computed once. If a new prompt begins like one of the last 8 prompts,
the common part becomes a *shared* prefix, unless one of similar length exists.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from transformers import DynamicCache

log = logging.getLogger(__name__)

KV = TypeVar("KV")

MIN_PREFIX_TOKENS = 8
"""Minimum number of tokens of a prefix in the cache."""
_MIN_EXTRA_TOKENS = 8
_RECENT_PROMPTS = 8


@dataclass(eq=False, slots=True)
class Prefix(Generic[KV]):
    ids: tuple[int, ...]
    kv: KV
    size_bytes: int


class PrefixCache(Generic[KV]):
    """Cached keys and values: prefixes that several prompts share, and the last 8 prompts. Not thread-safe."""

    def __init__(self, *, limit_bytes: int, cut: Callable[[KV, int], KV]) -> None:
        self.limit_bytes = limit_bytes
        self.reused_tokens = 0
        self._cut = cut
        self._shared: list[Prefix[KV]] = []  # least recently used first
        self._recent: deque[Prefix[KV]] = deque(maxlen=_RECENT_PROMPTS)

    def set_limit(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._trim_to_size_limit()

    @property
    def size_bytes(self) -> int:
        return sum(prefix.size_bytes for prefix in (*self._shared, *self._recent))

    def find_shared_prefix(self, rows: Sequence[tuple[int, ...]]) -> tuple[Prefix[KV] | None, int]:
        """Return the cached prefix with the longest beginning that all rows share, and the length of this beginning.
        Return (None, 0) without such a prefix.
        """
        room = min(map(len, rows)) - 1
        shared, length = self._find_longest_match(self._shared, rows, room)
        recent, longer = self._find_longest_match(self._recent, rows, room)
        if recent is not None and longer >= max(MIN_PREFIX_TOKENS, length + _MIN_EXTRA_TOKENS):
            size_bytes = recent.size_bytes * longer // len(recent.ids)
            shared = self.add_shared_prefix(recent.ids[:longer], self._cut(recent.kv, longer), size_bytes)
            length = longer
        if shared is None or length < MIN_PREFIX_TOKENS:
            return None, 0
        if shared in self._shared:
            self._shared.remove(shared)
            self._shared.append(shared)
        self.reused_tokens += length * len(rows)
        return shared, length

    def is_worth_keeping(self, ids: tuple[int, ...]) -> bool:
        if len(ids) < MIN_PREFIX_TOKENS:
            return False
        _, shared = self._find_longest_match(self._shared, [ids], len(ids))
        return len(ids) >= shared + _MIN_EXTRA_TOKENS

    def add_shared_prefix(self, ids: tuple[int, ...], kv: KV, size_bytes: int) -> Prefix[KV]:
        prefix = Prefix(ids, kv, size_bytes)
        if size_bytes <= self.limit_bytes:
            self._shared.append(prefix)
            self._trim_to_size_limit()
        return prefix

    def add_recent_prompt(self, ids: tuple[int, ...], kv: KV, size_bytes: int) -> None:
        """Keep a whole prompt if it needs at most half of the memory limit."""
        if size_bytes * 2 <= self.limit_bytes:
            self._recent.append(Prefix(ids, kv, size_bytes))
            self._trim_to_size_limit()

    def clear(self) -> None:
        self._shared.clear()
        self._recent.clear()

    def _trim_to_size_limit(self) -> None:
        while self.size_bytes > self.limit_bytes:
            if len(self._recent) > 1 or not self._shared:
                self._recent.popleft()
            else:
                del self._shared[0]

    @staticmethod
    def _find_longest_match(
        kept: Sequence[Prefix[KV]], rows: Sequence[tuple[int, ...]], room: int
    ) -> tuple[Prefix[KV] | None, int]:
        best, length = None, 0
        for prefix in reversed(kept):
            here = room
            for row in rows:
                here = common_prefix_length(prefix.ids, row, most=here)
                if here <= length:
                    break
            if here > length:
                best, length = prefix, here
        return best, length


def common_prefix_length(one: Sequence[int], other: Sequence[int], *, most: int) -> int:
    low, high = 0, max(0, min(len(one), len(other), most))
    if one[:high] == other[:high]:
        return high
    while low < high:  # one[:low] equals other[:low]; one[:high] may differ from other[:high]
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


Ids = tuple[int, ...]
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, `[1, heads, tokens, size]`."""


class PrefilledBatch(NamedTuple):
    """Result of reading a batch: logits after each row's last token, and the cache. `width`: tokens of the cache."""

    logits: torch.Tensor
    cache: Any
    lengths: list[int]
    width: int


class ModelRunner:
    def __init__(self, model: Any, *, limit_bytes: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.can_share_prefixes = _has_full_attention_cache(model)
        """True if the model's cache can be cut to a prefix; False with sliding windows or recurrent layers."""
        self.prefixes: PrefixCache[Layers] = PrefixCache(limit_bytes=limit_bytes, cut=_cut_layers)
        self._can_select_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._has_tree_mask: bool | None = None

    @functools.cached_property
    def token_bytes(self) -> int:
        """Measured cache bytes per token; 0 if the model cannot share prefixes."""
        if not self.can_share_prefixes:
            return 0
        ids = tuple(range(8))
        with torch.inference_mode():
            return _layers_bytes(_first_row_layers(self._prefill([ids], tails=None, keep=False)[0].cache)) // len(ids)

    def cache_prefix(self, ids: Ids) -> None:
        if self.can_share_prefixes and self.prefixes.is_worth_keeping(ids):
            layers = _first_row_layers(self.prefill([ids]).cache)
            self.prefixes.add_shared_prefix(ids, layers, _layers_bytes(layers))

    def prefill(self, rows: Sequence[Ids]) -> PrefilledBatch:
        return self._prefill(rows, tails=None)[0]

    def prefill_with_tails(
        self, rows: Sequence[Ids], tails: Sequence[Sequence[Ids]]
    ) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """Return the logits after each prompt and after each token of its tails. A tail is a label without its last
        token.
        """
        if not any(tail for some in tails for tail in some):
            return self.prefill(rows).logits, [[torch.empty(0)] * len(some) for some in tails]
        if self._has_tree_mask is None:
            self._has_tree_mask = self._accepts_tree_mask(rows[0][:8])
        if self._has_tree_mask:
            batch, after = self._prefill(rows, tails=tails)
            return batch.logits, after
        batch = self.prefill(rows)
        return batch.logits, self._read_tails(batch, tails)

    def _read_tails(self, batch: PrefilledBatch, tails: Sequence[Sequence[Ids]]) -> list[list[torch.Tensor]]:
        reads = [(row, tail) for row, some in enumerate(tails) for tail in some if tail]
        cache, index = DynamicCache(), torch.tensor([row for row, _ in reads], device=self.device)
        for number, layer in enumerate(batch.cache.layers):
            there = index.to(layer.keys.device)
            cache.update(layer.keys.index_select(0, there), layer.values.index_select(0, there), number)
        lengths = [batch.lengths[row] for row, _ in reads]
        ids, longest = self.pad_rows([tail for _, tail in reads])
        output = self.model(
            input_ids=ids,
            attention_mask=self._padding_mask(lengths, batch.width, longest),
            position_ids=torch.tensor(lengths, device=self.device)[:, None] + self._arange(longest),
            past_key_values=cache,
            use_cache=True,
        )
        logits = iter(output.logits.float())
        return [[next(logits)[: len(tail)] if tail else torch.empty(0) for tail in some] for some in tails]

    def iterate_logits(self, row: Ids, *, most: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a row's logits in parts of at most `most` tokens, each with the index of its first token."""
        cache = DynamicCache() if self.can_share_prefixes else None
        everything = None if cache is not None or self._can_select_logits else self.compute_all_logits([row])[0]
        ids = torch.tensor([row], device=self.device)
        for start in range(0, len(row), most):
            here = slice(start, start + most)
            if everything is not None:
                yield start, everything[here]
            elif cache is not None:
                yield start, self.model(input_ids=ids[:, here], past_key_values=cache, use_cache=True).logits[0].float()
            else:
                kept = self._arange(len(row))[here]
                yield start, self.model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0].float()

    def compute_all_logits(self, rows: Sequence[Ids]) -> torch.Tensor:
        ids, longest = self.pad_rows(rows)
        mask = self._padding_mask([len(row) for row in rows], longest, 0)
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()

    def _prefill(
        self, rows: Sequence[Ids], *, tails: Sequence[Sequence[Ids]] | None, keep: bool = True
    ) -> tuple[PrefilledBatch, list[list[torch.Tensor]]]:
        lengths = [len(row) for row in rows]
        cache, start = DynamicCache(), 0
        if self.can_share_prefixes and keep:
            prefix, start = self.prefixes.find_shared_prefix(rows)
            if prefix is not None:
                for number, (keys, values) in enumerate(prefix.kv):
                    wide = (len(rows), -1, -1, -1)
                    cache.update(keys[:, :, :start].expand(wide), values[:, :, :start].expand(wide), number)
        ids, longest = self.pad_rows([row[start:] for row in rows])
        positions = (start + self._arange(longest)).expand(len(rows), -1)
        inputs: dict[str, Any] = {}
        wanted = last = torch.tensor([length - start - 1 for length in lengths], device=self.device)
        tree = None
        if tails is not None:
            tree = _TailTree(tails, start=start, longest=longest, lengths=lengths)
            ids = torch.cat([ids, torch.tensor(tree.ids, device=self.device)], dim=1)
            positions = torch.cat([positions, torch.tensor(tree.positions, device=self.device)], dim=1)
            inputs["attention_mask"] = tree.attention_mask(dtype=self.model.dtype).to(self.device)
            wanted = torch.cat([last, longest + self._arange(tree.width)])
        kept = self._arange(ids.shape[1])
        if self._can_select_logits:
            kept = torch.unique(wanted)
            inputs["logits_to_keep"] = kept
        output = self.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **inputs)
        where = torch.searchsorted(kept, last)
        logits = output.logits[self._arange(len(rows)), where].float()
        cache = output.past_key_values
        if tree is not None:
            cache.crop(-tree.width)
        batch = PrefilledBatch(logits, cache, lengths, start + longest)
        if self.can_share_prefixes and keep:
            layers = _first_row_layers(cache)
            if len(rows) > 1:
                layers = _cut_layers(layers, lengths[0])
            self.prefixes.add_recent_prompt(rows[0], layers, _layers_bytes(layers))
        return batch, tree.split_logits(output.logits[:, -tree.width :].float()) if tree is not None else []

    def _accepts_tree_mask(self, ids: Ids) -> bool:
        tails = [[ids[:2], (), ids[-2:]]]
        try:
            _, together = self._prefill([ids], tails=tails, keep=False)
            apart = self._read_tails(self._prefill([ids], tails=None, keep=False)[0], tails)
        except Exception as error:
            log.warning(
                "this architecture does not accept a tree attention mask (%s); each label is computed in its own row",
                error,
            )
            return False
        pairs = zip(together[0], apart[0], strict=True)
        off = max(float((one - other).abs().max()) for one, other in pairs if len(one))
        limit = 1e-2 if self.model.dtype == torch.float32 else 0.5
        if off > limit:
            log.warning(
                "this architecture ignores a tree attention mask (off by %.2g); each label is computed in its own row",
                off,
            )
        return off <= limit

    def pad_rows(self, rows: Sequence[Ids]) -> tuple[torch.Tensor, int]:
        """Return rows padded on the right, and the length of the longest row."""
        longest = max(map(len, rows))
        return torch.tensor([_pad_with_zeros([*row], longest) for row in rows], device=self.device), longest

    def _padding_mask(self, lengths: list[int], width: int, more: int) -> torch.Tensor | None:
        if all(length == width for length in lengths):
            return None
        seen = self._arange(width)[None, :] < torch.tensor(lengths, device=self.device)[:, None]
        return torch.cat([seen, seen.new_ones(len(lengths), more)], dim=1).long()

    def _arange(self, size: int) -> torch.Tensor:
        return torch.arange(size, device=self.device)

    # ---- log-likelihoods of tails after prompts

    def score(
        self, rows: list[Ids], tails: list[list[Ids]], *, prefix: Ids = (), batch_size: int = 1,
        check: Callable[[], None] = lambda: None,
    ) -> list[list[float]]:  # fmt: skip
        """Return the log-likelihood of each tail (label) after its row (prompt), `[rows][tails of the row]`.

        All rows begin with `prefix`. `check` is called before each forward pass, and may raise to stop the scoring.
        """
        scores: list[list[float]] = [[]] * len(rows)
        size = max(1, batch_size)
        with torch.inference_mode():
            if prefix:
                self.cache_prefix(find_shared_token_prefix([*rows, prefix]))
            if len(rows) > 1:
                self.cache_prefix(find_shared_token_prefix(rows))
            order = sorted(range(len(rows)), key=lambda index: -len(rows[index])) if size > 1 else range(len(rows))
            for start in range(0, len(rows), size):
                check()
                group = order[start : start + size]
                score = self._score_tails if self.can_share_prefixes else self._score_whole
                found = score([rows[index] for index in group], [tails[index] for index in group])
                for index, row in zip(group, found, strict=True):
                    scores[index] = row
        return scores

    def _score_tails(self, rows: list[Ids], tails: list[list[Ids]]) -> list[list[float]]:
        # The model does not read a label's last token, because no later token is scored.
        logits, after = self.prefill_with_tails(rows, [[tail[:-1] for tail in some] for some in tails])
        first = torch.log_softmax(logits, dim=-1)
        scores: list[list[float]] = []
        for row, some in enumerate(tails):
            scores.append([float(first[row, tail[0]]) for tail in some])
            for label, tail in enumerate(some):
                if len(tail) > 1:
                    steps = torch.log_softmax(after[row][label], dim=-1)
                    scores[row][label] += sum(float(steps[at, token]) for at, token in enumerate(tail[1:]))
        return scores

    def _score_whole(self, rows: list[Ids], tails: list[list[Ids]]) -> list[list[float]]:
        scores: list[list[float]] = []
        for row, some in zip(rows, tails, strict=True):
            logits = self.compute_all_logits([row + tail[:-1] for tail in some])
            steps = torch.log_softmax(logits[:, len(row) - 1 :], dim=-1)
            scores.append([
                sum(float(steps[label, at, token]) for at, token in enumerate(tail)) for label, tail in enumerate(some)
            ])  # fmt: skip
        return scores


class _TailTree:
    def __init__(self, tails: Sequence[Sequence[Ids]], *, start: int, longest: int, lengths: list[int]) -> None:
        self._tails = [list(dict.fromkeys(tail for tail in some if tail)) for some in tails]
        self._wanted = tails
        self._start, self._longest, self._lengths = start, longest, lengths
        self.width = max(sum(map(len, some)) for some in self._tails)
        self.ids = [_pad_with_zeros([token for tail in some for token in tail], self.width) for some in self._tails]
        self.positions = [
            _pad_with_zeros([length + at for tail in some for at in range(len(tail))], self.width)
            for some, length in zip(self._tails, lengths, strict=True)
        ]

    def attention_mask(self, *, dtype: torch.dtype) -> torch.Tensor:
        new, everything = self._longest + self.width, self._start + self._longest + self.width
        seen = torch.ones(new, everything, dtype=torch.bool).tril(self._start).repeat(len(self._tails), 1, 1)
        block = self._start + self._longest
        for row, (some, length) in enumerate(zip(self._tails, self._lengths, strict=True)):
            seen[row, self._longest :, length:] = False
            at = 0
            for tail in some:
                end = at + len(tail)
                within = torch.ones(len(tail), len(tail), dtype=torch.bool).tril()
                seen[row, self._longest + at : self._longest + end, block + at : block + end] = within
                at = end
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]

    def split_logits(self, logits: torch.Tensor) -> list[list[torch.Tensor]]:
        found = []
        for row, (some, wanted) in enumerate(zip(self._tails, self._wanted, strict=True)):
            at, by_tail = 0, {Ids(): torch.empty(0)}
            for tail in some:
                by_tail[tail] = logits[row, at : at + len(tail)]
                at += len(tail)
            found.append([by_tail[tail] for tail in wanted])
        return found


def _pad_with_zeros(items: list[int], width: int) -> list[int]:
    return items + [0] * (width - len(items))


def find_shared_token_prefix(rows: Sequence[Ids]) -> Ids:
    first, length = rows[0], min(map(len, rows)) - 1
    for row in rows[1:]:
        length = common_prefix_length(first, row, most=length)
    return first[:length]


def _has_full_attention_cache(model: Any) -> bool:
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:  # Transformers has no such cache for the architecture
        return False
    return bool(layers) and all(type(layer).__name__ == "DynamicLayer" for layer in layers)


def _first_row_layers(cache: Any) -> Layers:
    return [(layer.keys[:1], layer.values[:1]) for layer in cache.layers]


def _cut_layers(layers: Layers, length: int) -> Layers:
    return [(keys[:, :, :length].clone(), values[:, :, :length].clone()) for keys, values in layers]


def _layers_bytes(layers: Layers) -> int:
    return sum(part.numel() * part.element_size() for pair in layers for part in pair)
