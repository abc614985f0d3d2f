"""Measure the cost of SLINFER's decisions: shadow validations, decisions for calls, and a simulated run.

The run has 128 models of 7B on four CPU and four GPU nodes, with the workload of SLINFER's authors. A *candidate* is
one shadow validation. A *decision* is all computation for a call until a library accepts the call or the call waits
(§IX-H, Figure 33). Every 0.1 s, a round decides about waiting calls again. Rounds have a separate line. Times are
processor time of one core.

    python -m benchmarks.side benchmarks.papers.slinfer.decisions side for_s=300
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from benchmarks.harness import Skipped, in_turns, run_side
from benchmarks.papers.slinfer.cases import FOR_S, SLINFER, Case, system_of
from benchmarks.papers.slinfer.worlds import missing, read_workload
from benchmarks.tables import Bar, Line, Table
from stoker.manager.core.nouns import Call
from stoker.manager.core.seams import Action, View
from stoker.manager.sim.run import Simulation
from stoker.pilot.core import reactor
from stoker.pilot.core.events import OfferInspected
from stoker.pilot.core.state import CoreState
from stoker.pilot.core.turns import LateRefusal, refuse_if_late

SIZE, MODELS = "llama-2-7b", 128
WARM_UP_S = 30.0
CANDIDATE_MS, DECISION_MS, RUN_S = 0.05, 0.3, 60.0


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """Time decisions in a part of the workload; then simulate the whole half hour once without timing."""
    if reason := missing():
        raise Skipped(reason)
    repeats, for_s = (1, 40.0) if quick else (3, 120.0)
    [found] = in_turns({"timed": partial(run_side, side, for_s=for_s)}, repeats, say).values()
    whole = run_side(side, for_s=for_s if quick else FOR_S, plain=True)
    lines = [
        _line("a candidate: shadow validation", found, "candidate", CANDIDATE_MS),
        _line("a decision: all candidates of a call", found, "decision", DECISION_MS),
        _line("a round of calls that wait", found, "round", None),
        Line(
            what=f"{MODELS} models of 7B for half an hour, simulated", cells={"s of a core": [whole["run_s"]]},
            bar=Bar(at_most=RUN_S, repeats=1), last_digits=0,
        ),
    ]  # fmt: skip
    return Table(lines=lines)


def _line(what: str, found: list[dict[str, Any]], name: str, most_ms: float | None) -> Line:
    cells = {"p99, ms": [one[f"{name}_p99_ms"] for one in found], "mean, ms": [one[f"{name}_ms"] for one in found]}
    return Line(what=what, cells=cells, bar=Bar(at_most=most_ms) if most_ms else None, digits=3, last_digits=3)


class DecisionTimer:
    """Replaces a policy's decisions and the pilots' validations by functions that measure their time."""

    def __init__(self, dispatch: Any) -> None:
        self.candidates_s: list[float] = []
        self.rounds_s: list[float] = []
        self.decisions_s: dict[tuple[int, int], float] = defaultdict(float)
        """Seconds of decisions by call number and number of the previous round."""
        self._call = self._round = 0
        self._weighed, self._place, self._do_round = reactor.accept_or_refuse_offer, dispatch.place, dispatch.round
        reactor.accept_or_refuse_offer, reactor.refuse_if_late = self._weigh, self._validate  # type: ignore[attr-defined]
        dispatch.place, dispatch.round = self._placed, self._timed_round

    def begin(self) -> None:
        for found in (self.candidates_s, self.rounds_s, self.decisions_s):
            found.clear()

    def _weigh(self, state: CoreState, event: OfferInspected) -> None:
        self._call = event.order.calls[0].call
        self._weighed(state, event)

    def _validate(self, *args: Any, **more: Any) -> LateRefusal | None:
        began = time.process_time()
        found = refuse_if_late(*args, **more)
        took = time.process_time() - began
        self.candidates_s.append(took)
        self._add(self._call, took)
        return found

    def _placed(self, view: View, call: Call) -> Any:
        began = time.process_time()
        answer = self._place(view, call)
        self._add(call.id, time.process_time() - began)
        return (
            answer if isinstance(answer, int | msgspec.Struct | None) else _timed(answer, partial(self._add, call.id))
        )

    def _timed_round(self, *args: Any) -> Iterator[Action]:
        self._round += 1
        took: list[float] = []
        yield from _timed(self._do_round(*args), took.append)
        self.rounds_s.append(sum(took))

    def _add(self, call: int, seconds: float) -> None:
        self.decisions_s[call, self._round] += seconds


def _timed(actions: Iterable[Action], add: Callable[[float], None]) -> Iterator[Action]:
    left = iter(actions)
    while True:
        began = time.process_time()
        action = next(left, None)
        add(time.process_time() - began)
        if action is None:
            return
        yield action


def side(for_s: float = FOR_S, plain: bool = False) -> dict[str, float]:
    world, make = system_of(Case(SLINFER, MODELS, (SIZE,)), [SIZE] * MODELS)
    policies = make()
    watch = None if plain else DecisionTimer(policies.dispatch)
    simulation = Simulation(world, read_workload("AzureConv", MODELS, for_s=for_s), policies, seed=0)
    if watch is not None:
        simulation.agenda.schedule_after(WARM_UP_S, watch.begin)
    began = time.process_time()
    simulation.run()
    found = {"run_s": time.process_time() - began}
    if watch is not None:
        decisions_s = list(watch.decisions_s.values())
        times = {"candidate": watch.candidates_s, "decision": decisions_s, "round": watch.rounds_s}
        for name, seconds in times.items():
            found[f"{name}_ms"] = 1000 * statistics.fmean(seconds)
            found[f"{name}_p99_ms"] = 1000 * statistics.quantiles(seconds, n=100)[98]
    return found
