"""Parts of `make gpu` on one model: making it, loading it, generating tokens, and starting libraries."""

from __future__ import annotations

import re
import time
from typing import Any

import stoker
from benchmarks.gpu.place import REHEARSAL, Answer, Place, device_name
from stoker import causal_lm, context


def model(answer: Answer, place: Place) -> None:
    """The model that other parts load."""
    from benchmarks.gpu.model import build

    began = time.perf_counter()
    answer["bytes"] = build(place.model, size_bytes=place.size_bytes, device=device_name())
    answer["made and written, s"] = time.perf_counter() - began


def load(answer: Answer, place: Place) -> None:
    """Load times and rates, through a session: with a cold cache of objects, with what the first load has left, and of
    a pickled model from its file and from the snapshot that the first load has made."""
    from benchmarks.gpu.model import pickled_of

    size = sum(file.stat().st_size for file in place.model.glob("*.safetensors"))
    if not size:
        return answer.skip("there is no model: the part `model` did not make one")
    ways = (("first", place.model), ("again", place.model))
    ways += (("pickled, first", pickled_of(place.model)), ("from its snapshot", pickled_of(place.model)))
    for what, source in ways:
        wanted = stoker.app(context=causal_lm(source, dtype="bfloat16"))(_loads)
        began = time.perf_counter()
        with place.session() as session:
            told = wanted().result(100)
            whole_s = time.perf_counter() - began
            answer[f"{what}: from nothing to a result, s"] = whole_s
            (found,) = [each for each in session.status().contexts if each.loads]
            answer[f"{what}: start and load, s"] = found.load_s
            answer[f"{what}: GB/s of start and load"] = size / found.load_s / 1e9
            answer[f"{what}: how"] = told["origin"] or "from its files"
            own = re.search(r"in ([0-9.]+) (ms|s)", told["origin"])
            if own:
                own_s = float(own[1]) / (1000 if own[2] == "ms" else 1)
                answer[f"{what}: GB/s of the loader alone"] = size / max(own_s, 1e-3) / 1e9
            answer["device"] = told["device"]
    return None


def _loads(llm: Any) -> dict[str, Any]:
    return {"origin": llm.origin, "device": llm.device}


def _generate(llm: Any, batch: int, tokens: int) -> tuple[float, float]:
    import time

    prompts = [f"{number}: a prompt for a model whose weights are random values" for number in range(batch)]
    llm.generate(prompts, max_new_tokens=4, batch_size=batch)
    began = time.perf_counter()
    llm.generate(prompts, max_new_tokens=1, batch_size=batch)
    first_s = time.perf_counter() - began
    began = time.perf_counter()
    llm.generate(prompts, max_new_tokens=tokens, batch_size=batch)
    return first_s, time.perf_counter() - began


def _score(llm: Any, count: int) -> float:
    import time

    prompts = [f"claim {number}: the sea is {'salt' * (1 + number % 20)}" for number in range(count)]
    llm.label_scores(prompts[:2], [" true", " false"])
    began = time.perf_counter()
    llm.label_scores(prompts, [" true", " false"], batch_size=64)
    return time.perf_counter() - began


def tokens(answer: Answer, place: Place) -> None:
    """Tokens a second by batch, and claims scored a second."""
    if not place.model.exists():
        return answer.skip("there is no model: the part `model` did not make one")
    recipe = causal_lm(place.model, dtype="bfloat16")
    generate, score = stoker.app(context=recipe)(_generate), stoker.app(context=recipe)(_score)
    count = 8 if REHEARSAL else 64
    with place.session():
        for batch in (1, 8, 64):
            first_s, took_s = generate(batch, count).result(70)
            answer[f"batch {batch}: first token, ms"] = first_s * 1e3
            answer[f"batch {batch}: tokens/s"] = batch * count / took_s
        claims = 32 if REHEARSAL else 512
        answer["claims scored/s"] = claims / score(claims).result(70)
    return None


@context
def imports_torch(number: int) -> int:
    """A context of nothing but torch; each number is another one."""
    import torch

    del torch
    return number


def zygote(answer: Answer, place: Place) -> None:
    """From a submitted call to the first operation on the device, of a zygote that starts, and of a warm one."""
    with place.session():
        for number, what in enumerate(("cold zygote", "warm zygote", "warm zygote again")):
            call = stoker.app(context=imports_torch(number))(_operation)
            began = time.perf_counter()
            told = call().result(50)
            answer[f"{what}: call to result, s"] = time.perf_counter() - began
            answer[f"{what}: first operation, s"] = told


def _operation(_: Any) -> float:
    import time

    import torch

    where = "cuda:0" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    torch.ones(1, device=where).sum().item()
    return time.perf_counter() - began
