"""Measure decode and prefill by batch size, compared with `generate` of Transformers and with vLLM.

The time to the first token is the prefill; the mean of later steps is the decode step. The *bandwidth limit* of a
step is the time to read weights, keys and values once.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import stoker
from benchmarks.gpu.bars import OF_LIMIT
from benchmarks.gpu.place import BANDWIDTH, REHEARSAL, Answer, Place, device_memory
from stoker import causal_lm

BATCHES = (1, 64, 8, 256)
PROMPT, TOKENS = (16, 4) if REHEARSAL else (128, 64)
WAYS: dict[str, dict[str, Any]] = {"eager": {}, "graphs": {"graphs": True}}
"""Options of `causal_lm` by engine mode."""


def _prompts(batch: int, length: int, run: int) -> list[str]:
    import random

    chance = random.Random(f"{run} of {batch}")
    return ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=length)) for _ in range(batch)]


def _by_engine(llm: Any, batch: int, length: int, tokens: int, first_run: int) -> tuple[float, float]:
    import time

    from benchmarks.gpu.decode_parts import _prompts

    took = []
    for run, wanted in enumerate((tokens, 1, tokens), start=first_run):  # The first run captures all graphs.
        prompts = _prompts(batch, length, run)
        began = time.perf_counter()
        llm.generate(prompts, max_new_tokens=wanted, batch_size=batch)
        took.append(time.perf_counter() - began)
    return took[1], (took[2] - took[1]) / (tokens - 1)


def _by_transformers(llm: Any, batch: int, length: int, tokens: int, first_run: int) -> tuple[float, float]:
    import time

    import torch

    from benchmarks.gpu.decode_parts import _prompts

    def generate(run: int, wanted: int) -> float:
        asked = llm.tokenizer(_prompts(batch, length, run), return_tensors="pt").to(llm.model.device)
        began = time.perf_counter()
        llm.model.generate(
            input_ids=asked["input_ids"], attention_mask=asked["attention_mask"], max_new_tokens=wanted,
            min_new_tokens=wanted, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        if llm.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    with torch.inference_mode():
        _, first_s, all_s = (generate(first_run + at, wanted) for at, wanted in enumerate((4, 1, tokens)))
    return first_s, (all_s - first_s) / (tokens - 1)


def _score(llm: Any, count: int) -> float:
    import time

    prompts = [f"claim {number}: the sea is {'salt' * (1 + number % 20)}" for number in range(count)]
    llm.label_scores(prompts[:2], [" true", " false"])
    began = time.perf_counter()
    llm.label_scores(prompts, [" true", " false"], batch_size=64)
    return time.perf_counter() - began


def decode(answer: Answer, place: Place) -> None:
    figures = _Figures(answer, place)
    recipes = {
        way: causal_lm(place.model, dtype="bfloat16", engine="transformers", **device_memory("30 GB"), **options)
        for way, options in WAYS.items()
    }
    with place.session():
        for at, (way, recipe) in enumerate(recipes.items()):
            try:
                told = stoker.app(context=recipe)(lambda llm: f"{llm.engine}: {llm.engine_chosen}")
                answer[f"{way}: engine"] = told().result(80)
                for batch in BATCHES:
                    call = stoker.app(context=recipe)(_by_engine)(batch, PROMPT, TOKENS, 100 * at)
                    figures.add(way, batch, *call.result(60))
            except Exception as error:  # If an engine fails, other engines still get results.
                answer[f"{way}: failed"] = f"{type(error).__name__}: {error}"[:300]
            if way == "eager":
                claims = 32 if REHEARSAL else 512
                answer["claims scored/s"] = claims / stoker.app(context=recipe)(_score)(claims).result(60)
        for batch in BATCHES:
            call = stoker.app(context=recipes["eager"])(_by_transformers)(batch, PROMPT, TOKENS, 900)
            figures.add("Transformers", batch, *call.result(60))
    _vllm(answer, figures, place)


class _Figures:
    def __init__(self, answer: Answer, place: Place) -> None:
        from benchmarks.gpu.model import SMOLLM2, TINY, weights_bytes

        self._answer = answer
        self._weights = weights_bytes(place.model)
        self._token_bytes = (TINY if REHEARSAL else SMOLLM2).token_bytes()
        self._bandwidth = place.number("device", BANDWIDTH) * 1e9
        self._step_s: dict[tuple[str, int], float] = {}

    def add(self, way: str, batch: int, first_s: float, step_s: float) -> None:
        what = f"{way}, batch {batch}"
        self._answer[f"{what}: prefill, tokens/s"] = batch * PROMPT / first_s
        self._answer[f"{what}: first token, ms"] = first_s * 1e3
        if step_s <= 0:  # Other load on the machine slowed down the shorter run.
            self._answer[f"{what}: decode, tokens/s"] = "not measured: longer texts took no longer than one token"
            return
        self._step_s[way, batch] = step_s
        self._answer[f"{what}: decode, tokens/s"] = batch / step_s
        if self._bandwidth:
            read = self._weights + batch * (PROMPT + TOKENS / 2) * self._token_bytes
            self._answer[f"{what}: {OF_LIMIT}"] = read / self._bandwidth / step_s
        for own in WAYS if way not in WAYS else ():
            if own_s := self._step_s.get((own, batch)):
                self._answer[f"{own}, batch {batch}: decode, times {way}"] = step_s / own_s


def _vllm(answer: Answer, figures: _Figures, place: Place) -> None:
    if importlib.util.find_spec("vllm") is None:
        answer["vLLM: skipped"] = "vllm is not installed"
        return
    words = [sys.executable, "-m", "benchmarks.gpu.decode_parts", str(place.model)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=max(1.0, place.left_s() - 3.0))
    for row in (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"batch"')):
        figures.add("vLLM", row["batch"], row["first_s"], row["step_s"])
    if done.returncode:
        answer["vLLM: failed"] = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]


def main(folder: Path) -> None:
    import time

    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    engine = LLM(str(folder), dtype="bfloat16", gpu_memory_utilization=0.4, enable_prefix_caching=False)
    for batch in BATCHES:
        took = []
        for run, wanted in enumerate((TOKENS, 1, TOKENS)):
            sampling = SamplingParams(temperature=0.0, max_tokens=wanted, min_tokens=wanted, ignore_eos=True)
            began = time.perf_counter()
            engine.generate(_prompts(batch, PROMPT, run), sampling, use_tqdm=False)
            took.append(time.perf_counter() - began)
        row = {"batch": batch, "first_s": took[1], "step_s": (took[2] - took[1]) / (TOKENS - 1)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
