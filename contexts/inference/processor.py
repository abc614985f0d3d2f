"""What the processor multiplies by itself: which way of computing is fastest depends on it.

Asked of PyTorch, once for each model. A processor that PyTorch says nothing about counts as one that multiplies half
precision, as do all that are not of the x86 family.
"""

from __future__ import annotations

import platform

import torch


def multiplies_tiles() -> bool:
    """The processor has matrix registers (Intel's AMX) that PyTorch uses."""
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(asked and asked())


def multiplies_half() -> bool:
    """The processor has instructions for `bfloat16`. Without them, each product turns its numbers into `float32`
    first, the weights too, at every call."""
    asked = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return asked is None or platform.machine() not in ("x86_64", "AMD64") or bool(asked()) or multiplies_tiles()
