"""Measure the processor time of `Core.handle` for a round of the `prompt-tuner` policy (dispatch and residency).

96 GPUs serve arrivals of three models. At 1,000 GPUs, 10,000 jobs wait. `from scratch` is the first round of a policy;
in later rounds one job arrives or ends.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

from benchmarks.engine.driven import SESSION, DrivenCore, collect_as_the_live_loop
from benchmarks.harness import in_turns, run_side
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.recipe import Needs, Recipe
from stoker.manager.core.events import Event, FromPilot, SetTimer, TimerFired
from stoker.manager.core.reactor import Core
from stoker.manager.core.seams import Changes
from stoker.manager.policies.prompt_tuner import prompt_tuner
from stoker.manager.policies.provisioning import ExternalPilots
from stoker.protocol import to_manager as told
from stoker.protocol import wire
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec, Features, Objective
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId, PilotId, RecipeKey
from stoker.protocol.to_pilot import RunCalls

GB = 10**9
MODELS = ("gpt2-base", "gpt2-large", "vicuna-7b")
LOAD_S, MOST = 20.0, 8
ROUNDS = ("round/dispatch", "round/residency")


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    times = 1 if quick else 5
    sides = {case: partial(run_side, side, case=case, quick=quick) for case in ("steady", "warm", "mixed")}
    found = in_turns(sides, times, say)
    runs = found["steady"]
    cells = {"longest, ms": [one["longest_ms"] for one in runs], "ms": [one["mean_ms"] for one in runs]}
    lines = [Line(what="96 GPUs, three models: rounds, mean", cells=cells, bar=Bar(at_most=2, repeats=times))]
    for case, what in (("warm", "all of them busy"), ("mixed", "a tenth of them cold")):
        title = f"1,000 GPUs, 10,000 jobs wait, {what}"
        for name, of, most_ms in (
            (f"{title}: from scratch", "scratch_ms", 50), ("  one job has come", "comes_ms", 2),
            ("  one job has ended", "ends_ms", 2),
        ):  # fmt: skip
            bar = Bar(at_most=most_ms, repeats=times)
            lines.append(Line(what=name, cells={"ms": [one[of] for one in found[case]]}, bar=bar))
    return Table(lines=lines)


class Cluster(DrivenCore):
    def __init__(self, *, gpus: int, seed: int) -> None:
        super().__init__(Core(SESSION, prompt_tuner(provisioning=ExternalPilots()), strict=True))
        self.chance = random.Random(seed)
        self.calls = 0
        self.work: dict[int, float] = {}
        self.agenda: list[tuple[float, int, Event]] = []
        self._count = itertools.count()
        self.take(self.core.start())
        self.join()
        self.client(told.DefineFunction(FunctionKey("tune"), "tune", b"code"))
        for model in MODELS:
            needs = Needs(device_memory_bytes=60 * GB)
            self.client(told.DefineRecipe(Recipe(model, model, b"loader", needs=needs)))
            context = self.core.state.contexts[model]
            context.load_s = LOAD_S
            context.paces.use_advised_paces({size: 1.0 / size for size in range(1, MOST + 1)})
        facts = tuple(told.DeviceFacts(DeviceId(f"cuda:{i}"), "NVIDIA A100", 80 * GB) for i in range(8))
        for n in range(gpus // 8):
            hello = told.PilotHello(wire.VERSION, SESSION, f"node{n}", 1, facts)
            self.pilot(PilotId(f"node{n}"), hello, numbered=False)

    def job(self, *, model: str = "", items: int = 0, due_in: float = 0.0) -> None:
        self.calls += 1
        work = items or self.chance.randint(20, 200)
        due_at = self.now + (due_in or 5.0 + work * self.chance.uniform(0.5, 2.0))
        spec = CallSpec(CallId(self.calls), b"", Features(work))
        options = CallOptions(objective=Objective(deadline_at=due_at), gang=(1, MOST))
        self.work[self.calls] = work
        key = RecipeKey(model or self.chance.choice(MODELS))
        self.client(told.Submit(FunctionKey("tune"), key, [spec], options))

    def run(self, until: float) -> list[float]:
        took: list[float] = []
        both = 0.0
        while self.agenda and self.agenda[0][0] <= until:
            self.now, _, event = heapq.heappop(self.agenda)
            if isinstance(event, FromPilot):
                event = FromPilot(event.pilot, self.number(event.pilot), event.messages)
            before = self.spent_s
            self.give(event)
            if isinstance(event, TimerFired) and event.key in ROUNDS:
                both += self.spent_s - before
                if event.key == ROUNDS[1]:
                    took.append(both)
                    both = 0.0
        self.now = until
        return took

    def set_timer(self, timer: SetTimer) -> None:
        self._later(timer.at, TimerFired(timer.key))

    def start_library(self, pilot: PilotId, library: LibraryId) -> None:
        ready = told.LibraryReady(library, 0.0, LOAD_S)
        self._later(self.now + LOAD_S, FromPilot(pilot, 0, [ready]))

    def run_calls(self, pilot: PilotId, order: RunCalls) -> None:
        for spec in order.calls:
            size = order.gang.size if order.gang is not None else 1
            takes_s = self.work[spec.call] / size + (2.0 if size > 1 else 0.0)
            ended = told.CallsEnded(order.library, [CallEnd(spec.call, True, b"", takes_s)])
            self._later(self.now + takes_s, FromPilot(pilot, 0, [ended]))

    def _later(self, at: float, event: Event) -> None:
        heapq.heappush(self.agenda, (at, next(self._count), event))


def steady(part: int) -> dict[str, float]:
    cluster = Cluster(gpus=96, seed=1)
    took: list[float] = []
    for _ in range(1200 // part):
        for _ in range(cluster.chance.choice((0, 0, 1, 2, 3))):
            cluster.job()
        took += cluster.run(cluster.now + 1.0)
    return {"mean_ms": 1e3 * statistics.fmean(took), "longest_ms": 1e3 * max(took)}


def crowd(part: int, *, cold: float) -> dict[str, float]:
    gpus, jobs = 1000 // part // 8 * 8, 10_000 // part
    cluster = Cluster(gpus=gpus, seed=1)
    for n in range(int(gpus * (1 - cold))):
        cluster.job(model=MODELS[n % 3], items=3600, due_in=3600.0 + 1.5 * LOAD_S)
    cluster.run(100.0)
    warm = [x for x in cluster.core.state.libraries.values() if x.held]
    for _ in range(jobs):  # Some jobs are in time on freed devices, some on more devices, and some never.
        cluster.job(due_in=cluster.chance.choice((5.0, 3700.0, cluster.chance.uniform(3600.0, 20_000.0))))
    scratch = []
    for _ in range(3):
        fresh, before = prompt_tuner(provisioning=ExternalPilots()), time.thread_time()
        fresh.dispatch.on_round(cluster.core.state, Changes())
        fresh.residency.on_round(cluster.core.state, Changes())
        scratch.append(time.thread_time() - before)
    cluster.run(cluster.now + 20.0)
    comes, ends = [], []
    for n in range(20):
        cluster.job(due_in=cluster.chance.uniform(3600.0, 20_000.0))
        comes += cluster.run(cluster.now + 0.05)
        library = warm[n]
        call = next(iter(library.held))
        cluster.pilot(
            library.pilot.id, told.CallsEnded(LibraryId(library.id), [CallEnd(CallId(call), True, b"", 3600.0)])
        )
        ends += cluster.run(cluster.now + 0.05)
    return {
        "scratch_ms": 1e3 * statistics.median(scratch), "comes_ms": 1e3 * statistics.fmean(comes),
        "ends_ms": 1e3 * statistics.fmean(ends),
    }  # fmt: skip


def side(case: str, quick: bool) -> dict[str, float]:
    collect_as_the_live_loop()
    part = 10 if quick else 1
    return steady(part) if case == "steady" else crowd(part, cold={"warm": 0.0, "mixed": 0.1}[case])
