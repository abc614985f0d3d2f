"""The policy part of `make gpu`: 8 models of 1 to 3 B under `slinfer`, and alone on the device (`exclusive`).

Requests and clients come from benchmarks/live_models. A token is due 0.5 s after the request, or 0.25 s after the
last token (SLINFER §IX-A, rounded), without extra time for loads. `slinfer` starts with all models loaded,
`exclusive` with one model.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.bars import MET
from benchmarks.gpu.place import REHEARSAL, Answer, Place, device_memory, device_name
from benchmarks.serving import slinfer_policies
from benchmarks.serving.live_models import MODELS, Live, Request, requests_at, streaming_app
from benchmarks.serving.simulated_models import median_of
from stoker import causal_lm
from stoker.errors import StokerError
from stoker.manager.executor.apps import StokerApp
from stoker.protocol.calls import Objective

OBJECTIVE = Objective(ttft_s=0.5, tpot_s=0.25)
RATE = 2.0 if REHEARSAL else 4.0
LONGEST_S, SHORTEST_S = 180.0, 6.0
BEFORE_S, AFTER_S = 14.0, 6.0
"""Seconds before the trace of the second side, and for open texts after a trace."""
CACHE_BYTES = 4 * 10**9
POLICIES = {"slinfer": f"{slinfer_policies.__file__}:patient", "exclusive": "exclusive"}
"""`patient` is `slinfer` without unloading, like `exclusive`."""


class _Models(Live):
    def __init__(self, folders: list[Path], *, tells_objectives: bool) -> None:
        self._tells = tells_objectives
        self.recipes = []
        for number in range(MODELS):
            folder = folders[number % len(folders)]
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) + CACHE_BYTES
            options = device_memory(f"{size} B") or {"memory": "900 MB"}
            self.recipes.append(causal_lm(folder, dtype="bfloat16", threads=number + 1, **options))

    def _app(self, model: int, objective: Objective, *, prompt: int) -> StokerApp:
        if self._tells:
            return super()._app(model, objective, prompt=prompt)
        return streaming_app(context=self.recipes[model])


def slinfer(answer: Answer, place: Place) -> None:
    if place.lacks_model(answer):
        return
    folders = _folders(answer, place)
    sides = {policy: _Models(folders, tells_objectives=policy == "slinfer") for policy in POLICIES}
    requests: list[Request] = []
    for_s = 0.0
    for policy, place_of in POLICIES.items():
        with place.session(policy=place_of) as session:
            models = sides[policy]
            began = time.perf_counter()
            models.warm(count := MODELS if policy == "slinfer" else 1)
            answer[f"{policy}: the first {count} models are loaded, s"] = time.perf_counter() - began
            if not requests:
                most_s = (place.left_s() - BEFORE_S) / 2 - AFTER_S - 3.0
                for_s = SHORTEST_S if REHEARSAL else max(SHORTEST_S, min(LONGEST_S, most_s))
                requests = requests_at(RATE, seed=1, for_s=for_s)
                answer["the trace of each side, s"] = for_s
                answer["requests of each side"] = len(requests)
            with _Watch(session) as watch:
                times = asyncio.run(models.run(requests, OBJECTIVE, seed=1, limit_s=for_s + AFTER_S))
            met = sum(each.is_met for each in times)
            answer[f"{policy}: {MET}"] = met / len(requests)
            answer[f"{policy}: objectives met"] = met
            failed = ", ".join(f"{count} {name}" for name, count in models.failed.items())
            answer[f"{policy}: failed, dropped or cancelled at the end"] = failed or "none"
            answer[f"{policy}: median time to first token, s"] = median_of(each.ttft_s for each in times if each.seen)
            answer[f"{policy}: median time per token, s"] = median_of(
                each.mean_tpot_s for each in times if each.seen > 1
            )
            for what, mean in zip(("devices used", "libraries"), watch.means(), strict=True):
                answer[f"{policy}: {what}, mean"] = mean
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


class _Watch:
    def __init__(self, session: Any) -> None:
        self._session = session
        self._seen: list[tuple[int, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10.0)

    def means(self) -> list[float]:
        return [sum(each[place] for each in self._seen) / max(1, len(self._seen)) for place in (0, 1)]

    def _look(self) -> None:
        while not self._over.wait(1.0):
            with suppress(StokerError, TimeoutError):
                status = self._session.status()
                devices = [device for pilot in status.pilots for device in pilot.devices]
                used = sum(bool(device.libraries) for device in devices)
                self._seen.append((used, sum(len(device.libraries) for device in devices)))
