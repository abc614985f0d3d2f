"""Simulate one run: system, models, nodes, workload and results."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.papers.common import RELEASE, Store, case_name
from benchmarks.papers.slinfer import authors, worlds
from benchmarks.papers.slinfer.measures import Measures, Sampled, Sampler, measure
from benchmarks.papers.slinfer.sllm import sllm
from benchmarks.papers.slinfer.worlds import CPU, GPU, OBJECTIVE, Nodes, read_workload
from stoker.manager.core.seams import Policies
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import World

SLLM, SLLM_C, SLLM_CS, SLLM_CS_STATIC, SLINFER = "sllm", "sllm+c", "sllm+c+s", "sllm+c+s, static", "slinfer"
BASELINES = (SLLM, SLLM_C, SLLM_CS, SLLM_CS_STATIC)
FOR_S = 1800.0


class Case(msgspec.Struct, frozen=True):
    """`sizes`: sizes that models take in turn. `settings`: policy settings. `for_s`: seconds; 0 = half an hour.
    `program`: rows of the variant "authors' program" (`authors.ROWS`). `longest`: tokens of the smallest cache; 0 = the
    workload's maximum.
    """

    system: str
    models: int
    sizes: tuple[str, ...] = ("llama-2-7b",)
    workload: str = "AzureConv"
    nodes: Nodes = Nodes()
    settings: dict[str, Any] = {}
    for_s: float = 0.0
    program: tuple[str, ...] = ()
    longest: int = 0

    def __str__(self) -> str:
        rows = f", authors' program ({', '.join(self.program)})" if self.program else ""
        return f"{self.system}, {self.models} x {', '.join(self.sizes)}, {self.workload}{rows}"

    @property
    def name(self) -> str:
        return case_name(self)


class Result(msgspec.Struct, frozen=True):
    case: Case
    release: str
    measures: Measures
    sampled: dict[str, Sampled]
    took_s: float
    engine_steps: int


def run(case: Case) -> Result:
    sizes = [case.sizes[number % len(case.sizes)] for number in range(case.models)]
    world, make = system_of(case, sizes)
    objective = authors.objective_of(case.program, OBJECTIVE)
    arrivals: list[Arrival] = read_workload(case.workload, case.models, objective=objective, for_s=case.for_s)
    simulation = Simulation(world, arrivals, make(), seed=0)
    for_s = case.for_s or FOR_S
    sampler = Sampler(simulation, for_s=for_s)
    began = time.process_time()
    outcome = simulation.run()
    took_s = round(time.process_time() - began, 1)
    kinds = {pilot.number: pilot.kind for pilot in simulation.pilots.values()}
    not_granted_s = {
        name: float(context.load_s[GPU]) - worlds.weights_load_s(size)
        for size, (name, context) in zip(sizes, world.contexts.items(), strict=True) if "cache" in case.program
    }  # fmt: skip
    measures = measure(simulation.log, arrivals, kinds, for_s=for_s, objective=OBJECTIVE, not_granted_s=not_granted_s)
    return Result(case, RELEASE, measures, sampler.found(), took_s, outcome.engine_steps)


def system_of(case: Case, sizes: list[str]) -> tuple[World, Callable[[], Policies]]:
    system, nodes, rows = case.system, case.nodes, case.program
    if rows:
        if len(case.sizes) > 1:
            raise ValueError("the authors' program has models of one size")
        nodes = authors.nodes_of(rows, case.sizes[0], nodes)
    if system == SLINFER:
        longest = case.longest or LONGEST.get(case.workload, 4096)
        world = worlds.elastic_world(sizes, nodes, longest=longest)
        return world, lambda: authors.slinfer(rows, case.sizes[0], **case.settings)
    if system not in BASELINES:
        raise KeyError(system)
    share = 2 if system == SLLM_CS else 1
    if system == SLLM:
        nodes = msgspec.structs.replace(nodes, cpus=0)
    if system == SLLM_CS_STATIC:
        nodes = msgspec.structs.replace(nodes, parts=2)
    world = worlds.limited_world(sizes, nodes, share=share)
    together = max(share, nodes.parts)
    names = {(f"model-{number}", kind): (size, kind) for number, size in enumerate(sizes) for kind in (CPU, GPU)}
    limits = {name: worlds.limit_of(*each, together) for name, each in names.items()}
    parts = {name: worlds.parts_of(*each, share) for name, each in names.items()}
    settings = authors.baseline_settings(rows) | case.settings
    return world, lambda: sllm(limits=limits, parts=parts, **settings)


LONGEST = {"LongBench": 32_768}
"""Maximum text length by workload; the default is 4,096 tokens."""


class Kept(msgspec.Struct):
    runs: list[Result] = []


def records(path: Path) -> Store[Case, Result]:
    return Store(path, Kept)
