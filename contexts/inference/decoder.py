"""A fast decoder for models of the Llama family, and its key-value cache.

Transformers' modules are slow for small models on a CPU (docs/decisions/058). Here, all tokens of a step form one
tensor `[tokens, width]`. Attention processes one request at a time in prefill, and all rows of an array in decode.

A request has one row of keys and values in an array of rows with equal length, a power of two. Attention therefore does
at most twice the necessary work. If a request leaves, the last row of the array moves to the free row. Paged memory
(vLLM §4.1, arXiv:2309.06180) wastes less memory, but needs another kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from stoker.contexts.adapter_files import BaseShapes
from stoker.contexts.batching import rounded_row_tokens
from stoker.contexts.inference.kernels import PackedLinear, choose_decode_attention
from stoker.contexts.inference.peft_adapters import AdaptedTokens

_MIN_ROWS = 4


class RowArray:
    """Cached keys and values of some requests, one tensor `[rows, heads, tokens, size]` of each per layer."""

    def __init__(self, *, tokens: int, heads: int, size: int, dtype: torch.dtype, devices: Sequence[Any]) -> None:
        self.tokens = tokens
        self.requests: list[int] = []
        self._shape = (heads, tokens, size)
        self._devices, self._dtype = devices, dtype
        self.capacity = 0
        self.version = 0  # number of times that the keys and values were moved to other memory
        self.keys = [self._empty(0, device) for device in devices]
        self.values = [self._empty(0, device) for device in devices]

    def set_capacity(self, rows: int) -> None:
        used = len(self.requests)
        self.version += 1
        self.capacity = min(self.capacity, max(rows, used))  # if an allocation below fails, some layers have fewer rows
        for arrays in (self.keys, self.values):
            for layer, old in enumerate(arrays):
                new = self._empty(max(rows, used), self._devices[layer])
                new[:used] = old[:used]
                arrays[layer] = new
        self.capacity = max(rows, used)

    def _empty(self, rows: int, device: Any) -> torch.Tensor:
        return torch.empty((rows, *self._shape), dtype=self._dtype, device=device)


class KVStore:
    def __init__(self, *, heads: int, size: int, dtype: torch.dtype, devices: Sequence[Any]) -> None:
        self._make = {"heads": heads, "size": size, "dtype": dtype, "devices": devices}
        self.token_bytes: int = 2 * max(Counter(devices).values()) * heads * size * dtype.itemsize
        """Bytes of a cached token on the device with the most layers."""
        self.arrays: dict[int, RowArray] = {}
        self._array_by_request: dict[int, RowArray] = {}

    @property
    def allocated_tokens(self) -> int:
        return sum(array.tokens * array.capacity for array in self.arrays.values())

    @property
    def held_bytes(self) -> int:
        return self.token_bytes * self.allocated_tokens

    def ensure_row(self, request: int, *, tokens: int, room_tokens: float) -> None:
        """Give a request a row for at least `tokens` tokens. All arrays together may hold at most `room_tokens`
        tokens.
        """
        size, old = rounded_row_tokens(tokens), self._array_by_request.get(request)
        if old is not None and old.tokens >= size:
            return
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        if old is not None:
            at = old.requests.index(request)
            kept = [(keys[at].clone(), values[at].clone()) for keys, values in zip(old.keys, old.values, strict=True)]
            self.free_row(request)  # free the old row first, because the longer row may need its memory
        array = self.arrays.get(size)
        if array is None:
            array = self.arrays[size] = RowArray(tokens=size, **self._make)
        if len(array.requests) == array.capacity:
            self._grow(array, room_tokens)
        row = len(array.requests)
        for layer in (*array.keys, *array.values):
            layer[row].zero_()  # old content may contain NaN, which a mask does not hide
        for layer, (keys, values) in enumerate(kept):
            array.keys[layer][row, :, : keys.shape[1]] = keys
            array.values[layer][row, :, : values.shape[1]] = values
        array.requests.append(request)
        self._array_by_request[request] = array

    def find_row(self, request: int) -> tuple[RowArray, int]:
        array = self._array_by_request[request]
        return array, array.requests.index(request)

    def free_row(self, request: int) -> None:
        array = self._array_by_request.pop(request, None)
        if array is None:
            return
        at, last = array.requests.index(request), len(array.requests) - 1
        if at != last:
            for arrays in (array.keys, array.values):
                for layer in arrays:
                    layer[at] = layer[last]
            array.requests[at] = array.requests[last]
        array.requests.pop()

    def free_unused_memory(self, room_tokens: float) -> None:
        """Free unused memory until all arrays together have at most `room_tokens` tokens."""
        for array in list(self.arrays.values()):
            if self.allocated_tokens <= room_tokens:
                return
            array.set_capacity(len(array.requests))
            if not array.requests:
                del self.arrays[array.tokens]

    def clear(self) -> None:
        self.arrays.clear()
        self._array_by_request.clear()

    def _grow(self, array: RowArray, room_tokens: float) -> None:
        wanted = max(_MIN_ROWS, 2 * array.capacity)
        if self.allocated_tokens + (wanted - array.capacity) * array.tokens > room_tokens:
            self.free_unused_memory(room_tokens - array.tokens)
            fits = int(room_tokens - self.allocated_tokens) // array.tokens
            wanted = array.capacity + max(1, min(wanted - array.capacity, fits))
        array.set_capacity(wanted)
        self.arrays[array.tokens] = array


_SUPPORTED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_UNSUPPORTED_SETTINGS = ("attn_logit_softcapping", "final_logit_softcapping", "no_rope_layers")
_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Types of rotary embeddings that depend only on a token's position. (Others also depend on the longest text.)"""
_PROBE_TOKENS = 12


class ReadPart:
    def __init__(self, request: int, array: RowArray, *, start: int, count: int) -> None:
        self.request, self.array, self.start, self.count = request, array, start, count
        self.row = array.requests.index(request)

    def token_ranges(self) -> list[tuple[int, int, int]]:
        return [(self.request, self.start, self.count)]


class DecodePart:
    """A decode step of the first rows of an array. `places`: the positions as Python integers, if known, so that
    attention can end at the largest position.
    """

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
        self._copies_by_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def tensors_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if device == self.positions.device:
            return self.rows, self.positions, self.mask
        if device not in self._copies_by_device:
            self._copies_by_device[device] = self.rows.to(device), self.positions.to(device), self.mask.to(device)
        return self._copies_by_device[device]

    def token_ranges(self) -> list[tuple[int, int, int]]:
        return [(id, place, 1) for id, place in zip(self.array.requests, self._places, strict=False)]


class _Layer:
    def __init__(self, layer: Any, *, copy_dtype: torch.dtype | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.device = attention.q_proj.weight.device
        self.norm, self.after = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = PackedLinear([attention.q_proj, attention.k_proj, attention.v_proj], copy_dtype=copy_dtype)
        self.out = PackedLinear([attention.o_proj], copy_dtype=copy_dtype)
        self.up = PackedLinear([mlp.gate_proj, mlp.up_proj], copy_dtype=copy_dtype)
        self.down = PackedLinear([mlp.down_proj], copy_dtype=copy_dtype)
        self.act = mlp.act_fn
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)


class LeanDecoder:
    """The layers of one model of the Llama family. Not thread-safe."""

    def __init__(self, model: Any, *, copy_dtype: torch.dtype | None = None) -> None:
        config, inner = model.config, model.model
        self._model = model
        self._homes = {name: part.device for name, part in _named_tensors(model)}
        self.device, self.dtype = next(model.parameters()).device, model.dtype
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.layers = [_Layer(layer, copy_dtype=copy_dtype) for layer in inner.layers]
        self._embed, self._norm, self._rotary = inner.embed_tokens, inner.norm, inner.rotary_emb
        self._head = PackedLinear([model.lm_head], copy_dtype=copy_dtype)
        self._attention = choose_decode_attention(self.dtype, self.device)
        self._fuses = False

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights on the device with the most weights."""
        found = Counter[torch.device]()
        for name, part in self._model.named_parameters():
            found[self._homes[name]] += part.nbytes
        return max(found.values())

    @property
    def vocabulary(self) -> int:
        return int(self._model.config.vocab_size)

    @property
    def packed_bytes(self) -> int:
        return sum(linear.packed_bytes for linear in self._all_linears())

    def projection_shapes(self) -> BaseShapes:
        first = self._model.model.layers[0]
        modules = {**dict(first.self_attn.named_children()), **dict(first.mlp.named_children())}
        found = {
            name: (int(module.weight.shape[1]), int(module.weight.shape[0]))
            for name, module in modules.items()
            if name.endswith("_proj")
        }
        return BaseShapes(len(self.layers), int(self._model.config.hidden_size), found)

    def fuse_weights(self) -> None:
        """Store the weights of layers with the same input in one tensor."""
        self._fuses = True
        for linear in self._all_linears():
            linear.fuse_weights()

    def move_weights_to_host(self) -> None:
        for linear in self._all_linears():
            linear.release_fused_weights()
        for _, part in _named_tensors(self._model):
            part.data = part.data.to("cpu")

    def move_weights_to_devices(self) -> None:
        for name, part in _named_tensors(self._model):
            part.data = part.data.to(self._homes[name])
        if self._fuses:
            self.fuse_weights()

    def decode_part(self, array: RowArray, places: Sequence[int]) -> DecodePart:
        return DecodePart(array, torch.tensor(places, device=self.device), dtype=self.dtype, places=places)

    def new_store(self) -> KVStore:
        return KVStore(
            heads=self.kv_heads, size=self.size, dtype=self.dtype, devices=[layer.device for layer in self.layers]
        )

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        parts: Sequence[ReadPart | DecodePart],
        *,
        last: Sequence[int],
    ) -> torch.Tensor:
        """Copy tokens to the device and compute their states. Return the logits `[len(last), vocabulary]` of the tokens
        at the indices `last`.
        """
        given = torch.tensor([list(tokens), list(positions)], device=self.device)
        return self.compute_logits(self.compute_states(given[0], given[1], parts), last)

    def compute_logits(self, states: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        """Return the logits `[len(places), vocabulary]` of rows of `states`. `places` must be ascending."""
        if len(places) < len(states):
            states = states[torch.tensor(places, device=self.device)]
        return self._head(_apply_norm(states, self._norm))

    def compute_states(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        parts: Sequence[ReadPart | DecodePart],
        *,
        adapted: AdaptedTokens | None = None,
    ) -> torch.Tensor:
        """Compute the parts in order, write their keys and values, and return the hidden states `[tokens, width]`."""

        def apply_projection(number: int, group: str, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = getattr(self.layers[number], group)(x)
            if adapted is not None:
                adapted.add_lora(number, group, x, out)
            return out

        x = self._embed(tokens)
        if adapted is not None:
            adapted.insert_soft_prompts(x)
        cos, sin = self._rotary(x[None], positions[None])
        cos, sin = cos[0][:, None], sin[0][:, None]
        sin = torch.cat((-sin[..., : self.size // 2], sin[..., self.size // 2 :]), dim=-1)
        q_width, kv_width = self.heads * self.size, self.kv_heads * self.size
        for number, layer in enumerate(self.layers):
            if layer.device != x.device:
                x, cos, sin = x.to(layer.device), cos.to(layer.device), sin.to(layer.device)
            qkv = apply_projection(number, "qkv", _apply_norm(x, layer.norm))
            qk = qkv[:, : q_width + kv_width].view(len(tokens), -1, self.size)
            if layer.q_norm is not None:
                q, k = qk.split([self.heads, self.kv_heads], dim=1)
                qk = torch.cat([_apply_norm(q, layer.q_norm), _apply_norm(k, layer.k_norm)], dim=1)
            qk = torch.addcmul(qk * cos, qk.roll(self.size // 2, dims=-1), sin)
            v = qkv[:, q_width + kv_width :].view(len(tokens), -1, self.size)
            x = x + apply_projection(
                number, "out", self._attend_parts(number, qk[:, : self.heads], qk[:, self.heads :], v, parts)
            )
            up = apply_projection(number, "up", _apply_norm(x, layer.after))
            half = up.shape[-1] // 2
            x = x + apply_projection(number, "down", layer.act(up[:, :half]) * up[:, half:])
        return x.to(self.device)

    def _all_linears(self) -> list[PackedLinear]:
        every = [linear for layer in self.layers for linear in (layer.qkv, layer.out, layer.up, layer.down)]
        return [*every, self._head]

    def _attend_parts(
        self, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Sequence[ReadPart | DecodePart]
    ) -> torch.Tensor:
        found, at = [], 0
        for part in parts:
            here = slice(at, at + part.count)
            at += part.count
            attend: Any = self._attend_prompt if isinstance(part, ReadPart) else self._attend_decode
            found.append(attend(part, number, q[here], k[here], v[here]))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend_prompt(
        self, part: ReadPart, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        keys, values = part.array.keys[number][part.row], part.array.values[number][part.row]
        end = part.start + part.count
        keys[:, part.start : end] = k.transpose(0, 1)
        values[:, part.start : end] = v.transpose(0, 1)
        query, causal, mask = q.transpose(0, 1)[None], part.start == 0, None
        if not causal:
            mask = torch.ones(part.count, end, dtype=torch.bool, device=q.device).tril(part.start)
        out = scaled_dot_product_attention(
            query, keys[None, :, :end], values[None, :, :end], attn_mask=mask, is_causal=causal, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(part.count, -1)

    def _attend_decode(
        self, part: DecodePart, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        keys, values = part.array.keys[number], part.array.values[number]
        rows, positions, mask = part.tensors_on(q.device)
        keys[rows, :, positions] = k
        values[rows, :, positions] = v
        keys, values = keys[: part.count, :, : part.width], values[: part.count, :, : part.width]
        return self._attention(q, keys, values, mask)


def build_lean_decoder(model: Any, *, copy_dtype: torch.dtype | None = None) -> tuple[LeanDecoder | None, str]:
    """Return a fast decoder for the model, or None and the reason. `copy_dtype`: dtype of a reordered copy of the
    weights, if one is wanted.
    """
    config = model.config
    if config.model_type not in _SUPPORTED_MODEL_TYPES:
        return None, f"the architecture {config.model_type} is none of {', '.join(sorted(_SUPPORTED_MODEL_TYPES))}"
    odd = [name for name in _UNSUPPORTED_SETTINGS if getattr(config, name, None)]
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"} or odd:
        return None, f"its attention is not full attention ({', '.join(odd) or 'a sliding window'})"
    rotation = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rotation.get("rope_type", rotation.get("type", "default"))
    if kind not in _ROTATIONS:
        return None, f"its positions are scaled by the longest text of a batch (rope_type {kind})"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return None, f"its attention has a sliding window of {config.sliding_window} tokens"
    try:
        decoder = LeanDecoder(model, copy_dtype=copy_dtype)
        off = _measure_difference(decoder, model)
    except Exception as error:  # other versions of Transformers may have other modules
        return None, f"its modules are not as expected ({type(error).__name__}: {error})"
    if off > (1e-3 if model.dtype == torch.float32 else 0.15):
        return None, f"the model's own modules compute other values (off by {off:.2g} standard deviations)"
    return decoder, ""


def _measure_difference(decoder: LeanDecoder, model: Any) -> float:
    ids = torch.arange(_PROBE_TOKENS, device=decoder.device) * 7 % model.config.vocab_size
    expected = model(input_ids=ids[None]).logits[0, -2:].float()
    store = decoder.new_store()
    store.ensure_row(0, tokens=_PROBE_TOKENS, room_tokens=float("inf"))
    array, _ = store.find_row(0)
    tokens, before = ids.tolist(), _PROBE_TOKENS - 1
    part: ReadPart | DecodePart = ReadPart(0, array, start=0, count=before)
    read = decoder.forward(tokens[:before], range(before), [part], last=[before - 1])
    part = decoder.decode_part(array, [before])
    written = decoder.forward(tokens[before:], [before], [part], last=[0])
    return float((torch.cat([read, written]).float() - expected).abs().mean() / expected.std())


def _named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _apply_norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
