"""Compare engines: a sweep of mixed output lengths (8 to 128 new tokens, SmolLM2, bfloat16), in tokens a second.

    python -m benchmarks.side benchmarks.serving.engines sweep vllm=ENVIRONMENT/bin/python rounds=5 > engines.json

Requests are claims of the fact verification demo, each with a fixed number of new tokens. Each round runs every engine
once, in a new process. `vllm`: a Python with vLLM. For the static batch, the best number of rows counts.
"""

from __future__ import annotations

import datetime
import importlib.resources
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.harness import ROOT, machine, output_of, ratios, run_side, spread

TITLES = {
    "continuous": "Stoker's continuous engine",
    "static": "Stoker's static engine, at its best number of rows",
    "vllm-script": "vLLM in a script: LLM.generate, compiled or eager",
    "vllm": "Stoker's vLLM engine",
}
WAYS: dict[str, list[dict[str, Any]]] = {
    "static": [{"rows": 16}, {"rows": 32}, {"rows": 64}], "vllm-script": [{}, {"eager": True}],
}  # fmt: skip
"""Options of the runs of an engine; the best run counts."""
RATIOS = (("continuous", "static"), ("continuous", "vllm-script"), ("vllm", "vllm-script"))
_CONVERT = (
    "import torch; from stoker.contexts.causal_lm import default_model;"
    " from stoker.contexts.snapshot import prepare_weights_folder;"
    " print(prepare_weights_folder(default_model(), dtype=torch.bfloat16)[0])"
)
Requests = list[tuple[str, int]]
Write = Callable[[Requests], int]
"""Write the texts of requests; return the number of tokens."""


def sweep(vllm: str = "", rounds: int = 3, requests: int = 96) -> dict[str, Any]:
    """Measure every engine. Without `vllm`, the engines with vLLM are skipped."""
    reasons = {} if vllm else dict.fromkeys(("vllm-script", "vllm"), "give vllm")
    found: dict[str, list[float]] = {}
    loads: list[float] = []
    say = partial(print, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        model = _convert_model(folder)
        for number in range(rounds):
            loads.append(round(os.getloadavg()[0], 2))
            for name in (side for side in TITLES if side not in reasons):
                try:
                    rates = [_rate(name, vllm, model, requests, **way) for way in WAYS.get(name, [{}])]
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    reasons[name] = str(error)[-600:]
                    found.pop(name, None)
                    continue
                found.setdefault(name, []).append(max(rates))
                say(f"round {number + 1}: {name} {', '.join(f'{rate:.0f}' for rate in rates)} tokens/s")
    for name, several in found.items():
        say(f"{TITLES[name]:52} {spread(several)} tokens/s")
    for above, below in RATIOS:
        if len(found.get(above, ())) == len(found.get(below, ())) > 0:
            say(f"{above} against {below:40} {spread(ratios(found[above], found[below]), digits=2)}")
    for name, reason in reasons.items():
        say(f"{TITLES[name]}: not measured: {reason}")
    return {
        "machine": machine(), "at": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", "rounds": rounds,
        "requests": requests, "load": loads, "tokens_per_s": found, "skipped": reasons,
    }  # fmt: skip


def _rate(name: str, vllm: str, model: str, requests: int, **way: Any) -> float:
    environment = {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }  # fmt: skip
    python = vllm if name.startswith("vllm") else sys.executable
    how: dict[str, Any] = {"timeout_s": 1800, "environment": environment, "python": python}
    found = run_side(side, **how, engine=name, model=model, requests=requests, **way)
    return float(found["tokens"] / found["seconds"])


def _convert_model(folder: str) -> str:
    environment = {**os.environ, "STOKER_SNAPSHOTS": folder, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _CONVERT]
    return output_of(command, timeout_s=300, folder=folder, environment=environment).splitlines()[-1]


# ---- one side


def requests_of(count: int) -> Requests:
    data = importlib.resources.files("stoker.apps.fact_verification") / "data" / "fever_sample.jsonl"
    claims = [json.loads(line)["claim"] for line in data.read_text().splitlines()]
    chance = random.Random(13)
    chosen = [claims[number % len(claims)] for number in range(count)]
    return [(f"Claim: {claim}\nExplain in a paragraph whether it is true:", chance.randint(8, 128)) for claim in chosen]


def side(engine: str, model: str, requests: int, **way: Any) -> dict[str, float]:
    write = SIDES[engine](model, **way)
    asked = requests_of(requests)
    write([(prompt, 8) for prompt, _ in asked[:4]])
    began = time.perf_counter()
    tokens = write(asked)
    seconds = time.perf_counter() - began
    expected = sum(most for _, most in asked)
    if tokens != expected:
        raise SystemExit(f"{engine} wrote {tokens} tokens, not {expected}")
    return {"tokens": tokens, "seconds": seconds}


def _parts(folder: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().requires_grad_(False)
    model.generation_config.eos_token_id = []
    return model, AutoTokenizer.from_pretrained(folder)


def _calls(model: Any) -> Write:
    def call(request: tuple[str, int]) -> int:
        model.generate([request[0]], max_new_tokens=request[1])
        return request[1]

    def write(requests: Requests) -> int:
        before = model.batch_load().new_tokens
        with ThreadPoolExecutor(model.slots()) as threads:
            list(threads.map(call, requests))
        return int(model.batch_load().new_tokens - before)

    return write


def _continuous(folder: str) -> Write:
    from stoker.contexts.language_model import CausalLM

    return _calls(CausalLM(*_parts(folder), engine="continuous"))


def _static(folder: str, *, rows: int) -> Write:
    from stoker.contexts.forward import ModelRunner
    from stoker.contexts.inference.adapter import GenerationRequest, ModelTexts, Sampling
    from stoker.contexts.inference.static import StaticEngine

    model, tokenizer = _parts(folder)
    texts = ModelTexts(decode=tokenizer.decode, ends=frozenset(), longest=0)
    engine = StaticEngine(ModelRunner(model, limit_bytes=512_000_000), texts, rows=rows)

    def write(requests: Requests) -> int:
        for number, (prompt, most) in enumerate(requests):
            ids = tuple(tokenizer(prompt)["input_ids"])
            engine.add(GenerationRequest(number, ids, Sampling(max_new_tokens=most)))
        written = 0
        while new := engine.step():
            written += len(new)
        return written

    return write


def _script(folder: str, *, eager: bool = False) -> Write:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, dtype="bfloat16", disable_log_stats=True, kv_cache_memory_bytes=2_000_000_000,
        enforce_eager=eager,
    )  # fmt: skip

    def write(requests: Requests) -> int:
        wishes = [SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True) for _, most in requests]
        found = llm.generate([prompt for prompt, _ in requests], wishes, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in found)

    return write


def _stoker_vllm(folder: str) -> Write:
    from transformers import AutoTokenizer

    from stoker.contexts.engine_settings import EngineSettings
    from stoker.contexts.inference.vllm_engine import VLLMEngine
    from stoker.contexts.inference.vllm_start import VLLMStart
    from stoker.contexts.language_model import CausalLM
    from stoker.contexts.prompts import PromptReader

    tokenizer = AutoTokenizer.from_pretrained(folder)
    start = VLLMStart(folder, dtype="bfloat16", settings=EngineSettings())
    engine = VLLMEngine(start, PromptReader(tokenizer, ends=frozenset(), longest=0))
    return _calls(CausalLM(None, tokenizer, engine=engine))


SIDES: dict[str, Callable[..., Write]] = {
    "continuous": _continuous, "static": _static, "vllm-script": _script, "vllm": _stoker_vllm,
}  # fmt: skip
