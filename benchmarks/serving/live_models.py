"""Eight small models on two CPU devices under `slinfer`: the share of requests in time, live and simulated.

The models get requests by weights 1/1 to 1/8. They load and rehearse twice: first two clients per model request
without a pause, then requests arrive as in the trace. The second rehearsal gives the objectives, and the rate at which
the simulator predicts three quarters of the requests in time. Then the trace runs live, and in the simulator with the
measured steps. Pilots judge offers by time and memory (decision 061); a second line simulates pilots that use memory
alone.

    python -m benchmarks.serving.live_models --seed 1 --for-s 40 [--by-memory]
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sqlite3
import string
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from tiny_model import write_tiny_model

import stoker
from benchmarks.harness import missing, run_side
from benchmarks.serving import simulated_models, slinfer_policies
from benchmarks.serving.simulated_models import DEVICES, FIXED_BYTES, TOKEN_BYTES, Machine, Simulated, median_of
from benchmarks.starting import ONE_PILOT, keep_state_in, print_side
from benchmarks.tables import Bar, Line, Table
from stoker.contexts import state_folder
from stoker.contexts.performance import PerformanceStore
from stoker.contexts.recipe import Recipe
from stoker.contexts.step_times import StepTable, StepTimes
from stoker.errors import StokerError
from stoker.manager.executor.apps import StokerApp
from stoker.manager.executor.options import parse_call_specification
from stoker.manager.executor.prepared import AppWants
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import TokenTimes
from stoker.manager.sim.pilot import SimPilot
from stoker.pilot.core.events import OfferWeighed
from stoker.pilot.devices import cpu
from stoker.protocol.calls import Objective
from stoker.protocol.to_pilot import RunCalls

NAME, TITLE = "live_models", "eight models on two devices, live and simulated: requests in time"
SIDE = "benchmarks.serving.live_models"
SEEDS, FOR_S = (1, 2, 3), 30.0
BAR_POINTS = 5.0
MODELS, A_DEVICE = 8, 4
"""Models, and libraries that fit on a device."""
PROMPT_MEAN, PROMPT_MOST = 100, 400
OUTPUT_MEAN, OUTPUT_MOST = 40, 160
SPREAD = 0.8
"""Standard deviation of the logarithm of both lengths."""
TTFT_STEPS, TPOT_STEPS = 40.0, 8.0
"""Objectives in decode steps of four requests of 128 tokens."""
AIM = 0.75
"""The predicted share of requests in time, which decides the load."""
WITHIN = (0.6, 0.9)
LEAST_RATE, MOST_RATE, HALVINGS = 0.5, 64.0, 7


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    if reason := missing("torch", "transformers", "tokenizers", "safetensors", "pytest"):
        return Table(name=NAME, title=TITLE, skipped=reason)
    runs = []
    for seed in SEEDS[:1] if quick else SEEDS:
        run = run_side(SIDE, "--seed", str(seed), "--for-s", str(10.0 if quick else FOR_S), timeout_s=1800.0)
        say(run_summary(run))
        runs.append(run)
    return table_of(runs)


def run_summary(run: dict[str, Any]) -> str:
    load = ", ".join(f"{each:.0f}" for each in run["load_in_run"])
    return (
        f"seed {run['seed']}: {run['requests']} requests at {run['rate']:.1f} a second, ttft {run['ttft_s']:.2f} s,"
        f" tpot {1000 * run['tpot_s']:.0f} ms; in time: predicted {run['predicted']:.3f}, live {run['live']:.3f},"
        f" simulated {run['simulated']:.3f} ({run['simulated_other']:.3f} if pilots judge otherwise);"
        f" medians, s: ttft {run['live_first_s']:.2f} and {run['simulated_first_s']:.2f} simulated, tpot"
        f" {run['live_tpot_s']:.3f} and {run['simulated_tpot_s']:.3f};"
        f" {run['loads']} loads; failed {run['failed']}; steps of {1000 * run['step_s'][0]:.1f} and"
        f" {1000 * run['step_s'][1]:.1f} ms; load {load}"
    )


def table_of(runs: list[dict[str, Any]]) -> Table:
    live, simulated, other, predicted = (
        [100 * run[name] for run in runs] for name in ("live", "simulated", "simulated_other", "predicted")
    )
    apart = [abs(there - here) for there, here in zip(simulated, live, strict=True)]
    notes = [run_summary(run) for run in runs]
    notes += [
        f"seed {run['seed']}: no rate was found at which {WITHIN[0]:.0%} to {WITHIN[1]:.0%} are predicted to be in time"
        for run in runs
        if not run["chosen_well"]
    ]
    lines = [
        Line(
            what="in time, %", cells={"live": live, "simulated": simulated, "apart, points": apart},
            bar=Bar(at_most=BAR_POINTS), digits=1,
        ),
        Line(what="what was predicted before, %", cells={"predicted": predicted}, digits=1),
        Line(what="simulated pilots judge by memory alone, %", cells={"simulated": other}, digits=1),
    ]  # fmt: skip
    return Table(name=NAME, title=TITLE, lines=lines, notes=notes)


# ---- requests, and the same session in the simulator


class Request(msgspec.Struct, frozen=True):
    """One request. `output`: maximum of new tokens."""

    at_s: float
    model: int
    prompt: int
    output: int


def requests_at(rate: float, *, seed: int, for_s: float, most: int = 1_000_000) -> list[Request]:
    """Return requests at `rate` per second. The seed alone decides lengths and models."""
    chance = random.Random(f"live-models/{seed}")
    weights = [1 / (1 + number) for number in range(MODELS)]
    found: list[Request] = []
    at_s = 0.0
    while len(found) < most:
        at_s += chance.expovariate(1.0) / rate
        [model] = chance.choices(range(MODELS), weights)
        prompt, output = _length(chance, PROMPT_MEAN, PROMPT_MOST), _length(chance, OUTPUT_MEAN, OUTPUT_MOST)
        if at_s >= for_s:
            break
        found.append(Request(at_s, model, prompt, output))
    return found


def _length(chance: random.Random, mean: int, most: int) -> int:
    drawn = chance.lognormvariate(0.0, SPREAD) * mean / math.exp(SPREAD**2 / 2)
    return max(4, min(most, round(drawn)))


def objective_of(times: StepTimes) -> Objective:
    step_s = StepTable(times.decode).seconds(4.0, 128.0)
    return Objective(ttft_s=TTFT_STEPS * step_s, tpot_s=TPOT_STEPS * step_s)


def choose_rate(
    machine: Machine, objective: Objective, *, seed: int, for_s: float, weighed: bool
) -> tuple[float, float]:
    least, most = LEAST_RATE, MOST_RATE
    best = (least, 0.0)
    for _ in range(HALVINGS):
        rate = math.sqrt(least * most)
        requests = requests_at(rate, seed=seed, for_s=for_s)
        share = simulate(requests, [each.output for each in requests], machine, objective, weighed=weighed).share
        if abs(share - AIM) < abs(best[1] - AIM):
            best = (rate, share)
        least, most = (rate, most) if share > AIM else (least, rate)
    return best


def simulate(
    requests: Sequence[Request], outputs: Sequence[int], machine: Machine, objective: Objective, *, weighed: bool
) -> Simulated:
    """Simulate requests with `outputs` tokens. Unless `weighed`, pilots judge offers by memory alone."""
    asked = [
        Arrival(
            each.at_s, f"model-{each.model}", input_length=each.prompt, expected_output=OUTPUT_MEAN, output=output,
            objective=objective,
        )
        for each, output in zip(requests, outputs, strict=True)
    ]  # fmt: skip
    machine = msgspec.structs.replace(machine, most_output=OUTPUT_MOST)
    with _judging(by_time=weighed):
        return simulated_models.simulate(asked, machine, slinfer_policies.patient(), models=MODELS)


@contextmanager
def _judging(*, by_time: bool) -> Iterator[None]:
    before = SimPilot._weighed
    if not by_time:
        SimPilot._weighed = _weigh_by_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        SimPilot._weighed = before  # type: ignore[method-assign]


def _weigh_by_memory(self: SimPilot, order: RunCalls) -> OfferWeighed:  # noqa: ARG001 # a method of the pilot
    return OfferWeighed(order)


# ---- the live session

WATERMARK = 0.25
"""Share of extra cache that the policy reserves at a load."""
REHEARSAL_S, TOLD_EVERY_S = 25.0, 13.0


def write(model: Any, prompt: str, tokens: int) -> Iterator[str]:
    for token in model.stream_completion(prompt, max_new_tokens=tokens):
        yield token.text


def streaming_app(**options: Any) -> StokerApp:
    """Return an app that writes the text of a model. `options`: of a call."""
    wants = parse_call_specification({**options, "stream": True}, takes_context=True)
    return StokerApp(
        write, specification=AppWants(wants), batch_size=None, cache=False, ignore_for_cache=None, executors=None
    )


def text_of(request: Request, chance: random.Random) -> str:
    return "".join(chance.choices(string.ascii_lowercase, k=request.prompt))


class Live:
    def __init__(self, folder: Path) -> None:
        self.device_bytes = cpu.find(DEVICES)[0].facts.memory_bytes
        share = int(self.device_bytes * 0.99) // A_DEVICE
        self.library_bytes = int((share + WATERMARK * FIXED_BYTES) / (1 + WATERMARK))
        self.recipes: list[Recipe] = []
        for number in range(MODELS):
            write_tiny_model(folder / f"model-{number}", seed=number, ends=False)
            made = stoker.causal_lm(folder / f"model-{number}", memory=f"{self.library_bytes} B")
            cache_tokens = (self.library_bytes - FIXED_BYTES) // TOKEN_BYTES  # for many short texts, not one long text
            needs = replace(made.needs, token_bytes=TOKEN_BYTES, cache_tokens=cache_tokens)
            self.recipes.append(replace(made, needs=needs))

    def machine(self, times: StepTimes) -> Machine:
        return Machine(times, self.device_bytes, self.library_bytes)

    def warm(self, count: int = MODELS) -> None:
        """Load the first `count` models together."""
        streams = [stoker.stream(self._app(number, Objective(), prompt=8), "a warm-up", 4) for number in range(count)]
        for stream in streams:
            list(stream)

    async def rehearse(self) -> None:
        over = time.monotonic() + REHEARSAL_S

        async def client(model: int, chance: random.Random) -> None:
            while time.monotonic() < over:
                [request] = requests_at(1.0, seed=chance.randrange(10**6), for_s=1e9, most=1)
                app = self._app(model, Objective(), prompt=request.prompt)
                with stoker.stream(app, text_of(request, chance), request.output) as stream:
                    async for _piece in stream:
                        pass

        await asyncio.gather(*(client(each % MODELS, random.Random(each)) for each in range(2 * MODELS)))

    def step_times(self) -> StepTimes:
        time.sleep(TOLD_EVERY_S)
        file = state_folder() / "performance.sqlite"
        store = PerformanceStore(file)
        times = StepTimes()
        for recipe in self.recipes:
            for each in store.step_times(recipe.key).values():
                times = times.joined(each)
        with sqlite3.connect(file, timeout=30.0) as measured:
            measured.execute("DELETE FROM steps")
        return times

    def _app(self, model: int, objective: Objective, *, prompt: int) -> StokerApp:
        objectives = {"ttft_s": objective.ttft_s, "tpot_s": objective.tpot_s} if objective.ttft_s else {}
        lengths = {"input_length": prompt, "expected_output": OUTPUT_MEAN}
        return streaming_app(context=self.recipes[model], features=lengths, **objectives)

    async def run(
        self, requests: list[Request], objective: Objective, *, seed: int, limit_s: float | None = None
    ) -> list[TokenTimes]:
        """Send requests at their times. Return when their tokens arrived. Cancel open requests after `limit_s`."""
        chance = random.Random(f"prompts/{seed}")
        prompts = [text_of(each, chance) for each in requests]
        self.failed: Counter[str] = Counter()
        begun = time.monotonic() + 1.0
        found = [
            TokenTimes(each.at_s, each.prompt, each.output, each.at_s + objective.ttft_s, objective.tpot_s)
            for each in requests
        ]

        async def one(request: Request, prompt: str, times: TokenTimes) -> None:
            app = self._app(request.model, objective, prompt=request.prompt)
            try:
                await asyncio.sleep(max(0.0, begun + request.at_s - time.monotonic()))
                with stoker.stream(app, prompt, request.output) as stream:
                    async for _piece in stream:
                        here = [time.monotonic() - begun] * (1 + len(stream.take_arrived()))
                        times.add(here, made=times.seen)
                times.output = times.seen or times.output  # An engine may end a text early.
            except (StokerError, asyncio.CancelledError) as error:
                self.failed[type(error).__name__] += 1
                times.late_s = math.inf

        tasks = [asyncio.ensure_future(one(*each)) for each in zip(requests, prompts, found, strict=True)]
        _, late = await asyncio.wait(tasks, timeout=limit_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks)
        return found


def side(seed: int = 1, for_s: float = FOR_S, by_memory: bool = False) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="live-") as place:
        keep_state_in(place)
        site = Path(place) / "site.toml"
        site.write_text(ONE_PILOT.format(devices=DEVICES, policy=f"{slinfer_policies.__file__}:patient"))
        live = Live(Path(place))
        with stoker.load(str(site), run_dir=place, progress=False) as session:
            live.warm()
            found = _compare(live, seed=seed, for_s=for_s, weighed=not by_memory)
            found["loads"] = sum(context.loads for context in session.status().contexts)
    return {**found, "load": os.getloadavg()}


def _compare(live: Live, *, seed: int, for_s: float, weighed: bool) -> dict[str, Any]:
    def choose(times: StepTimes) -> tuple[Objective, float, float]:
        objective = objective_of(times)
        chosen = choose_rate(live.machine(times), objective, seed=seed, for_s=for_s, weighed=weighed)
        return objective, *chosen

    asyncio.run(live.rehearse())
    objective, rate, _ = choose(live.step_times())
    rehearsed = requests_at(rate, seed=seed + 100, for_s=for_s)
    asyncio.run(live.run(rehearsed, objective, seed=seed + 100))
    before = live.step_times()
    objective, rate, predicted = choose(before)
    requests = requests_at(rate, seed=seed, for_s=for_s)
    load = os.getloadavg()[0]
    times = asyncio.run(live.run(requests, objective, seed=seed))
    after = live.step_times()
    outputs = [each.output for each in times]
    found: dict[str, Any] = {
        "seed": seed, "ttft_s": objective.ttft_s, "tpot_s": objective.tpot_s, "rate": rate,
        "predicted": predicted, "chosen_well": WITHIN[0] <= predicted <= WITHIN[1],
        "live": sum(each.is_met for each in times) / len(times), "requests": len(requests),
        "failed": dict(live.failed), "load_in_run": [load, os.getloadavg()[0]],
        "live_first_s": median_of(each.ttft_s for each in times if each.seen),
        "live_tpot_s": median_of(each.mean_tpot_s for each in times if each.seen > 1),
        "step_s": [objective_of(each).tpot_s / TPOT_STEPS for each in (before, after)],
        "tables": [msgspec.to_builtins(each) for each in (before, after)],
        "tokens": [sum(each.output for each in requests), sum(outputs)],
    }  # fmt: skip
    for name, by_time in (("simulated", weighed), ("simulated_other", not weighed)):
        simulated = simulate(requests, outputs, live.machine(after), objective, weighed=by_time)
        found |= {name: simulated.share, f"{name}_first_s": simulated.first_s, f"{name}_tpot_s": simulated.tpot_s}
    return found


if __name__ == "__main__":
    print_side(side, __doc__)
