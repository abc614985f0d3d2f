"""Settings of PyTorch and Transformers for loaders of ready-made models. It loads both."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import logging as transformers_logging


def dtype_of(dtype: str, *, path: str, device: str) -> Any:
    """What weights are computed in: as it is named, and with `auto` float32 on a CPU and the model's own on a GPU
    (bfloat16 for a GGUF file, which has none)."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device == "cpu":
        return torch.float32
    return torch.bfloat16 if path.endswith(".gguf") else "auto"


def be_quiet() -> None:
    """Have Transformers show no progress bars in a library's log."""
    transformers_logging.disable_progress_bar()
