"""Compute the measures of SLINFER's evaluation from the log and samples of a run (§IX-B to §IX-I).

Two definitions decide if a request meets its objectives. *Strict*: each token is in time by eq. 1 (§VI-A). *Mean*: the
first token and the mean time per output token are in time, as in the authors' `draw.py`. If a request arrives before
its instance is ready, the load time extends the deadline of the first token (§IX-A). The authors' program excludes the
seconds of cache allocation. *Nodes used*: mean number of nodes with an instance. *Decode speed*: tokens from nodes of
one kind, divided by the seconds in which these nodes were used.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from stoker.manager.core.nouns import LibraryState
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import EventLog, LoggedEvent
from stoker.manager.sim.run import Simulation
from stoker.protocol.calls import Objective

TTFT_POINTS_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_ROUNDING_S = 2e-6
_NEVER = math.inf
NOTHING: Mapping[str, float] = {}


class KindUse(msgspec.Struct, frozen=True):
    """Means over nodes of one kind. `tokens_per_s`: per used node; `running`: requests per busy instance."""

    nodes: float
    instances: float
    tokens_per_s: float
    running: float


class Measures(msgspec.Struct, frozen=True):
    """Shares of all requests. `ttft`: share with a first token within each time of `TTFT_POINTS_S`."""

    requests: int
    met_strict: float
    met_mean: float
    dropped: float
    moved: float
    ttft: tuple[float, ...]
    kinds: dict[str, KindUse]
    loads: int


def measure(
    log: EventLog, arrivals: Sequence[Arrival], kinds: Mapping[int, str], *, for_s: float,
    objective: Objective | None = None, not_granted_s: Mapping[str, float] = NOTHING,
) -> Measures:  # fmt: skip
    """Measure a run. `kinds`: kind of node by pilot.

    `objective`: objective for the mean definition; None = the objective of each request. `not_granted_s`: by context,
    seconds of a load that extend no deadline in the mean definition.
    """
    told = _Told(log)
    count = max(1, len(arrivals))
    strict = mean = 0
    first: list[float] = []
    for place, call in enumerate(told.came):
        arrival = arrivals[place]
        strict += told.late.get(call, _NEVER) <= _ROUNDING_S
        grace_s = max(0.0, told.grace_s(call) - not_granted_s.get(arrival.context, 0.0))
        mean += told.is_met(call, arrival.prompt_tokens, objective or arrival.objective, grace_s=grace_s)
        first.append(told.first.get(call, _NEVER))
    return Measures(
        requests=len(arrivals), met_strict=strict / count, met_mean=mean / count, dropped=len(told.failed) / count,
        moved=told.moved / count, ttft=tuple(sum(each <= most for each in first) / count for most in TTFT_POINTS_S),
        kinds={kind: told.use(kind, kinds, arrivals, for_s=for_s) for kind in sorted(set(kinds.values()))},
        loads=len(told.started),
    )  # fmt: skip


class _Told:
    def __init__(self, log: EventLog) -> None:
        self.came: dict[int, float] = {}
        self.began: dict[int, list[tuple[float, int]]] = defaultdict(list)
        """Start time and library of each run, by call."""
        self.over: dict[int, list[float]] = defaultdict(list)
        self.failed: set[int] = set()
        self.first: dict[int, float] = {}
        self.tpot: dict[int, float] = {}
        self.late: dict[int, float] = {}
        self.started: dict[int, tuple[float, int]] = {}
        """Start time and pilot, by library."""
        self.ready: dict[int, tuple[float, float]] = {}
        """Time when a library is ready, and seconds of its load, by library."""
        self.ended: dict[int, float] = {}
        self.moved = 0
        for row in zip(log.at_s, log.what, log.call, log.library, log.pilot, log.value, strict=True):
            self._hear(*row)

    def _hear(self, at_s: float, what: int, call: int, library: int, pilot: int, value: float) -> None:
        match what:
            case LoggedEvent.CALL_CAME:
                self.came[call] = at_s
            case LoggedEvent.CALL_BEGAN:
                self.began[call].append((at_s, library))
            case LoggedEvent.CALL_ENDED:
                self.over[call].append(at_s)
            case LoggedEvent.CALL_LEFT:
                self.over[call].append(at_s)
                self.moved += 1
            case LoggedEvent.CALL_FAILED:
                self.failed.add(call)
            case LoggedEvent.TOKEN_FIRST:
                self.first[call] = value
            case LoggedEvent.TOKEN_MEAN:
                self.tpot[call] = value
            case LoggedEvent.TOKEN_LATE:
                self.late[call] = value
            case LoggedEvent.LIBRARY_STARTED:
                self.started[library] = at_s, pilot
            case LoggedEvent.LIBRARY_READY:
                self.ready[library] = at_s, value
            case LoggedEvent.LIBRARY_ENDED:
                self.ended[library] = at_s
            case _:
                pass

    def grace_s(self, call: int) -> float:
        runs = self.began.get(call)
        if not runs:
            return 0.0
        ready_at, load_s = self.ready.get(runs[0][1], (0.0, 0.0))
        return load_s if self.came[call] < ready_at else 0.0

    def is_met(self, call: int, prompt: int, wanted: Objective, *, grace_s: float) -> bool:
        first_s = wanted.first_token_s(prompt) + grace_s
        in_time = self.first.get(call, _NEVER) <= first_s + _ROUNDING_S
        return in_time and call not in self.failed and self.tpot.get(call, 0.0) <= wanted.tpot_s + _ROUNDING_S

    def use(
        self, kind: str, kinds: Mapping[int, str], arrivals: Sequence[Arrival], *, for_s: float
    ) -> KindUse:  # fmt: skip
        of_node: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for library, (at_s, pilot) in self.started.items():
            if kinds[pilot] == kind:
                of_node[pilot].append((at_s, min(for_s, self.ended.get(library, for_s))))
        used_s = sum(_union_s(spans) for spans in of_node.values())
        instances_s = sum(max(0.0, end - start) for spans in of_node.values() for start, end in spans)
        tokens = 0
        of_library: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for place, call in enumerate(self.came):
            runs = self.began.get(call, ())
            for (at_s, library), end in zip(runs, self.over.get(call, ()), strict=False):
                if kinds[self.started[library][1]] == kind:
                    of_library[library].append((at_s, end))
            if runs and call not in self.failed and kinds[self.started[runs[-1][1]][1]] == kind:
                tokens += arrivals[place].output_tokens
        running_s = sum(end - start for spans in of_library.values() for start, end in spans)
        serving_s = sum(_union_s(spans) for spans in of_library.values())
        return KindUse(
            nodes=used_s / for_s, instances=instances_s / for_s, tokens_per_s=tokens / used_s if used_s else 0.0,
            running=running_s / serving_s if serving_s else 0.0,
        )  # fmt: skip


def _union_s(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        if end > until:
            total += end - max(start, until)
            until = end
    return total


_EVERY_S = 1.0


class Sampled(msgspec.Struct, frozen=True):
    """Means over loaded instances on a kind of node. `memory_used`: share of weights and tokens; `cache_used`: share
    of caches; `resizing`: share of samples with a resize; `batch_p50`, `batch_p95`: largest batch per busy node.
    """

    memory_used: float
    cache_used: float
    resizing: float
    batch_p50: float
    batch_p95: float


class Sampler:
    def __init__(self, simulation: Simulation, *, for_s: float) -> None:
        self._sim = simulation
        self._for_s = for_s
        self._samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        simulation.agenda.schedule_after(_EVERY_S, self._sample)

    def found(self) -> dict[str, Sampled]:
        def mean(values: list[float]) -> float:
            return statistics.fmean(values) if values else 0.0

        def quantile(values: list[float], part: float) -> float:
            return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0

        return {
            kind: Sampled(
                memory_used=mean(of["memory"]), cache_used=mean(of["cache"]), resizing=mean(of["resizing"]),
                batch_p50=quantile(of["batch"], 0.5), batch_p95=quantile(of["batch"], 0.95),
            )
            for kind, of in sorted(self._samples.items()) if of["memory"]
        }  # fmt: skip

    def _sample(self) -> None:
        sim = self._sim
        for pilot in sim.pilots.values():
            of, largest = self._samples[pilot.kind], 0
            for number, library in pilot.libraries.items():
                known = sim.core.state.libraries.get(number)
                if library.batch is None or known is None or known.state is LibraryState.LOADING:
                    continue
                engine = library.model.engine_on_device_kind(pilot.kind)
                assert engine is not None
                requests = library.batch.engine.batch.running.values()
                used = sum(request.length for request in requests) * engine.token_bytes
                held, weights = pilot.core.state.ledger.reserved_bytes(number), int(engine.weights_bytes)
                of["memory"].append((weights + used) / max(1, held))
                if used:
                    of["cache"].append(used / max(1, held - weights))
                of["resizing"].append(float(bool(known.unanswered_resizes)))
                largest = max(largest, len(library.running))
            if largest:
                of["batch"].append(float(largest))
        if sim.agenda.now + _EVERY_S <= self._for_s:
            sim.agenda.schedule_after(_EVERY_S, self._sample)
