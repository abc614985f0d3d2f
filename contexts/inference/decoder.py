"""A decoder of the Llama family over a batch of requests of any lengths, with few operations, and its key-value rows.

On a CPU, Transformers' modules spend most of a small model's decode step between operations (docs/decisions/058). Here
all tokens form one tensor `[tokens, width]`; attention takes one request at a time while it is read, and an array of
rows at a time while they write. `decoder_of` takes Llama, SmolLM, Mistral, Qwen 2 and Qwen 3, and compares the two on a
few tokens.

A request has a row of keys and values in an array of rows of equal length, a power of two, so attention over an array
computes at most twice what is needed. When one leaves, the last takes its place, so no step copies or gathers. Paged
memory (vLLM §4.1, arXiv:2309.06180) wastes less, but needs another kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from stoker.contexts.batching import row_tokens
from stoker.contexts.inference.kernels import PackedLinear, decode_attention

_FEWEST_ROWS = 4


class RowArray:
    """Keys and values of all layers, `[rows, heads, tokens, size]` each."""

    def __init__(self, *, tokens: int, layers: int, heads: int, size: int, dtype: torch.dtype, device: Any) -> None:
        self.tokens = tokens
        self.requests: list[int] = []
        self._shape = (heads, tokens, size)
        self._options = {"dtype": dtype, "device": device}
        self.capacity = 0
        """Rows that memory is held for."""
        self.version = 0
        """Changes when keys and values get new addresses."""
        self.keys = [torch.empty((0, *self._shape), **self._options) for _ in range(layers)]
        self.values = [torch.empty((0, *self._shape), **self._options) for _ in range(layers)]

    def set_capacity(self, rows: int) -> None:
        """Allocate this many rows, one layer at a time."""
        used = len(self.requests)
        self.version += 1
        self.capacity = min(self.capacity, max(rows, used))  # if memory ends half way, some layers have more rows
        for arrays in (self.keys, self.values):
            for layer, old in enumerate(arrays):
                new = torch.empty((max(rows, used), *self._shape), **self._options)
                new[:used] = old[:used]
                arrays[layer] = new
        self.capacity = max(rows, used)


class KVStore:
    """The rows of all requests of one model."""

    def __init__(self, *, layers: int, heads: int, size: int, dtype: torch.dtype, device: Any) -> None:
        self._make = {"layers": layers, "heads": heads, "size": size, "dtype": dtype, "device": device}
        self.token_bytes: int = 2 * layers * heads * size * dtype.itemsize
        self.arrays: dict[int, RowArray] = {}
        self._of: dict[int, RowArray] = {}

    @property
    def held_tokens(self) -> int:
        return sum(array.tokens * array.capacity for array in self.arrays.values())

    @property
    def held_bytes(self) -> int:
        return self.token_bytes * self.held_tokens

    def ensure(self, request: int, *, tokens: int, room_tokens: float) -> None:
        """Give the request a row for `tokens` and keep its content. All arrays hold at most `room_tokens`; the rows in
        use fit."""
        size, old = row_tokens(tokens), self._of.get(request)
        if old is not None and old.tokens >= size:
            return
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        if old is not None:
            at = old.requests.index(request)
            kept = [(keys[at].clone(), values[at].clone()) for keys, values in zip(old.keys, old.values, strict=True)]
            self.free(request)  # its row may be the room that the longer one needs
        array = self.arrays.get(size)
        if array is None:
            array = self.arrays[size] = RowArray(tokens=size, **self._make)
        if len(array.requests) == array.capacity:
            self._grow(array, room_tokens)
        row = len(array.requests)
        for layer in (*array.keys, *array.values):
            layer[row].zero_()  # the rest of an earlier request may be no number, and a mask does not hide that
        for layer, (keys, values) in enumerate(kept):
            array.keys[layer][row, :, : keys.shape[1]] = keys
            array.values[layer][row, :, : values.shape[1]] = values
        array.requests.append(request)
        self._of[request] = array

    def row(self, request: int) -> tuple[RowArray, int]:
        array = self._of[request]
        return array, array.requests.index(request)

    def free(self, request: int) -> None:
        """Free the request's row. No-op without one."""
        array = self._of.pop(request, None)
        if array is None:
            return
        at, last = array.requests.index(request), len(array.requests) - 1
        if at != last:
            for arrays in (array.keys, array.values):
                for layer in arrays:
                    layer[at] = layer[last]
            array.requests[at] = array.requests[last]
        array.requests.pop()

    def trim(self, room_tokens: float = 0) -> None:
        """Free unused memory until all arrays hold at most `room_tokens`."""
        for array in list(self.arrays.values()):
            if self.held_tokens <= room_tokens:
                return
            array.set_capacity(len(array.requests))
            if not array.requests:
                del self.arrays[array.tokens]

    def clear(self) -> None:
        self.arrays.clear()
        self._of.clear()

    def _grow(self, array: RowArray, room_tokens: float) -> None:
        wanted = max(_FEWEST_ROWS, 2 * array.capacity)
        held = self.held_tokens
        if held + (wanted - array.capacity) * array.tokens > room_tokens:
            self.trim(room_tokens - array.tokens)
            held = self.held_tokens
            wanted = array.capacity + max(1, min(wanted - array.capacity, int(room_tokens - held) // array.tokens))
        array.set_capacity(wanted)
        self.arrays[array.tokens] = array


_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_ODD = ("attn_logit_softcapping", "final_logit_softcapping", "no_rope_layers")
_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""They turn a token by its position alone; others (dynamic, longrope) depend on the longest text of the batch."""
_PROBE = 12


class ReadPart:
    """`count` tokens of one request that are read now, from `start` on."""

    def __init__(self, request: int, array: RowArray, *, start: int, count: int) -> None:
        self.request, self.array, self.start, self.count = request, array, start, count
        self.row = array.requests.index(request)

    def spans(self) -> list[tuple[int, int, int]]:
        """Return its request, first token and number of tokens."""
        return [(self.request, self.start, self.count)]


class DecodePart:
    """The first `len(positions)` rows of an array, each with one token at its position. Attention looks at tokens up to
    the largest of `places`, the positions on the host; without them at whole rows."""

    def __init__(
        self, array: RowArray, positions: torch.Tensor, *, dtype: torch.dtype, places: Sequence[int] = ()
    ) -> None:
        self.array, self.count, device = array, len(positions), positions.device
        self._places = places
        self.rows = torch.arange(self.count, device=device)
        self.positions = positions
        self.width = -(-(max(places) + 1) // 16) * 16 if places else array.tokens
        seen = torch.arange(self.width, device=device)[None, :] <= positions[:, None]
        self.mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, float("-inf"))[:, None, None]

    def spans(self) -> list[tuple[int, int, int]]:
        return [(id, place, 1) for id, place in zip(self.array.requests, self._places, strict=False)]


class _Layer:
    def __init__(self, layer: Any, *, packs: torch.dtype | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm, self.after = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = PackedLinear([attention.q_proj, attention.k_proj, attention.v_proj], packs=packs)
        self.out = PackedLinear([attention.o_proj], packs=packs)
        self.up = PackedLinear([mlp.gate_proj, mlp.up_proj], packs=packs)
        self.down = PackedLinear([mlp.down_proj], packs=packs)
        self.act = mlp.act_fn
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)


class LeanDecoder:
    """One model's layers. Not for several threads at once."""

    def __init__(self, model: Any, *, packs: torch.dtype | None = None) -> None:
        config, inner = model.config, model.model
        self._model = model
        self.device, self.dtype = next(model.parameters()).device, model.dtype
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.layers = [_Layer(layer, packs=packs) for layer in inner.layers]
        self._embed, self._norm, self._rotary = inner.embed_tokens, inner.norm, inner.rotary_emb
        self._head = PackedLinear([model.lm_head], packs=packs)
        self._attention = decode_attention(self.dtype, self.device)
        self._fuses = False

    @property
    def weights_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self._model.parameters())

    @property
    def vocabulary(self) -> int:
        return int(self._model.config.vocab_size)

    @property
    def packed_bytes(self) -> int:
        """Bytes of weight copies in addition to the model's own."""
        return sum(linear.packed_bytes for linear in self._linears())

    def fuse(self) -> None:
        """Store weights with the same input in one tensor; the model's own become views."""
        self._fuses = True
        for linear in self._linears():
            linear.fuse()

    def move(self, device: Any) -> None:
        for linear in self._linears():
            linear.unfuse()
        self._model.to(device)
        if self._fuses and torch.device(device).type != "cpu":
            self.fuse()

    def decode_part(self, array: RowArray, places: Sequence[int]) -> DecodePart:
        return DecodePart(array, torch.tensor(places, device=self.device), dtype=self.dtype, places=places)

    def new_store(self) -> KVStore:
        return KVStore(
            layers=len(self.layers), heads=self.kv_heads, size=self.size, dtype=self.dtype, device=self.device
        )

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        parts: Sequence[ReadPart | DecodePart],
        *,
        last: Sequence[int],
    ) -> torch.Tensor:
        """Return logits `[len(last), vocabulary]` after the tokens at the ascending places `last`; keys and values go
        into the cache. `tokens` and `positions` are those of all parts in turn."""
        places = torch.tensor(last, device=self.device) if len(last) < len(tokens) else None
        return self.forward_tensors(
            torch.tensor(tokens, device=self.device), torch.tensor(positions, device=self.device), parts, last=places
        )

    def forward_tensors(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        parts: Sequence[ReadPart | DecodePart],
        *,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward` with all numbers on the device; `last` None = every place."""
        x = self._embed(tokens)
        cos, sin = self._rotary(x[None], positions[None])
        cos, sin = cos[0][:, None], sin[0][:, None]
        sin = torch.cat((-sin[..., : self.size // 2], sin[..., self.size // 2 :]), dim=-1)
        q_width, kv_width = self.heads * self.size, self.kv_heads * self.size
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv(_norm(x, layer.norm))
            qk = qkv[:, : q_width + kv_width].view(len(tokens), -1, self.size)
            if layer.q_norm is not None:
                q, k = qk.split([self.heads, self.kv_heads], dim=1)
                qk = torch.cat([_norm(q, layer.q_norm), _norm(k, layer.k_norm)], dim=1)
            qk = torch.addcmul(qk * cos, qk.roll(self.size // 2, dims=-1), sin)
            v = qkv[:, q_width + kv_width :].view(len(tokens), -1, self.size)
            x = x + layer.out(self._attend(number, qk[:, : self.heads], qk[:, self.heads :], v, parts))
            up = layer.up(_norm(x, layer.after))
            half = up.shape[-1] // 2
            x = x + layer.down(layer.act(up[:, :half]) * up[:, half:])
        if last is not None:
            x = x[last]
        return self._head(_norm(x, self._norm))

    def _linears(self) -> list[PackedLinear]:
        every = [linear for layer in self.layers for linear in (layer.qkv, layer.out, layer.up, layer.down)]
        return [*every, self._head]

    def _attend(
        self, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Sequence[ReadPart | DecodePart]
    ) -> torch.Tensor:
        found, at = [], 0
        for part in parts:
            here = slice(at, at + part.count)
            at += part.count
            if isinstance(part, ReadPart):
                found.append(self._read(part, number, q[here], k[here], v[here]))
            else:
                found.append(self._decode(part, number, q[here], k[here], v[here]))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _read(self, part: ReadPart, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = part.array.keys[number][part.row], part.array.values[number][part.row]
        end = part.start + part.count
        keys[:, part.start : end] = k.transpose(0, 1)
        values[:, part.start : end] = v.transpose(0, 1)
        query, causal, mask = q.transpose(0, 1)[None], part.start == 0, None
        if not causal:
            mask = torch.ones(part.count, end, dtype=torch.bool, device=self.device).tril(part.start)
        out = scaled_dot_product_attention(
            query, keys[None, :, :end], values[None, :, :end], attn_mask=mask, is_causal=causal, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(part.count, -1)

    def _decode(self, part: DecodePart, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = part.array.keys[number], part.array.values[number]
        keys[part.rows, :, part.positions] = k
        values[part.rows, :, part.positions] = v
        keys, values = keys[: part.count, :, : part.width], values[: part.count, :, : part.width]
        return self._attention(q, keys, values, part.mask)


def decoder_of(model: Any, *, packs: torch.dtype | None = None) -> tuple[LeanDecoder | None, str]:
    """Return the model's lean decoder, or None and the reason. `packs`: the precision of a second copy of the weights,
    or None."""
    config = model.config
    if config.model_type not in _FAMILY:
        return None, f"the architecture {config.model_type} is none of {', '.join(sorted(_FAMILY))}"
    odd = [name for name in _ODD if getattr(config, name, None)]
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"} or odd:
        return None, f"its attention is not plain ({', '.join(odd) or 'a sliding window'})"
    rotation = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rotation.get("rope_type", rotation.get("type", "default"))
    if kind not in _ROTATIONS:
        return None, f"its positions are scaled by the longest text of a batch (rope_type {kind})"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return None, f"it sees a sliding window of {config.sliding_window} tokens"
    try:
        decoder = LeanDecoder(model, packs=packs)
        off = _difference(decoder, model)
    except Exception as error:  # another version of Transformers may build its modules otherwise
        return None, f"its modules are not as expected ({type(error).__name__}: {error})"
    if off > (1e-3 if model.dtype == torch.float32 else 0.15):
        return None, f"its own modules give other numbers (off by {off:.2g} of their spread)"
    return decoder, ""


def _difference(decoder: LeanDecoder, model: Any) -> float:
    ids = torch.arange(_PROBE, device=decoder.device) * 7 % model.config.vocab_size
    expected = model(input_ids=ids[None]).logits[0, -2:].float()
    store = decoder.new_store()
    store.ensure(0, tokens=_PROBE, room_tokens=float("inf"))
    array, _ = store.row(0)
    tokens, before = ids.tolist(), _PROBE - 1
    part: ReadPart | DecodePart = ReadPart(0, array, start=0, count=before)
    read = decoder.forward(tokens[:before], range(before), [part], last=[before - 1])
    part = decoder.decode_part(array, [before])
    written = decoder.forward(tokens[before:], [before], [part], last=[0])
    return float((torch.cat([read, written]).float() - expected).abs().mean() / expected.std())


def _norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
