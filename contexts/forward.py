"""Running a causal model over token ids: rows of different length, with a prefix that they share.

Rows are padded on the right. A token of a causal model sees only what stands before it, so padding after a row's end
changes nothing in it, and the same row gives the same numbers (up to rounding) in every batch. Positions are counted
from the row's own start; only when a row goes on after its padding (labels, generated tokens) is the padding masked.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from stoker.contexts.prefixes import PrefixCache, common_length

Ids = tuple[int, ...]
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, `[1, heads, tokens, size]`."""


class Batch:
    """Rows whose prompts have been computed: `logits` after each row's last token `[rows, vocabulary]`, their cache,
    the length of each row and the width (longest row) that the cache has."""

    def __init__(self, *, logits: torch.Tensor, cache: Any, lengths: list[int], width: int) -> None:
        self.logits = logits
        self.cache = cache
        self.lengths = lengths
        self.width = width


class Runner:
    """A model, its device, and the prefixes that are kept for it."""

    def __init__(self, model: Any, *, limit_bytes: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.shares = _keeps_all_keys(model)
        """Whether a prefix can be cut out of the model's cache (not so with sliding windows or recurrent layers)."""
        self.prefixes: PrefixCache[Layers] = PrefixCache(limit_bytes=limit_bytes, cut=_cut)
        self._few_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def share(self, ids: Ids) -> None:
        """Compute a beginning that many rows are known to have, unless it is there."""
        if self.shares and self.prefixes.wants(ids):
            layers = _layers(self._prefill([ids]).cache)
            self.prefixes.keep(ids, layers, _size(layers))

    def prefill(self, rows: Sequence[Ids]) -> Batch:
        """Compute these prompts. Each has at least one token."""
        batch = self._prefill(rows)
        if self.shares:
            layers = _cut(_layers(batch.cache), batch.lengths[0]) if len(rows) > 1 else _layers(batch.cache)
            self.prefixes.saw(rows[0], layers, _size(layers))
        return batch

    def extend(self, batch: Batch, sources: Sequence[int], rows: Sequence[Ids]) -> torch.Tensor:
        """Logits `[rows, longest, vocabulary]` after each token of `rows`, each read after the prompt of its source.

        The batch stays as it is: several continuations of one prompt share what was computed of it.
        """
        cache = DynamicCache()
        index = torch.tensor(list(sources), device=self.device)
        for number, (keys, values) in enumerate(_all_rows(batch.cache)):
            cache.update(keys.index_select(0, index), values.index_select(0, index), number)
        lengths = [batch.lengths[source] for source in sources]
        ids, longest = self._padded(rows)
        output = self.model(
            input_ids=ids,
            attention_mask=self._mask(lengths, batch.width, longest),
            position_ids=torch.tensor(lengths, device=self.device)[:, None] + self._arange(longest),
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits.float()

    def whole(self, rows: Sequence[Ids]) -> torch.Tensor:
        """Logits `[rows, longest, vocabulary]` of whole rows, without any cache: for models that share nothing."""
        ids, longest = self._padded(rows)
        mask = self._mask([len(row) for row in rows], longest, 0)
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()

    def _prefill(self, rows: Sequence[Ids]) -> Batch:
        lengths = [len(row) for row in rows]
        cache, start = DynamicCache(), 0
        if self.shares:
            prefix, start = self.prefixes.find(rows)
            if prefix is not None:
                for number, (keys, values) in enumerate(prefix.kv):
                    wide = (len(rows), -1, -1, -1)
                    cache.update(keys[:, :, :start].expand(wide), values[:, :, :start].expand(wide), number)
        ids, longest = self._padded([row[start:] for row in rows])
        last = torch.tensor([length - start - 1 for length in lengths], device=self.device)
        few: dict[str, Any] = {}
        if self._few_logits:
            kept, last = torch.unique(last, return_inverse=True)
            few = {"logits_to_keep": kept}
        output = self.model(
            input_ids=ids,
            position_ids=(start + self._arange(longest)).expand(len(rows), -1),
            past_key_values=cache,
            use_cache=True,
            **few,
        )
        logits = output.logits[self._arange(len(rows)), last].float()
        return Batch(logits=logits, cache=output.past_key_values, lengths=lengths, width=start + longest)

    def _padded(self, rows: Sequence[Ids]) -> tuple[torch.Tensor, int]:
        longest = max(map(len, rows))
        padded = [list(row) + [0] * (longest - len(row)) for row in rows]
        return torch.tensor(padded, device=self.device), longest

    def _mask(self, lengths: list[int], width: int, more: int) -> torch.Tensor | None:
        """What may be seen: each row's own tokens and the `more` that come after the width; None if that is all."""
        if all(length == width for length in lengths):
            return None
        seen = self._arange(width)[None, :] < torch.tensor(lengths, device=self.device)[:, None]
        return torch.cat([seen, seen.new_ones(len(lengths), more)], dim=1).long()

    def _arange(self, size: int) -> torch.Tensor:
        return torch.arange(size, device=self.device)


def shared_beginning(rows: Sequence[Ids]) -> Ids:
    """The tokens that all rows begin with, one token short of the shortest row at the most."""
    first, length = rows[0], min(map(len, rows)) - 1
    for row in rows[1:]:
        length = common_length(first, row, most=length)
    return first[:length]


def _keeps_all_keys(model: Any) -> bool:
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:  # an architecture that Transformers has no such cache for
        return False
    return bool(layers) and all(type(layer).__name__ == "DynamicLayer" for layer in layers)


def _all_rows(cache: Any) -> Layers:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _layers(cache: Any) -> Layers:
    return [(keys[:1], values[:1]) for keys, values in _all_rows(cache)]


def _cut(layers: Layers, length: int) -> Layers:
    """A copy of the first tokens, so that the rest can be freed."""
    return [(keys[:, :, :length].clone(), values[:, :, :length].clone()) for keys, values in layers]


def _size(layers: Layers) -> int:
    return sum(part.numel() * part.element_size() for pair in layers for part in pair)
