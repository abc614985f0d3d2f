"""One engine writes a sweep of mixed output lengths; prints new tokens and seconds as JSON.

    python -m benchmarks.serving.engines_side continuous --model FOLDER --requests 96

Requests are claims of the fact verification demo, each with a fixed number of new tokens.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Requests = list[tuple[str, int]]
Write = Callable[[Requests], int]
"""Write the texts of requests; return the number of tokens."""


def requests_of(count: int) -> Requests:
    data = importlib.resources.files("stoker.apps.fact_verification") / "data" / "fever_sample.jsonl"
    claims = [json.loads(line)["claim"] for line in data.read_text().splitlines()]
    chance = random.Random(13)
    chosen = [claims[number % len(claims)] for number in range(count)]
    return [(f"Claim: {claim}\nExplain in a paragraph whether it is true:", chance.randint(8, 128)) for claim in chosen]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("engine", choices=SIDES)
    ask.add_argument("--model", default="", help="folder of safetensors")
    ask.add_argument("--requests", type=int, default=96)
    ask.add_argument("--rows", type=int, default=32, help="rows of a static batch")
    ask.add_argument("--eager", action="store_true", help="run vLLM in a script without torch.compile")
    asked = ask.parse_args()
    write = SIDES[asked.engine](asked)
    requests = requests_of(asked.requests)
    write([(prompt, 8) for prompt, _ in requests[:4]])
    began = time.perf_counter()
    tokens = write(requests)
    seconds = time.perf_counter() - began
    expected = sum(most for _, most in requests)
    if tokens != expected:
        raise SystemExit(f"{asked.engine} wrote {tokens} tokens, not {expected}")
    print(json.dumps({"tokens": tokens, "seconds": seconds}))


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


def _continuous(asked: argparse.Namespace) -> Write:
    from stoker.contexts.language_model import CausalLM

    model, tokenizer = _parts(asked.model)
    return _calls(CausalLM(model, tokenizer, engine="continuous"))


def _static(asked: argparse.Namespace) -> Write:
    from stoker.contexts.forward import ModelRunner
    from stoker.contexts.inference.adapter import GenerationRequest, ModelTexts, Sampling
    from stoker.contexts.inference.static import StaticEngine

    model, tokenizer = _parts(asked.model)
    texts = ModelTexts(decode=tokenizer.decode, ends=frozenset(), longest=0)
    engine = StaticEngine(ModelRunner(model, limit_bytes=512_000_000), texts, rows=asked.rows)

    def write(requests: Requests) -> int:
        for number, (prompt, most) in enumerate(requests):
            ids = tuple(tokenizer(prompt)["input_ids"])
            engine.add(GenerationRequest(number, ids, Sampling(max_new_tokens=most)))
        written = 0
        while new := engine.step():
            written += len(new)
        return written

    return write


def _script(asked: argparse.Namespace) -> Write:
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=asked.model, dtype="bfloat16", disable_log_stats=True, kv_cache_memory_bytes=2_000_000_000,
        enforce_eager=asked.eager,
    )  # fmt: skip

    def write(requests: Requests) -> int:
        wishes = [SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True) for _, most in requests]
        found = llm.generate([prompt for prompt, _ in requests], wishes, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in found)

    return write


def _stoker_vllm(asked: argparse.Namespace) -> Write:
    from transformers import AutoTokenizer

    from stoker.contexts.engine_settings import EngineSettings
    from stoker.contexts.inference.vllm_engine import VLLMEngine
    from stoker.contexts.inference.vllm_start import VLLMStart
    from stoker.contexts.language_model import CausalLM
    from stoker.contexts.prompts import PromptReader

    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    start = VLLMStart(asked.model, dtype="bfloat16", settings=EngineSettings())
    engine = VLLMEngine(start, PromptReader(tokenizer, ends=frozenset(), longest=0))
    return _calls(CausalLM(None, tokenizer, engine=engine))


SIDES: dict[str, Callable[[argparse.Namespace], Write]] = {
    "continuous": _continuous, "static": _static, "vllm-script": _script,
    "vllm": _stoker_vllm,
}  # fmt: skip

if __name__ == "__main__":
    main()
