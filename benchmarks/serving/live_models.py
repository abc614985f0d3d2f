"""Eight small models on two CPU devices under `slinfer`: the share of requests in time, live and simulated.

The models load and rehearse twice: first two clients per model request without a pause, then requests arrive as in the
trace. The second rehearsal gives the objectives, and the rate at which the simulator predicts three quarters of the
requests in time. Then the trace runs live, and in the simulator with the measured steps. Pilots judge offers by time
and memory (decision 061); a second line simulates pilots that use memory alone.

    python -m benchmarks.serving.live_models --seed 1 --for 40 [--by-memory]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sqlite3
import string
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from tiny_model import write_tiny_model

import stoker
from benchmarks.harness import ROOT, missing, run_side
from benchmarks.serving.live_models_world import (
    A_DEVICE,
    DEVICES,
    MODELS,
    OUTPUT_MEAN,
    TPOT_STEPS,
    WITHIN,
    Machine,
    Request,
    choose_rate,
    median_of,
    objective_of,
    requests_at,
    simulate,
)
from benchmarks.tables import Bar, Line, Table
from stoker.contexts import state_folder
from stoker.contexts.performance import PerformanceStore
from stoker.contexts.recipe import Recipe
from stoker.contexts.step_times import StepTimes
from stoker.errors import StokerError
from stoker.manager.executor.apps import StokerApp
from stoker.manager.executor.options import parse_call_specification
from stoker.manager.executor.prepared import AppWants
from stoker.manager.sim.log import TokenTimes
from stoker.pilot.devices import cpu
from stoker.protocol.calls import Objective

NAME, TITLE = "live_models", "eight models on two devices, live and simulated: requests in time"
SIDE = "benchmarks.serving.live_models"
SEEDS, FOR_S = (1, 2, 3), 30.0
BAR_POINTS = 5.0


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    if reason := missing("torch", "transformers", "tokenizers", "safetensors", "pytest"):
        return Table(name=NAME, title=TITLE, skipped=reason)
    runs = []
    for seed in SEEDS[:1] if quick else SEEDS:
        run = run_side(SIDE, "--seed", str(seed), "--for", str(10.0 if quick else FOR_S), timeout_s=1800.0)
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
    return Table(
        name=NAME,
        title=TITLE,
        lines=[
            Line(
                what="in time, %",
                cells={"live": live, "simulated": simulated, "apart, points": apart},
                bar=Bar(at_most=BAR_POINTS),
                digits=1,
            ),
            Line(what="what was predicted before, %", cells={"predicted": predicted}, digits=1),
            Line(what="simulated pilots judge by memory alone, %", cells={"simulated": other}, digits=1),
        ],
        notes=notes,
    )


TOKEN_BYTES = 2 * 6 * 64 * 4
"""Keys and values of 6 layers, 64 wide, 4 bytes each."""
FIXED_BYTES = 510_000_000
"""A library's memory without its cache (`contexts.inference.static`)."""
WATERMARK = 0.25
"""Share of extra cache that the policy reserves at a load."""
REHEARSAL_S, TOLD_EVERY_S = 25.0, 13.0
SITE = """
name = "here"
[provider]
kind = "local"
[pilot]
devices = "cpu:{devices}"
init_blocks = 1
max_blocks = 1
[policy]
name = "{policy}:patient"
"""


def write(model: Any, prompt: str, tokens: int) -> Iterator[str]:
    for token in model.stream_completion(prompt, max_new_tokens=tokens):
        yield token.text


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
        return Machine(times, self.device_bytes, self.library_bytes, TOKEN_BYTES, FIXED_BYTES)

    def warm(self) -> None:
        streams = [stoker.stream(self._app(number, Objective(), prompt=8), "a warm-up", 4) for number in range(MODELS)]
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
        wants = parse_call_specification(
            {
                "context": self.recipes[model], "stream": True,
                "features": {"input_length": prompt, "expected_output": OUTPUT_MEAN},
                **({"ttft_s": objective.ttft_s, "tpot_s": objective.tpot_s} if objective.ttft_s else {}),
            },
            takes_context=True,
        )  # fmt: skip
        return StokerApp(
            write, specification=AppWants(wants), batch_size=None, cache=False, ignore_for_cache=None, executors=None
        )

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


def main() -> None:
    asking = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asking.add_argument("--seed", type=int, default=1)
    asking.add_argument("--for", dest="for_s", type=float, default=30.0)
    asking.add_argument(
        "--by-memory", dest="weighed", action="store_false", help="simulated pilots judge offers by memory alone"
    )
    asked = asking.parse_args()
    with tempfile.TemporaryDirectory(prefix="live-") as place:
        os.environ |= {"STOKER_HOME": f"{place}/home", "STOKER_SCRATCH": f"{place}/scratch"}
        site = Path(place) / "site.toml"
        site.write_text(SITE.format(devices=DEVICES, policy=ROOT / "benchmarks" / "serving" / "live_models_policy.py"))
        live = Live(Path(place))
        with stoker.load(str(site), run_dir=place, progress=False) as session:
            live.warm()
            found = _compare(live, asked)
            found["loads"] = sum(context.loads for context in session.status().contexts)
    found["load"] = os.getloadavg()
    sys.stdout.write(json.dumps(found) + "\n")


def _compare(live: Live, asked: argparse.Namespace) -> dict[str, Any]:
    asyncio.run(live.rehearse())
    before = live.step_times()
    objective, rate, _ = _choose_load(live, before, asked)
    rehearsed = requests_at(rate, seed=asked.seed + 100, for_s=asked.for_s)
    asyncio.run(live.run(rehearsed, objective, seed=asked.seed + 100))
    before = live.step_times()
    objective, rate, predicted = _choose_load(live, before, asked)
    found: dict[str, Any] = {
        "seed": asked.seed, "ttft_s": objective.ttft_s, "tpot_s": objective.tpot_s, "rate": rate,
        "predicted": predicted, "chosen_well": WITHIN[0] <= predicted <= WITHIN[1],
    }  # fmt: skip
    requests = requests_at(rate, seed=asked.seed, for_s=asked.for_s)
    load = os.getloadavg()[0]
    times = asyncio.run(live.run(requests, objective, seed=asked.seed))
    after = live.step_times()
    outputs = [each.output for each in times]
    machine = live.machine(after)
    for name, weighed in (("simulated", asked.weighed), ("simulated_other", not asked.weighed)):
        simulated = simulate(requests, outputs, machine, objective, weighed=weighed)
        found[name] = simulated.share
        found |= {f"{name}_first_s": simulated.first_s, f"{name}_tpot_s": simulated.tpot_s}
    found |= {
        "live": sum(each.is_met for each in times) / len(times), "requests": len(requests),
        "failed": dict(live.failed), "load_in_run": [load, os.getloadavg()[0]],
        "live_first_s": median_of(each.ttft_s for each in times if each.seen),
        "live_tpot_s": median_of(each.mean_tpot_s for each in times if each.seen > 1),
        "step_s": [_decode_step_s(before), _decode_step_s(after)],
        "tables": [msgspec.to_builtins(each) for each in (before, after)],
        "tokens": [sum(each.output for each in requests), sum(outputs)],
    }  # fmt: skip
    return found


def _choose_load(live: Live, times: StepTimes, asked: argparse.Namespace) -> tuple[Objective, float, float]:
    objective = objective_of(times)
    machine = live.machine(times)
    return objective, *choose_rate(machine, objective, seed=asked.seed, for_s=asked.for_s, weighed=asked.weighed)


def _decode_step_s(times: StepTimes) -> float:
    return objective_of(times).tpot_s / TPOT_STEPS


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
