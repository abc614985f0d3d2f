"""Measure the effect of a cancelled call: the longest gap in the stream of another client, and the time to a free slot.

    python -m benchmarks.engine.cancelling --repeats 5

Client A reads a stream of `stoker serve`; client B requests 2,000 tokens and disconnects after 3 s. Then a program
cancels calls in one-slot libraries, and measures the time until the next call starts in the slot.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

import stoker
from benchmarks.harness import machine, side_options, spread, until
from benchmarks.serving.embeddings import write_model
from benchmarks.serving.gateways import served
from benchmarks.starting import keep_state_in, local_session
from stoker.contexts.causal_lm import default_model

GAP_BAR_S = SLOT_BAR_S = 1.0
_READS_S = 15.0
_QUESTION = [{"role": "user", "content": "Tell a long story about the sea."}]


def main() -> None:
    asked = side_options(__doc__, repeats=5)
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}; median (min-max) of {asked.repeats}")
    with tempfile.TemporaryDirectory(prefix="cancelling-") as folder:
        keep_state_in(folder)
        alone, gaps, libraries = gateway_gaps(Path(folder), asked.repeats)
        _print("longest gap of a stream alone, s", alone)
        _print("longest gap of a stream while another client leaves, s", gaps, GAP_BAR_S)
        print(f"  libraries that were started in all: {libraries}")
        slots = free_slots(Path(folder), asked.repeats)
    for method, times in slots.items():
        _print(f"cancel of {method}: until the slot is free, s", times, SLOT_BAR_S)


def _print(what: str, numbers: list[float], bar: float = 0.0) -> None:
    verdict = f"; bar {bar:g}: {'met' if max(numbers) < bar else 'missed'}" if bar else ""
    print(f"  {what}: {spread(numbers, digits=3)}{verdict}; load {os.getloadavg()[0]:.1f}", flush=True)


def gateway_gaps(folder: Path, repeats: int) -> tuple[list[float], list[float], int]:
    """Return the longest gap per repeat in seconds, without and with a disconnect, and the number of libraries."""
    with served(folder, f'[models.smollm2]\npath = "{default_model()}"\n') as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        body = {"model": "smollm2", "messages": _QUESTION, "max_tokens": 8}
        httpx.post(url, json=body, timeout=600).raise_for_status()  # This request loads the model.
        pairs = [(_token_gap_s(url, leaves=False), _token_gap_s(url, leaves=True)) for _ in range(repeats)]
        libraries = len({path.name for path in folder.rglob("lib-*.log")})
    return [alone for alone, _ in pairs], [gap for _, gap in pairs], libraries


def _token_gap_s(url: str, *, leaves: bool) -> float:
    body = {"model": "smollm2", "messages": _QUESTION, "temperature": 1.0, "seed": 1}
    times: list[float] = []

    def leave() -> None:
        with suppress(httpx.ReadTimeout):
            httpx.post(url, json={**body, "max_tokens": 2_000}, timeout=httpx.Timeout(60, read=3.0))

    other = threading.Thread(target=leave)
    with httpx.stream("POST", url, json={**body, "max_tokens": 1_500, "stream": True}, timeout=600) as stream:
        lines = filter(None, stream.iter_lines())
        for _ in range(5):
            next(lines)
        times.append(time.monotonic())
        if leaves:
            other.start()
        while times[-1] - times[0] <= _READS_S and next(lines, ""):
            times.append(time.monotonic())
    if leaves:
        other.join()
    return max(later - earlier for earlier, later in pairwise(times))


def generate(model: Any) -> Any:
    return model.generate(["Tell a story."] * 8, max_new_tokens=1_500)


def label_scores(model: Any) -> Any:
    return model.label_scores(["The sea is deep and blue. " * 40 + str(n) for n in range(500)], [" true", " false"])


def embed(model: Any) -> Any:
    return model.embed(["the sea is deep and blue and wide " * 16] * 20_000)


def free_slots(folder: Path, repeats: int) -> dict[str, list[float]]:
    write_model(folder / "encoder", words=("the", "sea", "is", "deep", "and", "blue", "wide"))
    writer = stoker.causal_lm(slots=1, max_libraries=1)
    embedder = stoker.encoder(folder / "encoder", slots=1, max_libraries=1)
    found: dict[str, list[float]] = {}
    with local_session(devices="cpu:2"):
        for method, recipe in ((generate, writer), (label_scores, writer), (embed, embedder)):
            app, follow = stoker.app(context=recipe)(_begins(method)), stoker.app(context=recipe)(_begin_question)
            _, pid = follow().result()
            name = method.__name__
            found[name] = [_free_slot(app, follow, str(folder / f"{name}-{number}"), pid) for number in range(repeats)]
    return found


def _begins(method: Callable[[Any], Any]) -> Callable[[Any, str], Any]:
    """Return a function that creates a file before it calls a method."""

    def call(model: Any, begun: str) -> Any:
        open(begun, "w").close()
        return method(model)

    return call


def _begin_question(model: Any) -> tuple[float, int]:
    del model
    return time.monotonic(), os.getpid()


def _free_slot(app: Any, follow: Any, begun: str, pid: int) -> float:
    future = app(begun)
    following = follow()
    until(lambda: os.path.exists(begun), 600.0, "the begin of the call", every_s=0.01)
    time.sleep(3.0)
    began = time.monotonic()
    assert future.cancel(), "it ended too early"
    at, here = following.result()
    assert here == pid, "the library did not live"
    return float(at) - began


if __name__ == "__main__":
    main()
