"""Matrix products and decode attention, computed in the way that is fastest on this processor.

On a CPU, PyTorch's linear layer reorders the weights at every call, which takes longer than the product for the few
rows of a decode step (docs/decisions/058). oneDNN keeps a copy in the order that its kernels read. A processor without
`bfloat16` instructions multiplies `float32` four times as fast, so the copy is in `float32` there, and each product is
rounded to the model's precision.

PyTorch has one call for attention, the fastest of three equal ways on some processors and up to seven times slower than
the best on others. The way depends on the processor and the precision alone, never on the batch: a request gets the
same tokens on every pilot of one kind.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

# ---- processor


def multiplies_tiles() -> bool:
    """The processor has matrix registers (Intel's AMX) that PyTorch uses."""
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(asked and asked())


def multiplies_half() -> bool:
    """The processor has instructions for `bfloat16`. Without them, each product turns its numbers into `float32`
    first, the weights too, at every call."""
    asked = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return asked is None or platform.machine() not in ("x86_64", "AMD64") or bool(asked()) or multiplies_tiles()


# ---- linear


_ROWS_EXPECTED = 64
"""Rows for which the order is chosen."""


def packed_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The precisions that a copy of weights of this precision may have on a CPU, the fastest first."""
    if dtype == torch.bfloat16 and not multiplies_half():
        return torch.float32, dtype
    return (dtype,) if dtype in (torch.float32, torch.bfloat16) else ()


class PackedLinear:
    """Several linear layers over the same input, as one product where that is faster. `packs`: the precision of the
    copy in the processor's order; None = without one."""

    def __init__(self, layers: Sequence[Any], *, packs: torch.dtype | None) -> None:
        self._layers = list(layers)
        self._packed: Any = None
        self._fused: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self.packed_bytes = 0
        """Bytes of the copy in the processor's order."""
        weight = self._layers[0].weight
        self._widens = packs is not None and packs != weight.dtype
        if packs is not None and weight.device.type == "cpu":
            self._pack(packs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, all outputs, one layer's after the other's]`."""
        if self._packed is not None:  # for one row too, though it takes longer: a row comes out the same beside others
            wide = x.float() if self._widens else x
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(wide, self._packed, self._bias, "none", [], "")
            return product.to(x.dtype)
        if self._fused is not None:
            return linear(x, self._fused, self._bias)
        if len(self._layers) == 1:
            return linear(x, self._layers[0].weight, self._layers[0].bias)
        return torch.cat([linear(x, layer.weight, layer.bias) for layer in self._layers], dim=-1)

    def fuse(self) -> None:
        """Store the layers' weights in one tensor, of which each layer's weight becomes a view."""
        if len(self._layers) == 1 or self._packed is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._fused = torch.cat([layer.weight.data for layer in self._layers])
            parts = self._fused.split([len(layer.weight) for layer in self._layers])
            for layer, part in zip(self._layers, parts, strict=True):
                layer.weight.data = part
            self._bias = self._joined_bias(self._fused.dtype)

    def unfuse(self) -> None:
        """Compute a product for each layer again, so that their weights can move."""
        if self._fused is not None:
            self._fused = self._bias = None

    def _joined_bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        if all(layer.bias is None for layer in self._layers):
            return None
        return torch.cat(
            [
                layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias.detach()
                for layer in self._layers
            ]
        ).to(dtype)

    def _pack(self, dtype: torch.dtype) -> None:
        weight = torch.cat([layer.weight.detach() for layer in self._layers]).to(dtype)
        self._bias = self._joined_bias(dtype)
        try:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_EXPECTED)
        except (AttributeError, RuntimeError):  # a build without oneDNN, or a processor that it does not serve
            return
        self.packed_bytes = weight.numel() * weight.element_size()


# ---- attention


DecodeAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes queries `[rows, heads, size]`, keys and values `[rows, key heads, tokens, size]`, and a mask `[rows, 1, 1,
tokens]` of 0 and minus infinity; returns `[rows, heads * size]`. `heads` is a multiple of `key heads`."""


def decode_attention(dtype: torch.dtype, device: Any) -> DecodeAttention:
    """The fastest way for this precision on this kind of device."""
    if device.type != "cpu":
        return ON_GPU
    if dtype == torch.float32:
        return as_products
    if multiplies_tiles():
        return shared_keys
    return as_products if multiplies_half() else grouped_queries


def shared_keys(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """PyTorch's kernel, which shares a key between the heads of its group."""
    out = scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)
    return out.reshape(len(q), -1)


def grouped_queries(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same kernel, to which the heads that share a key are queries of one head: keys and values, which it turns
    into `float32`, are read once for all of them."""
    rows, key_heads, _, size = keys.shape
    out = scaled_dot_product_attention(q.view(rows, key_heads, -1, size), keys, values, attn_mask=mask)
    return out.reshape(rows, -1)


def as_products(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Two batches of matrix products with a softmax between them. Keys stand on the left: the processor reads them in
    the order in which they lie."""
    rows, key_heads, _, size = keys.shape
    grouped = q.view(rows, key_heads, -1, size)
    scores = torch.matmul(keys, grouped.transpose(2, 3)).transpose(2, 3).contiguous()
    chances = scores.mul_(size**-0.5).add_(mask).softmax(dim=-1)
    return torch.matmul(chances, values).reshape(rows, -1)


ON_GPU: DecodeAttention = grouped_queries
"""The way on a GPU. With a mask, PyTorch's `enable_gqa` has no fused CUDA kernel: it copies keys and values for each
head and computes in `float32`. Grouped queries keep to the memory-efficient kernel."""
