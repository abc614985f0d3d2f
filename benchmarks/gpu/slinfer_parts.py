"""The policy part of `make gpu`: 8 models of 1 to 3 B under `slinfer`, and alone on the device (`exclusive`).

Models get requests in proportion to the weights 1/1 to 1/8. The first token is due 0.5 s after the request, and each
further token 0.25 s later (SLINFER §IX-A, rounded). Loads extend no deadline. `slinfer` starts with all models loaded,
`exclusive` with one.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import string
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import stoker
from benchmarks.gpu.bars import MET
from benchmarks.gpu.place import REHEARSAL, Answer, Place, device_memory, device_name
from benchmarks.serving import slinfer_policies
from benchmarks.starting import Every
from stoker import causal_lm
from stoker.errors import StokerError
from stoker.manager.executor.apps import StokerApp
from stoker.manager.executor.options import parse_call_specification
from stoker.manager.sim.log import TokenTimes
from stoker.protocol.calls import Objective

MODELS = 8
PROMPT, OUTPUT = (100, 400), (40, 160)
"""Mean and maximum tokens."""
SPREAD = 0.8
"""Standard deviation of the logarithm of both lengths."""
OBJECTIVE = Objective(ttft_s=0.5, tpot_s=0.25)
RATE = 2.0 if REHEARSAL else 4.0
LONGEST_S, SHORTEST_S = 180.0, 6.0
BEFORE_S, AFTER_S = 14.0, 6.0
"""Seconds before the trace of the second side, and seconds for open texts after a trace."""
CACHE_BYTES = 4 * 10**9
POLICIES = {"slinfer": f"{slinfer_policies.__file__}:patient", "exclusive": "exclusive"}
"""`patient` is `slinfer` without unloading, like `exclusive`."""


class Request(msgspec.Struct, frozen=True):
    """One request. `output`: maximum number of new tokens."""

    at_s: float
    model: int
    prompt: int
    output: int


def requests_at(rate: float, *, for_s: float) -> list[Request]:
    """Return requests at `rate` per second, the same in each run."""
    chance, at_s, found = random.Random("live-models/1"), 0.0, list[Request]()
    while True:
        at_s += chance.expovariate(1.0) / rate
        [model] = chance.choices(range(MODELS), [1 / (1 + number) for number in range(MODELS)])
        prompt, output = _length(chance, *PROMPT), _length(chance, *OUTPUT)
        if at_s >= for_s:
            return found
        found.append(Request(at_s, model, prompt, output))


def _length(chance: random.Random, mean: int, most: int) -> int:
    drawn = chance.lognormvariate(0.0, SPREAD) * mean / math.exp(SPREAD**2 / 2)
    return max(4, min(most, round(drawn)))


def write(model: Any, prompt: str, tokens: int) -> Iterator[str]:
    for token in model.stream_completion(prompt, max_new_tokens=tokens):
        yield token.text


class Models:
    """Contexts of all models. `failed`: names of the errors of the last trace."""

    def __init__(self, folders: list[Path], *, tells_objectives: bool) -> None:
        self._tells = tells_objectives
        self._recipes = []
        for number in range(MODELS):
            folder = folders[number % len(folders)]
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) + CACHE_BYTES
            options = device_memory(f"{size} B") or {"memory": "900 MB"}
            self._recipes.append(causal_lm(folder, dtype="bfloat16", threads=number + 1, **options))

    def warm(self, count: int) -> None:
        streams = [stoker.stream(self._app(number, prompt=8), "a warm-up", 4) for number in range(count)]
        for stream in streams:
            list(stream)

    def _app(self, model: int, *, prompt: int, objective: Objective = Objective()) -> StokerApp:  # noqa: B008 (frozen)
        options: dict[str, Any] = {"context": self._recipes[model], "stream": True}
        if self._tells:
            options["features"] = {"input_length": prompt, "expected_output": OUTPUT[0]}
        if self._tells and objective.ttft_s:
            options |= {"ttft_s": objective.ttft_s, "tpot_s": objective.tpot_s}
        return StokerApp(write, parse_call_specification(options, takes_context=True), {})

    async def run(self, requests: list[Request], *, limit_s: float) -> list[TokenTimes]:
        """Send requests at their times. Return when their tokens arrived. Cancel open requests after `limit_s`."""
        self.failed: Counter[str] = Counter()
        chance, begun = random.Random("prompts/1"), time.monotonic() + 1.0

        async def one(request: Request, text: str) -> TokenTimes:
            due_at = request.at_s + OBJECTIVE.ttft_s
            times = TokenTimes(request.at_s, request.prompt, request.output, due_at, OBJECTIVE.tpot_s)
            app = self._app(request.model, prompt=request.prompt, objective=OBJECTIVE)
            try:
                await asyncio.sleep(max(0.0, begun + request.at_s - time.monotonic()))
                with stoker.stream(app, text, request.output) as stream:
                    async for _piece in stream:
                        here = [time.monotonic() - begun] * (1 + len(stream.take_arrived()))
                        times.record_tokens(here, made=times.seen)
                times.output = times.seen or times.output  # An engine may end a text early.
            except (StokerError, asyncio.CancelledError) as error:
                self.failed[type(error).__name__] += 1
                times.late_s = math.inf
            return times

        texts = ["".join(chance.choices(string.ascii_lowercase, k=each.prompt)) for each in requests]
        tasks = [asyncio.ensure_future(one(*each)) for each in zip(requests, texts, strict=True)]
        _, late = await asyncio.wait(tasks, timeout=limit_s)
        for task in late:
            task.cancel()
        return await asyncio.gather(*tasks)


def _median(numbers: Iterator[float]) -> float:
    return statistics.median_high([*numbers] or [0.0])


def slinfer(answer: Answer, place: Place) -> None:
    folders = _folders(answer, place)
    sides = {policy: Models(folders, tells_objectives=policy == "slinfer") for policy in POLICIES}
    requests: list[Request] = []
    for_s = 0.0
    for policy, place_of in POLICIES.items():
        with place.session(policy=place_of) as session:
            models = sides[policy]
            count = MODELS if policy == "slinfer" else 1
            with answer.seconds(f"{policy}: the first {count} models are loaded, s"):
                models.warm(count)
            if not requests:
                most_s = (place.left_s() - BEFORE_S) / 2 - AFTER_S - 3.0
                for_s = SHORTEST_S if REHEARSAL else max(SHORTEST_S, min(LONGEST_S, most_s))
                requests = requests_at(RATE, for_s=for_s)
                answer["the trace of each side, s"] = for_s
                answer["requests of each side"] = len(requests)
            used: list[tuple[int, int]] = []
            with Every(1.0, partial(_look, session, used)):
                times = asyncio.run(models.run(requests, limit_s=for_s + AFTER_S))
            met = sum(each.is_met for each in times)
            answer[f"{policy}: {MET}"] = met / len(requests)
            answer[f"{policy}: objectives met"] = met
            failed = ", ".join(f"{count} {name}" for name, count in models.failed.items())
            answer[f"{policy}: failed, dropped or cancelled at the end"] = failed or "none"
            answer[f"{policy}: median time to first token, s"] = _median(each.ttft_s for each in times if each.seen)
            answer[f"{policy}: median time per token, s"] = _median(each.mean_tpot_s for each in times if each.seen > 1)
            for what, counts in zip(("devices used", "libraries"), zip(*used, strict=True), strict=False):
                answer[f"{policy}: {what}, mean"] = statistics.fmean(counts)
            answer[f"{policy}: loads"] = sum(context.loads for context in session.status().contexts)


def _folders(answer: Answer, place: Place) -> list[Path]:
    import torch

    from benchmarks.gpu.model import LLAMA_3B, TINY, TINYLLAMA, build

    found = [place.model]
    for name, shape in (("1b", TINYLLAMA), ("3b", LLAMA_3B)):
        folder = place.work / f"model-{name}"
        if not (folder / "tokenizer.json").exists():
            began = time.perf_counter()
            size = build(folder, TINY if REHEARSAL else shape, device=device_name())
            answer[f"a model of {size / 1e9:.1f} GB ({name}) is written, s"] = time.perf_counter() - began
        found.append(folder)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _look(session: Any, used: list[tuple[int, int]]) -> None:
    """Append the numbers of devices with libraries, and of libraries on devices."""
    with suppress(StokerError, TimeoutError):
        devices = [device for pilot in session.status().pilots for device in pilot.devices]
        used.append((sum(bool(each.libraries) for each in devices), sum(len(each.libraries) for each in devices)))
