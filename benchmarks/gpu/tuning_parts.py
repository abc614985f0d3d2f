"""Parts of `make gpu` on gangs and prompt tuning."""

from __future__ import annotations

import time
from typing import Any

import stoker
from benchmarks.gpu.place import REHEARSAL, Answer, Place, device_name
from stoker import context


@context
def imports_torch(number: int) -> int:
    """A context that only imports torch; each number is another one."""
    import torch

    del torch
    return number


def _exchange(_: Any, count: int, device: str, through: str) -> tuple[int, float]:
    """Sum ones over the ranks; return a sum and the median time. `through`: the device that the exchange uses."""
    import time

    import torch

    import stoker
    from stoker.tuning.exchange import meet

    def exchanged() -> Any:
        own = torch.ones(count, device=device)
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        values = own.to(through)
        exchange.sum(values)
        own.copy_(values)
        if device != "cpu":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
        return own

    seat = stoker.gang()
    took: list[float] = []
    with meet(
        rank=seat.rank, size=seat.size, rendezvous=seat.rendezvous, job="gpu", device=through, limit_s=30.0,
        listener=seat.listener, key=seat.key,
    ) as exchange:  # fmt: skip
        for _turn in range(6):
            found = exchanged()
    return int(found[0].item()), sorted(took[1:])[2]


def gang(answer: Answer, place: Place) -> None:
    """A sum over two ranks: two GPUs by NCCL; else two pilots on one GPU by Gloo through host memory, since NCCL takes
    a GPU once; else two CPU devices by Gloo."""
    import torch

    gpus = torch.cuda.device_count()
    device = "cuda:0" if gpus else "cpu"
    through = device if gpus > 1 else "cpu"
    answer["ranks"] = {0: "on two CPU devices, Gloo", 1: "on one GPU, Gloo through host memory"}.get(
        gpus, "on two GPUs, NCCL"
    )
    one_gpu = gpus == 1 or REHEARSAL  # a rehearsal takes the way of one GPU: two pilots
    count = 1 << (16 if REHEARSAL else 24 if one_gpu else 26)
    with place.session(pilots=2 if one_gpu else 1, own_scratch=one_gpu):
        for what in ("first call", "second call"):
            began = time.perf_counter()
            call = stoker.app(context=imports_torch(0), gang=2)(_exchange)
            total, took_s = call(count, device, through).result(45)
            answer[f"{what}: from the call to the result, s"] = time.perf_counter() - began
        answer["sum of ones over the ranks"] = total
        answer[f"sum of {count * 4} bytes, ms"] = took_s * 1e3
        answer["sum, GB/s"] = count * 4 / took_s / 1e9


def tune(answer: Answer, place: Place) -> None:
    """Iterations of prompt tuning a second, on the model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from stoker.contexts.language_model import CausalLM
    from stoker.tuning.job import Data, Job, Metric, Prompt, Sample, Training, Until
    from stoker.tuning.tune import tune as run

    if place.lacks_model(answer):
        return
    loaded = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.bfloat16).to(device_name())
    reads = AutoTokenizer.from_pretrained(place.model)
    found = CausalLM(loaded.eval().requires_grad_(False), reads, name="random")
    samples = tuple(
        Sample(f"{'ab'[n % 2]} {n}, and some words", "yes" if n % 2 else "no", f"line {n}") for n in range(64)
    )
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
