"""The part of `make gpu` on encoders: runtimes of fixed lengths (static) against batches as long as their texts."""

from __future__ import annotations

import shutil
import time
from typing import Any

import stoker
from benchmarks.gpu.place import REHEARSAL, Answer, Place
from benchmarks.serving.embeddings import texts, write_model
from stoker import encoder as encoder_recipe
from stoker import encoder_family

LONGEST, BATCH, CALL = (64, 8, 16) if REHEARSAL else (64, 32, 256)
"""Tokens of the longest text, texts of a batch, and of a call."""
_FAMILY = (32, LONGEST)


def _embed(model: Any, some: list[str]) -> int:
    return len(model.embed(some))


def _folder(place: Place) -> Any:
    """Write an encoder of the shape of all-MiniLM-L6-v2 with random weights; return its folder."""
    folder = place.work / "encoder"
    shutil.rmtree(folder, ignore_errors=True)
    write_model(folder)
    return folder


def _how(model: Any, some: list[str]) -> str:
    return f"compiled ({model.origin})" if model.is_compiled else f"not compiled ({len(some)} texts)"


def _figures(answer: Answer, what: str, context: Any, calls: list[list[str]]) -> float:
    """Write the texts a second of a context, once it is hot."""
    app = stoker.app(context=context)(_embed)
    began = time.perf_counter()
    hot = [calls[0], calls[-1]] * 2  # of a family, both runtimes
    list(stoker.map(app, hot, ordered=False))
    answer[f"{what}: until it is hot, s"] = time.perf_counter() - began
    began = time.perf_counter()
    count = sum(stoker.map(app, calls, ordered=False))
    rate = count / (time.perf_counter() - began)
    answer[f"{what}: texts/s"] = rate
    if "compiled" in what:
        answer[f"{what}: how"] = stoker.app(context=context)(_how)(calls[-1]).result(30)
    return rate


def encoder(answer: Answer, place: Place) -> None:
    """Texts as long as tweets, sorted by length, by each kind of runtime."""
    folder = _folder(place)
    all_texts = [each for each in texts(48 if REHEARSAL else 20_000) if len(each.split()) <= LONGEST - 2]
    all_texts.sort(key=lambda each: len(each.split()))
    calls = [all_texts[at : at + CALL] for at in range(0, len(all_texts), CALL)]
    static: dict[str, Any] = {"batch": BATCH, "compiled": False}
    compiled = static | {"compiled": "auto"}
    contexts = {
        "dynamic": lambda: encoder_recipe(folder),
        f"static, {LONGEST} tokens": lambda: encoder_recipe(folder, length=LONGEST, **static),
        f"static, {_FAMILY[0]} and {LONGEST} tokens": lambda: encoder_family(folder, lengths=_FAMILY, **static),
        f"static and compiled, {_FAMILY[0]} and {LONGEST} tokens": lambda: encoder_family(
            folder, lengths=_FAMILY, **compiled
        ),
    }
    rates = {}
    with place.session(policy="arlo"):
        for what, make in contexts.items():
            rates[what] = _figures(answer, what, make(), calls)
            answer[f"{what}: times dynamic"] = rates[what] / rates["dynamic"]
