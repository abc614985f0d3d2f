"""Measure the parts of a tuning job's time. Also forecast a gang of two by simulation, from a job on one device.

- *Shares*: communication as a share of iterations (0.4 to 0.5 % in the paper, §2.2), and fixed parts: lookup, start,
checkpoints.

- *Forecast*: the simulator runs the job on two devices with the times of one device. The bar applies only to the
lookup, which a live gang divides (`stoker.tuning.call`).

The side runs two jobs on one device, then two jobs on two devices. Only each second job counts.

`tune_start` measures the time from before `tune(job)` to the first optimizer step on one device. The time includes the
first evaluation (four samples). A *cold* job also includes pilot start, imports and load, from the model file or a
snapshot of an earlier pilot. The *warm* job runs afterwards.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import stoker
from benchmarks.harness import MODEL, in_turns, need, ratios, run_side
from benchmarks.papers.common import fixed_source
from benchmarks.tables import Bar, Line, Table
from stoker.apps.prompt_tuning import tune
from stoker.manager.policies import default_policies
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, World
from stoker.site import Duration, Size
from stoker.tuning.job import Data, Job, Metric, Prompt, Sample, Training, Until

ITERATIONS = 12
LIMIT_S = 1800.0
_ITERATIONS = ("data", "compute", "communication", "evaluation")


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need(*MODEL, "peft")
    found = sides(say, repeats=1 if quick else 3)
    return Table(lines=[*forecast_lines(found), *share_lines(found)], notes=[f"{ITERATIONS} iterations"])


def start(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need(*MODEL, "peft")
    found: list[dict[str, Any]] = []
    for turn in range(1 if quick else 3):
        with tempfile.TemporaryDirectory(prefix="tune-start-") as state:
            places = {"STOKER_HOME": state, "STOKER_SNAPSHOTS": str(Path(state) / "snapshots")}
            first, second = (run_side(starts, environment=places) for _ in range(2))
        say(
            f"{turn + 1}: cold {first['cold_s']:.1f} s, snapshot {second['cold_s']:.1f} s, warm {first['warm_s']:.2f} s"
        )
        found.append({**first, "snapshot_s": second["cold_s"], "again_s": second["warm_s"]})
    cold, kept, warm = ([one[name] for one in found] for name in ("cold_s", "snapshot_s", "warm_s"))
    sooner = {"times": ratios(cold, warm)}
    lines = [
        Line(what="cold: no pilot yet, the model from its file", cells={"seconds": cold}, digits=1),
        Line(what="cold: no pilot yet, the model from a snapshot", cells={"seconds": kept}, digits=1),
        Line(what="warm: the model is there", cells={"seconds": warm}, digits=2),
        Line(what="warm, times sooner than cold", cells=sooner, bar=Bar(at_least=10), last_digits=1),
        Line(what="warm, times sooner than from a snapshot", cells={"times": ratios(kept, warm)}, last_digits=1),
    ]
    return Table(lines=lines)


def sides(say: Callable[[str], None], *, repeats: int) -> list[dict[str, Any]]:
    return in_turns({"jobs": partial(run_side, parts, timeout_s=3600)}, repeats, say)["jobs"]


def forecast_lines(found: list[dict[str, Any]]) -> list[Line]:
    one, two = _spent(found, "one"), _spent(found, "two")
    lookups, jobs = [spent["bank"] for spent in two], [sum(spent.values()) for spent in two]
    halves, simulated = [spent["bank"] / 2 for spent in one], [simulated_s(side) for side in found]
    return [
        _forecast("tuning: the lookup on two devices, s", lookups, halves, bar=Bar(at_most=20.0)),
        _forecast("tuning: the whole job on two devices, s", jobs, simulated),
    ]


def _forecast(what: str, live: list[float], there: list[float], *, bar: Bar | None = None) -> Line:
    errors = [100 * abs(other / here - 1) for here, other in zip(live, there, strict=True)]
    cells = {"live": live, "simulated": there, "error, %": errors}
    return Line(what=what, cells=cells, bar=bar, digits=1, last_digits=1)


def share_lines(found: list[dict[str, Any]]) -> list[Line]:
    lines = []
    for what, name in (("one device", "one"), ("two devices", "two")):
        cells = {"%": [100 * side[name]["communication"] for side in found]}
        lines.append(Line(what=f"communication, of the time of iterations, {what}", cells=cells, last_digits=2))
        cells = {"%": [100 * fixed_s(spent) / sum(spent.values()) for spent in _spent(found, name)]}
        lines.append(Line(what=f"fixed costs, of the job, {what}", cells=cells, last_digits=1))
    return lines


def _spent(found: list[dict[str, Any]], name: str) -> list[dict[str, float]]:
    return [side[name]["spent_s"] for side in found]


def fixed_s(spent: dict[str, float]) -> float:
    return sum(seconds for part, seconds in spent.items() if part not in _ITERATIONS)


def simulated_s(side: dict[str, Any]) -> float:
    """Return the simulated seconds of the job on two devices, from times on one device."""
    spent = side["one"]["spent_s"]
    head_s = fixed_s(spent) - spent["bank"]
    context = ContextModel(
        device_memory_bytes=Size(1),
        call_s={"": Duration(head_s)},
        item_s={"": Duration((sum(spent.values()) - fixed_s(spent)) / ITERATIONS)},
    )
    source = fixed_source("here", "cpu", 1, devices=2)
    world = World({"cpu": DeviceKind(Size(2))}, (source,), {"llm": context}, delays=Delays(message_s=Duration(0.0)))
    job = Arrival(0.0, "llm", ITERATIONS, gang=(2, 2), shared_s=spent["bank"])
    simulation = Simulation(world, [job], default_policies())
    return simulation.run().ended_at


def numbers(count: int) -> list[Sample]:
    return [Sample(f"The number is {number}.", "even" if number % 2 == 0 else "odd") for number in range(count)]


def job(name: str) -> Job:
    return Job(
        name=name, data=Data("numbers", evaluation_samples=8, held_out=0.1), prompt=Prompt(""),
        until=Until(metric=Metric.LOSS, iterations=ITERATIONS, evaluate_every=4), training=Training(batch=8),
    )  # fmt: skip


def start_s() -> float:
    job = Job(
        data=Data("numbers", evaluation_samples=4, held_out=0.1), prompt=Prompt("Is the number even or odd?"),
        until=Until(metric=Metric.LOSS, iterations=1), training=Training(batch=4),
    )  # fmt: skip
    began = time.time()
    tuned = tune(job, samples=numbers(40), gang=1, bank=None).result(LIMIT_S)
    return float(tuned.first_step_at - began)


def starts() -> dict[str, Any]:
    with stoker.load(progress=False):
        cold = start_s()
        warm = statistics.median(start_s() for _ in range(3))
    return {"cold_s": cold, "warm_s": warm}


def parts() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tuning-times-") as bank, stoker.load(progress=False):
        for what, gang in (("first", 1), ("one", 1), ("two", 2)):
            tuned = tune(job(what), samples=numbers(60), gang=gang, bank=bank).result(LIMIT_S)
            if not tuned.initial_from.startswith("the bank"):
                raise RuntimeError(f"no lookup was made: {tuned.initial_from}")
            found[what] = {"spent_s": tuned.spent_s, "communication": tuned.communication_share}
    return found
