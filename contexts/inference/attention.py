"""Attention of a decode step: one new token of each request over the keys and values of its row.

PyTorch has one call for it, which is the fastest of three equal ways on some processors and four to seven times slower
than the best on others (measured: docs/decisions/058). The way is chosen by the kind of processor and the precision
alone, never by the number of rows or by a trial run: a request gets the same tokens whoever shares its batch, and on
every pilot of one kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from stoker.contexts.inference.processor import multiplies_half, multiplies_tiles

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
