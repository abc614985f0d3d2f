"""What a language model's cache of keys and values takes, told by its config.json before anything is loaded.

A policy that shares devices by the token (SLINFER §VII) reserves memory by it: each token of a request takes
`token_bytes`, and what a recipe declares has room for the longest text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from stoker.contexts.recipe import Needs

_LONGEST_UNDECLARED = 4096
"""Where no memory is declared, what is measured of a library counts as room for a text of so many tokens at most."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOST = 1 << 24


def with_cache(needs: Needs, source: str, *, dtype: str) -> Needs:
    """The needs of a model in the folder `source`, with what its cache takes; as they are where nobody can tell."""
    try:
        config = json.loads((Path(source) / "config.json").read_text())
        weights = sum(file.stat().st_size for file in Path(source).glob("*.safetensors"))
    except (OSError, ValueError, RecursionError):
        return needs
    on_cpu = not needs.kinds or "cpu" in needs.kinds
    token_bytes = _token_bytes(config, dtype=dtype, on_cpu=on_cpu) if isinstance(config, dict) else 0
    longest = _number(config, "max_position_embeddings")
    if not token_bytes or not longest:
        return needs
    declared = needs.device_memory_bytes or needs.memory_bytes  # a GPU's memory counts where both are said
    if on_cpu:
        declared = max(needs.memory_bytes, needs.device_memory_bytes)
    room = max(0, declared - weights) // token_bytes if declared else _LONGEST_UNDECLARED
    return msgspec.structs.replace(needs, token_bytes=token_bytes, cache_tokens=min(longest, room))


def _token_bytes(config: Any, *, dtype: str, on_cpu: bool) -> int:
    """Bytes of the keys and values of one token in all layers; 0 where the configuration does not tell. `auto` is
    float32 on a CPU and the model's own on a GPU: the larger, where it may be loaded on both."""
    layers, heads = _number(config, "num_hidden_layers"), _number(config, "num_attention_heads")
    width = _number(config, "head_dim") or (_number(config, "hidden_size") // heads if heads else 0)
    own = dtype
    if dtype == "auto":
        own = "float32" if on_cpu else str(config.get("torch_dtype") or config.get("dtype"))
    return 2 * layers * (_number(config, "num_key_value_heads") or heads) * width * _DTYPE_BYTES.get(own, 4)


def _number(config: Any, name: str) -> int:
    found = config.get(name) if isinstance(config, dict) else None
    return found if type(found) is int and 0 < found <= _MOST else 0
