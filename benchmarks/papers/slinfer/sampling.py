"""What a log does not tell: each second of a run, how much memory instances have and use, and who resizes.

So the authors' own program samples its nodes. A sample only reads.
"""

from __future__ import annotations

import statistics

import msgspec

from stoker.manager.core.phases import LibraryState
from stoker.manager.sim.run import Simulation

_EVERY_S = 1.0


class Sampled(msgspec.Struct, frozen=True):
    """Of the instances of one kind of node that hold their model, on the mean. `memory_used`: of their memory, the
    share that weights and tokens take; `cache_used`: the same of their caches alone; `resizing`: the share of samples
    in which one changes the size of its cache; `batch_p50`, `batch_p95`: the largest batch of each node that serves
    any request."""

    memory_used: float
    cache_used: float
    resizing: float
    batch_p50: float
    batch_p95: float


class Sampler:
    """Samples a simulation that is about to run, for so many seconds."""

    def __init__(self, simulation: Simulation, *, for_s: float) -> None:
        self._sim = simulation
        self._for_s = for_s
        self._memory: dict[str, list[float]] = {}
        self._cache: dict[str, list[float]] = {}
        self._resizing: dict[str, list[bool]] = {}
        self._batches: dict[str, list[int]] = {}
        simulation.agenda.after(_EVERY_S, self._sample)

    def found(self) -> dict[str, Sampled]:
        """By the kind of node."""
        return {
            kind: Sampled(
                memory_used=_mean(used),
                cache_used=_mean(self._cache.get(kind, [])),
                resizing=_mean(self._resizing.get(kind, [])),
                batch_p50=_quantile(self._batches.get(kind, []), 0.5),
                batch_p95=_quantile(self._batches.get(kind, []), 0.95),
            )
            for kind, used in sorted(self._memory.items())
        }

    def _sample(self) -> None:
        sim = self._sim
        for pilot in sim.pilots.values():
            kind, largest = pilot.kind, 0
            for number, library in pilot.libraries.items():
                known = sim.core.state.libraries.get(number)
                if library.batch is None or known is None or known.state is LibraryState.LOADING:
                    continue
                engine = library.model.engine_on(kind)
                assert engine is not None
                requests = library.batch.engine.batch.running.values()
                used = sum(request.length for request in requests) * engine.token_bytes
                held, weights = pilot.core.state.ledger.held(number), int(engine.weights_bytes)
                self._memory.setdefault(kind, []).append((weights + used) / max(1, held))
                if used:
                    self._cache.setdefault(kind, []).append(used / max(1, held - weights))
                self._resizing.setdefault(kind, []).append(bool(known.resizing))
                largest = max(largest, len(library.running))
            if largest:
                self._batches.setdefault(kind, []).append(largest)
        if sim.agenda.now + _EVERY_S <= self._for_s:
            sim.agenda.after(_EVERY_S, self._sample)


def _mean(values: list[float] | list[bool]) -> float:
    return statistics.fmean(values) if values else 0.0


def _quantile(values: list[int], part: float) -> float:
    return float(sorted(values)[min(len(values) - 1, int(part * len(values)))]) if values else 0.0
