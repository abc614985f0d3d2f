"""Compare tokens per second of requests to 8 LoRA adapters in one batch with the same requests to the base model.

The base is SmolLM2-135M. The adapters have random weights, rank 8, on all projections. Rounds alternate in one process.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import MODEL, need, ratios, run_side
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.causal_lm import default_model

if TYPE_CHECKING:
    from stoker.contexts import CausalLM

ADAPTERS, RANK = 8, 8


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need(*MODEL)
    lines = []
    for requests in (8, 32):
        found = run_side(side, requests=requests, rounds=1 if quick else 5, timeout_s=3600)
        shares = ratios(found["mixed"], found["base"])
        say(f"{requests} requests: {', '.join(f'{share:.2f}' for share in shares)} of the base's tokens/s")
        cells = {"base": found["base"], "8 adapters": found["mixed"], "share": shares}
        lines.append(Line(what=f"{requests} requests at once", cells=cells, bar=Bar(at_least=0.8)))
    return Table(lines=lines)


def side(requests: int, rounds: int) -> dict[str, list[float]]:
    from stoker.contexts.model_loading import load_model

    with tempfile.TemporaryDirectory() as folder:
        places = {str(number): Path(folder, str(number)) for number in range(ADAPTERS)}
        base = load_model(default_model(), engine="continuous")
        for place in places.values():
            _write_adapter(base, place)
        del base
        adapters = {name: str(place) for name, place in places.items()}
        loaded = load_model(default_model(), engine="continuous", adapters=adapters)
        found: dict[str, list[float]] = {"base": [], "mixed": []}
        for turn in range(rounds + 1):
            for what in sorted(found, reverse=turn % 2 > 0):
                rate = _tokens_per_s(loaded, requests, mixed=what == "mixed")
                if turn:  # the first round warms up and loads the adapters
                    found[what].append(rate)
    return found


def _tokens_per_s(model: CausalLM, requests: int, *, mixed: bool) -> float:
    def write(number: int) -> int:
        adapter = str(number % ADAPTERS) if mixed else ""
        prompt = f"Request {number}: the history of adapters in {1900 + number} began"
        options = {"ignore_eos": True}
        return model.complete(prompt, max_new_tokens=64, adapter=adapter, engine_options=options).completion_tokens

    model.forget_prefixes()
    began = time.perf_counter()
    with ThreadPoolExecutor(requests) as pool:
        return sum(pool.map(write, range(requests))) / (time.perf_counter() - began)


def _write_adapter(model: CausalLM, folder: Path) -> None:
    import safetensors.torch
    import torch

    tensors = {}
    for name, module in model.model.named_modules():
        if name.endswith("_proj"):
            gives, takes = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, takes) / takes**0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(gives, RANK) / 10
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": RANK, "r": RANK}))
