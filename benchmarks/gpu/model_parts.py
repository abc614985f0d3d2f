"""Parts of `make gpu` on one model: making it, loading it, generating tokens, and starting libraries."""

from __future__ import annotations

import re
import subprocess
import sys
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
    answer["a script of its own: from nothing to a result, s"] = _script_s(place)
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
            if what == "again":
                began = time.perf_counter()
                stoker.app(context=causal_lm(source, dtype="float16"))(_loads)().result(100)
                answer["another context of that session: from the call to a result, s"] = time.perf_counter() - began
    answer["a script of its own, again: from nothing to a result, s"] = _script_s(place)
    return None


def _script_s(place: Place) -> float:
    """Seconds of a program that imports Transformers, loads the model onto the device and ends."""
    words = [sys.executable, "-c", _SCRIPT, str(place.model), device_name()]
    began = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


_SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, device_map={"": sys.argv[2]})
print(model.device)
"""


def _loads(llm: Any) -> dict[str, Any]:
    return {"origin": llm.origin, "device": llm.device}


def _generate(llm: Any, batch: int, tokens: int) -> dict[str, float]:
    """Seconds: the first token, and the median of all tokens by the engine and by Transformers' own `generate`, each
    after a first time, in turns."""
    import statistics
    import time

    import torch

    prompts = [f"{number}: a prompt for a model whose weights are random values" for number in range(batch)]
    tokenizer = llm.tokenizer
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.convert_ids_to_tokens(0), "left"

    def engine() -> None:
        llm.generate(prompts, max_new_tokens=tokens, batch_size=batch)

    @torch.inference_mode()
    def transformers() -> None:
        asked = tokenizer(prompts, return_tensors="pt", padding=True).to(llm.model.device)
        llm.model.generate(
            input_ids=asked["input_ids"], attention_mask=asked["attention_mask"], max_new_tokens=tokens,
            min_new_tokens=tokens, do_sample=False, pad_token_id=0,
        )  # fmt: skip

    llm.generate(prompts, max_new_tokens=4, batch_size=batch)
    began = time.perf_counter()
    llm.generate(prompts, max_new_tokens=1, batch_size=batch)
    found = {"first": time.perf_counter() - began}
    took: dict[str, list[float]] = {"engine": [], "transformers": []}
    sides = (engine, transformers)
    for turn in range(4):
        for side in sides if turn % 2 else sides[::-1]:
            began = time.perf_counter()
            side()
            took[side.__name__].append(time.perf_counter() - began)
    return found | {name: statistics.median(each[1:]) for name, each in took.items()}


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
            took = generate(batch, count).result(70)
            answer[f"batch {batch}: first token, ms"] = took["first"] * 1e3
            answer[f"batch {batch}: tokens/s"] = batch * count / took["engine"]
            answer[f"batch {batch}: tokens/s of Transformers' generate"] = batch * count / took["transformers"]
            answer[f"batch {batch}: times as many"] = took["transformers"] / took["engine"]
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
