"""Measure a switch between two models when only one model fits: from a request for the other model to its first token.

The other model wakes up, or loads from a snapshot or its original file ("nothing"). Loads run under a policy that lets
no library sleep. Both models are SmolLM2-135M in float32; files are in the page cache. "copied" copies the weights
once, as a GPU does, in two library-like processes without a session.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import stoker
from benchmarks.baselines import sleepless
from benchmarks.harness import MODEL, in_turns, need, ratios, run_side
from benchmarks.starting import local_session
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.causal_lm import default_model, load_causal_lm
from stoker.contexts.folders import SNAPSHOTS
from stoker.pilot.devices import cpu
from stoker.site import Policy

PROMPT = "The capital of France is"
THREADS = 1
"""Threads of each model."""
SHARE = 0.55
"""Share of the device's memory (nine tenths of the host's) per model, so that only one model fits."""


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need(*MODEL)
    repeats, switches = (1, 1) if quick else (3, 3)
    with tempfile.TemporaryDirectory(prefix="model-switch-") as folder:
        sides = {
            way: partial(run_side, side, way=way, switches=count, environment={SNAPSHOTS: folder})
            for way, count in (("copied", switches), ("asleep", switches), ("snapshot", switches), ("nothing", 1))
        }
        runs = in_turns(sides, repeats, say)
    found = {way: [statistics.median(one["seconds"]) for one in several] for way, several in runs.items()}
    found["hot"] = [statistics.median(one["hot"]) for one in runs["snapshot"]]
    weights = runs["copied"][-1]["weights_bytes"]

    def line(what: str, name: str, bar: Bar | None = None, last: int = 0, *, to: str = "nothing") -> Line:
        ratio = ratios(found[to], found[name])
        cells = {"s": found[name], f"from {to}, s": found[to], "ratio": ratio}
        return Line(what=what, cells=cells, bar=bar, digits=3, last_digits=last)

    lines = [
        line("asleep, in a session", "asleep", Bar(at_least=30.0)),
        line("asleep, weights copied, without a session", "copied", Bar(at_least=10.0)),
        line("from a snapshot, in a session", "snapshot", last=1),
        line("asleep, in a session", "asleep", Bar(at_least=5.0), last=1, to="snapshot"),
        Line(what="the same model once more, in a session", cells={"s": found["hot"]}, last_digits=3),
    ]
    note = (
        f"On a CPU a model that sleeps keeps its weights ({weights / 1e6:.0f} MB) in place; 'copied' has those of both"
        " models copied once in memory, as for a GPU."
    )
    return Table(lines=lines, notes=[note])


def write(model: Any, prompt: str) -> Iterator[str]:
    yield from model.stream(prompt, max_new_tokens=8)


def first_piece(pieces: Iterator[str], *, since: float) -> float:
    found = 0.0
    for _ in pieces:
        found = found or time.monotonic() - since
    return found


def switch_in_session(*, switches: int, snapshot: bool, sleeps: bool) -> dict[str, Any]:
    """Repeatedly request the model that is not hot. Without `snapshot`, only requests for the second model count."""
    policy = Policy() if sleeps else Policy(residency=f"{sleepless.__file__}:Sleepless")
    megabytes = int(SHARE * 0.9 * cpu.usable_memory_bytes() / 1e6)
    recipes = [
        stoker.causal_lm(threads=THREADS, memory=f"{megabytes} MB"),
        stoker.causal_lm(threads=THREADS, memory=f"{megabytes + 1} MB", snapshot=snapshot),
    ]
    models = [stoker.app(context=recipe)(write) for recipe in recipes]
    seconds, hot = [], []
    with (
        tempfile.TemporaryDirectory(prefix="switch-") as folder,
        local_session(policy=policy, scratch=folder) as session,
    ):
        for model in models[: 2 if sleeps else 1]:  # the pilot caches the file; the first model sleeps
            first_piece(stoker.stream(model, PROMPT), since=time.monotonic())
        for number in range(1, switches + 1):
            model = models[(number + sleeps) % 2]
            took_s = first_piece(stoker.stream(model, PROMPT), since=time.monotonic())
            if snapshot or number % 2:
                seconds.append(took_s)
            hot.append(first_piece(stoker.stream(model, PROMPT), since=time.monotonic()))
        contexts = session.status().contexts
        loads, ready = sum(each.loads for each in contexts), sum(each.hot for each in contexts)
    if loads != (2 if sleeps else switches + 1) or ready != 1:
        raise RuntimeError(f"{loads} loads for {switches} switches, {ready} models hot: not each was a switch")
    return {"seconds": seconds, "hot": hot}


def serve(pipe: Connection) -> None:
    model = load_causal_lm(default_model(), threads=THREADS)
    weights = [each.data for each in model.model.parameters()]
    pipe.send(sum(each.nbytes for each in weights))
    for order in iter(pipe.recv, None):
        (model.sleep if order == "sleep" else model.wake)()
        for each in weights:  # copies each weight once, as a GPU does when its memory is emptied or filled
            each.clone()
        for number, _ in enumerate(write(model, PROMPT) if order == "wake" else ()):
            if number == 0:
                pipe.send(True)
        pipe.send(True)


def switch_copied(*, switches: int) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    pipes, processes, found = [], [], list[float]()
    for _ in range(2):
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(theirs,))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
        weights = mine.recv()
        mine.send("wake")
        mine.recv(), mine.recv()
    hot, cold = pipes
    cold.send("sleep")
    cold.recv()
    for _ in range(switches):
        began = time.monotonic()
        hot.send("sleep")
        hot.recv()
        cold.send("wake")
        cold.recv()
        found.append(time.monotonic() - began)
        cold.recv()
        hot, cold = cold, hot
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    return {"seconds": found, "weights_bytes": weights}


def side(way: str, switches: int) -> dict[str, Any]:
    if way == "copied":
        return switch_copied(switches=switches)
    return switch_in_session(switches=switches, snapshot=way != "nothing", sleeps=way == "asleep")
