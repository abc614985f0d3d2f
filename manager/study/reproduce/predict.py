"""Figures 8, 9a and 9b from parameters that were fitted on 6 and 7, with nothing refitted.

What the text leaves open is varied instead: when the three GPUs of Figure 8 dropped out, and how quickly the pools of
Figure 9 grew. A prediction is therefore a range, over all good parameter sets and all of these.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from stoker.contexts.recipe import Awareness
from stoker.manager.policies import default_policies
from stoker.manager.sim.log import Happened, Log
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import World
from stoker.manager.study.reproduce import paper, worlds
from stoker.manager.study.reproduce.parameters import Parameters

EARLY_S = (60.0, 300.0, 600.0)
"""When the three GPUs of Figure 8 may have dropped out."""
SLOW_RAMPS_S = (2500.0, 5000.0)
"""How long Figure 9a's pool may have taken to grow from 4 to 20 GPUs: half of the run, or all of it."""
QUICK_RAMPS_S = (200.0, 400.0, 600.0, 780.0)
"""And Figure 9b's, from 0 to 186: "quickly grabs up to"."""
_BATCH = 100


class Prediction(msgspec.Struct, frozen=True):
    """One simulated run. `value`: seconds (Figures 6, 7, 9) or inferences (8). `variant`: what was assumed beyond the
    parameters. `off_line`: how far completed inferences are from being proportional to the capacity that there was, at
    most, as a part of all of them (Figure 9; else 0)."""

    figure: str
    variant: str
    value: float
    off_line: float = 0.0


def static(parameters: Parameters, run: paper.Run) -> Prediction:
    """A run of Figure 6 or 7, in the simulator."""
    simulation = _simulation(worlds.world(parameters, run.awareness, worlds.static()), run.batch)
    outcome = simulation.run()
    return Prediction(run.figure, f"{run.awareness.value}, calls of {run.batch}", outcome.ended_at)


def figure_8(parameters: Parameters) -> Iterator[Prediction]:
    """How many inferences are done when the last GPU is gone."""
    end = paper.PREEMPTED_FROM_S + paper.PREEMPTED_EVERY_S * 2 * paper.EACH + 60.0
    cases = [(Awareness.DISK, 0, 0.0), (Awareness.FULL, 0, 0.0)]
    cases += [(Awareness.FULL, paper.LOST_EARLY, at) for at in EARLY_S]
    for awareness, lost, at in cases:
        pools = worlds.vanishing(lost_early=lost, lost_at_s=at)
        outcome = _simulation(worlds.world(parameters, awareness, pools), _BATCH).run(until_s=end)
        variant = f"{awareness.value}, {lost} lost at {at:.0f} s" if lost else awareness.value
        yield Prediction("8", variant, float(outcome.items))


def figure_9(parameters: Parameters) -> Iterator[Prediction]:
    """When all inferences are done, on pools that grow."""
    low, high = paper.FIGURE_9A_GPUS
    halves = {paper.A10: 1.0, paper.TITAN: 1.0}
    for until_s in SLOW_RAMPS_S:
        yield _growing("9a", parameters, worlds.ramp(halves, first=low, last=high, until_s=until_s), until_s)
    for until_s in QUICK_RAMPS_S:
        pools = worlds.ramp(paper.TABLE_1, first=0, last=paper.FIGURE_9B_GPUS, until_s=until_s)
        yield _growing("9b", parameters, pools, until_s)


def _growing(figure: str, parameters: Parameters, pools: dict[str, worlds.Steps], until_s: float) -> Prediction:
    simulation = _simulation(worlds.world(parameters, Awareness.FULL, pools), _BATCH)
    outcome = simulation.run()
    rates = {f"pool-{n}": 1.0 / worlds.item_s(parameters, kind) for n, kind in enumerate(pools)}
    off = off_line(simulation.log, list(rates.values()))
    return Prediction(figure, f"grown after {until_s:.0f} s", outcome.ended_at, off)


def _simulation(world: World, batch: int) -> Simulation:
    return Simulation(world, worlds.calls(batch), default_policies())


def off_line(log: Log, rates: list[float]) -> float:
    """How far the completed inferences ever are from a straight line through the integral of the capacity.

    `rates`: inferences a second of one GPU, by the number of its pool. The integral counts the GPUs that there were
    times what they could do; the line goes through the origin and the end. What is off it is loads, and the calls that
    were under way when a point was taken.
    """
    points: list[tuple[float, float]] = []
    capacity = [0] * len(rates)
    integral = done = at = 0.0
    for row in range(len(log)):
        now, what = log.at_s[row], log.what[row]
        integral += (now - at) * sum(count * rate for count, rate in zip(capacity, rates, strict=True))
        at = now
        if what == Happened.CAPACITY:
            capacity[log.block[row]] = int(log.value[row])
        elif what == Happened.CALL_ENDED:
            done += log.value[row]
            points.append((integral, done))
    if not points:
        return 0.0
    slope = points[-1][1] / points[-1][0]
    return max(abs(done - slope * integral) for integral, done in points) / points[-1][1]


def everything(parameters: Parameters) -> list[Prediction]:
    """Figures 8 and 9."""
    return [*figure_8(parameters), *figure_9(parameters)]


def spread(found: list[list[Prediction]]) -> dict[str, tuple[float, float]]:
    """Least and most for each figure and each awareness, over all parameter sets and variants."""
    ranges: dict[str, tuple[float, float]] = {}
    for prediction in (one for each in found for one in each):
        name = (
            f"{prediction.figure} {prediction.variant.split(',')[0]}" if prediction.figure == "8" else prediction.figure
        )
        low, high = ranges.get(name, (prediction.value, prediction.value))
        ranges[name] = min(low, prediction.value), max(high, prediction.value)
    return ranges
