"""Parts of `make gpu`: devices, model files, turns, encoders, gangs and prompt tuning."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import stoker
from benchmarks.gpu.place import BANDWIDTH, PINNED, REHEARSAL, Answer, Place, device_name, median_s
from benchmarks.serving.embeddings import texts_like_tweets, write_model
from stoker import context, encoder_family
from stoker import encoder as encoder_recipe
from stoker.contexts.encoder import Family
from stoker.contexts.recipe import Recipe


def device(answer: Answer, _: Place) -> None:
    import torch

    from stoker.pilot.devices import find_devices, gpu

    where, size = device_name(), 256 if REHEARSAL else 8192
    kind = torch.float32 if where == "cpu" else torch.bfloat16
    count = (4 << 20) if REHEARSAL else (1 << 30)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=where != "cpu")
    there = torch.empty(count, dtype=torch.uint8, device=where)
    twin = torch.empty_like(there)
    answer[BANDWIDTH] = 2 * count / median_s(lambda: twin.copy_(there)) / 1e9
    answer[PINNED] = count / median_s(lambda: there.copy_(host, non_blocking=True)) / 1e9
    one, other = (torch.randn(size, size, device=where, dtype=kind) for _ in range(2))
    answer[f"matrix product of {size}, TFLOP/s"] = 2 * size**3 / median_s(lambda: one @ other) / 1e12
    answer["torch"] = f"{torch.__version__}, CUDA {torch.version.cuda}, sees {torch.cuda.device_count()}"
    with answer.seconds("devices are found, s"):
        found = find_devices("auto")
    for each in found.offered[:8]:
        facts = each.facts
        answer[f"{facts.device}"] = f"{facts.kind}, {facts.memory_bytes / 1e9:.1f} GB, {facts.cores} cores {each.uuid}"
        if facts.processes:
            answer[f"{facts.device} processes at once"] = facts.processes
    for trouble in found.troubles:
        answer["trouble"] = trouble
    driver = gpu.load_nvml()
    try:
        driver.nvmlInit()
        answer["driver"] = driver.nvmlSystemGetDriverVersion()
    except Exception as error:
        answer["driver"] = f"none ({error})"
    answer["PID namespace"] = os.readlink("/proc/self/ns/pid")


def model(answer: Answer, place: Place) -> None:
    from benchmarks.gpu.model import SMOLLM2, TINY, build

    with answer.seconds("made and written, s"):
        answer["bytes"] = build(place.model, TINY if REHEARSAL else SMOLLM2, device=device_name())


def turns(answer: Answer, _: Place) -> None:
    from benchmarks.engine.turns import CASES, side
    from benchmarks.harness import run_side

    total = 16 if REHEARSAL else 100
    for case, (count, bare) in CASES.items():
        one = run_side(side, libraries=count, iterations=total // count, bare=bare, timeout_s=20.0)
        answer[f"{case}: idle between two iterations, us"] = one["gap_us"]
        answer[f"{case}: time besides the iterations, %"] = one["overhead_percent"]


LONGEST, BATCH, CALL = (64, 8, 16) if REHEARSAL else (64, 32, 256)
"""Maximum tokens of a text, texts per batch, and texts per call."""
_FAMILY = (32, LONGEST)


def _figures(answer: Answer, what: str, context: Recipe | Family, calls: list[list[str]]) -> float:
    app = stoker.app(context=context)(lambda model, some: len(model.embed(some)))
    with answer.seconds(f"{what}: until it is hot, s"):
        hot = [calls[0], calls[-1]] * 2  # short and long calls load both runtimes of a family
        list(stoker.map(app, hot, ordered=False))
    began = time.perf_counter()
    count = sum(stoker.map(app, calls, ordered=False))
    rate = count / (time.perf_counter() - began)
    answer[f"{what}: texts/s"] = rate
    if "compiled" in what:
        told = stoker.app(context=context)(
            lambda model, some: (
                f"compiled ({model.origin})" if model.is_compiled else f"not compiled ({len(some)} texts)"
            )
        )
        answer[f"{what}: how"] = told(calls[-1]).result(30)
    return rate


def encoder(answer: Answer, place: Place) -> None:
    folder = place.work / "encoder"
    shutil.rmtree(folder, ignore_errors=True)
    write_model(folder)
    all_texts = [each for each in texts_like_tweets(48 if REHEARSAL else 20_000) if len(each.split()) <= LONGEST - 2]
    all_texts.sort(key=lambda each: len(each.split()))
    calls = [all_texts[at : at + CALL] for at in range(0, len(all_texts), CALL)]
    static: dict[str, Any] = {"batch": BATCH, "compiled": False}
    two = f"{_FAMILY[0]} and {LONGEST} tokens"
    contexts: dict[str, Callable[[], Recipe | Family]] = {
        "dynamic": lambda: encoder_recipe(folder),
        f"static, {LONGEST} tokens": lambda: encoder_recipe(folder, length=LONGEST, **static),
        f"static, {two}": lambda: encoder_family(folder, lengths=_FAMILY, **static),
        f"static and compiled, {two}": lambda: encoder_family(folder, lengths=_FAMILY, **static | {"compiled": "auto"}),
    }
    rates = {}
    with place.session(policy="arlo"):
        for what, make in contexts.items():
            rates[what] = _figures(answer, what, make(), calls)
            answer[f"{what}: times dynamic"] = rates[what] / rates["dynamic"]


@context
def imports_torch(number: int) -> int:
    import torch

    del torch
    return number


def _exchange(_: Any, count: int, device: str, through: str) -> tuple[int, float]:
    import time

    import torch

    import stoker
    from stoker.tuning.exchange import connect_ranks

    def exchanged() -> Any:
        own = torch.ones(count, device=device)
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        values = own.to(through)
        exchange.sum_over_ranks(values)
        own.copy_(values)
        if device != "cpu":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
        return own

    seat = stoker.gang()
    took: list[float] = []
    with connect_ranks(
        rank=seat.rank, size=seat.size, rendezvous=seat.rendezvous, job="gpu", device=through, limit_s=30.0,
        listener=seat.listener, key=seat.key,
    ) as exchange:  # fmt: skip
        for _turn in range(6):
            found = exchanged()
    return int(found[0].item()), sorted(took[1:])[2]


def gang(answer: Answer, place: Place) -> None:
    """Sum over two ranks on two GPUs (NCCL), two pilots on one GPU (Gloo), or two CPU devices (Gloo)."""
    import torch

    gpus = torch.cuda.device_count()
    device = "cuda:0" if gpus else "cpu"
    through = device if gpus > 1 else "cpu"
    few = {0: "on two CPU devices, Gloo", 1: "on one GPU, Gloo through host memory"}
    answer["ranks"] = few.get(gpus, "on two GPUs, NCCL")
    one_gpu = gpus == 1 or REHEARSAL  # A rehearsal runs two pilots, like a single GPU.
    count = 1 << (16 if REHEARSAL else 24 if one_gpu else 26)
    with place.session(pilots=2 if one_gpu else 1, own_scratch=one_gpu):
        for what in ("first call", "second call"):
            with answer.seconds(f"{what}: from the call to the result, s"):
                call = stoker.app(context=imports_torch(0), gang=2)(_exchange)
                total, took_s = call(count, device, through).result(45)
        answer["sum of ones over the ranks"] = total
        answer[f"sum of {count * 4} bytes, ms"] = took_s * 1e3
        answer["sum, GB/s"] = count * 4 / took_s / 1e9


def tune(answer: Answer, place: Place) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from stoker.contexts.language_model import CausalLM
    from stoker.tuning.job import Data, Job, Metric, Prompt, Sample, Training, Until
    from stoker.tuning.tune import tune as run

    loaded = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.bfloat16).to(device_name())
    reads = AutoTokenizer.from_pretrained(place.model)
    found = CausalLM(loaded.eval().requires_grad_(False), reads, name="random")
    words = [f"{'ab'[n % 2]} {n}, and some words" for n in range(64)]
    samples = tuple(Sample(text, "yes" if n % 2 else "no", f"line {n}") for n, text in enumerate(words))
    for what, iterations in (("first", 2), ("then", 2 if REHEARSAL else 20)):
        job = Job(
            data=Data("none.jsonl", evaluation_samples=8), name="gpu", prompt=Prompt(initial="say yes or no"),
            until=Until(metric=Metric.LOSS, iterations=iterations, evaluate_every=iterations),
            training=Training(batch=16),
        )  # fmt: skip
        began = time.perf_counter()
        told = run(found, job, samples)
        answer[f"{what} {iterations} iterations: iterations/s"] = iterations / (time.perf_counter() - began)
    answer["loss at the end"] = float(told.points[-1].loss)
