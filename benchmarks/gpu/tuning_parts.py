"""Parts of `make gpu` on gangs and prompt tuning."""

from __future__ import annotations

import time
from typing import Any

import stoker
from benchmarks.gpu.model_parts import imports_torch
from benchmarks.gpu.place import REHEARSAL, Answer, Place, device_name


def _exchange(_: Any, count: int) -> tuple[int, float]:
    import time

    import torch

    import stoker
    from stoker.tuning.exchange import meet

    seat = stoker.gang()
    where = "cuda:0" if torch.cuda.is_available() else "cpu"
    values = torch.ones(count, device=where)
    with meet(
        rank=seat.rank, size=seat.size, rendezvous=seat.rendezvous, job="gpu", device=where, limit_s=40.0,
        listener=seat.listener, key=seat.key,
    ) as exchange:  # fmt: skip
        exchange.sum(values.clone())
        took = []
        for _turn in range(5):
            again = torch.ones(count, device=where)
            if where != "cpu":
                torch.cuda.synchronize()
            began = time.perf_counter()
            exchange.sum(again)
            if where != "cpu":
                torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
    return int(again[0].item()), sorted(took)[len(took) // 2]


def gang(answer: Answer, place: Place) -> None:
    """The sum over two devices, by NCCL (rehearsed on cores by Gloo)."""
    import torch

    if torch.cuda.device_count() < 2 and not REHEARSAL:
        return answer.skip(f"a gang wants two GPUs; there is {torch.cuda.device_count()}")
    count = 1 << (16 if REHEARSAL else 26)
    with place.session():
        began = time.perf_counter()
        total, took_s = stoker.app(context=imports_torch(0), gang=2)(_exchange)(count).result(55)
        answer["sum of ones over the ranks"] = total
        answer["from the call to the result, s"] = time.perf_counter() - began
        answer[f"sum of {count * 4} bytes, ms"] = took_s * 1e3
        answer["GB/s"] = count * 4 / took_s / 1e9
    return None


def tune(answer: Answer, place: Place) -> None:
    """Iterations of prompt tuning a second, on the model."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.gpu.model import tokenizer
    from stoker.contexts.language_model import CausalLM
    from stoker.tuning.job import Data, Job, Metric, Prompt, Training, Until
    from stoker.tuning.samples import Sample
    from stoker.tuning.tune import tune as run

    if not place.model.exists():
        return answer.skip("there is no model: the part `model` did not make one")
    loaded = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.bfloat16).to(device_name())
    found = CausalLM(loaded.eval().requires_grad_(False), tokenizer(), name="random")
    samples = tuple(
        Sample(f"{'ab'[n % 2]} {n}, and some words", "yes" if n % 2 else "no", f"line {n}") for n in range(64)
    )
    iterations = 3 if REHEARSAL else 20
    job = Job(
        data=Data("none.jsonl", evaluation_samples=8), name="gpu", prompt=Prompt(initial="say yes or no"),
        until=Until(metric=Metric.LOSS, iterations=iterations, evaluate_every=iterations), training=Training(batch=16),
    )  # fmt: skip
    began = time.perf_counter()
    told = run(found, job, samples)
    answer["iterations/s"] = iterations / (time.perf_counter() - began)
    answer["loss at the end"] = float(told.points[-1].loss)
    return None
