"""The policy of a session on the requests of Figure 6a: manager, pilots and policy `arlo` in virtual time, beside the
model of instances that the other tables use.

The model begins with an allocation by earlier requests. The session begins with nothing: its first minute is left out
on both sides, and so are the requests of that time.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.cases import ARLO, Case, Measures, simulate, within_capacity
from benchmarks.papers.arlo.profile import LatencyProfile, lengths_of
from benchmarks.papers.arlo.scaling import percentile
from benchmarks.papers.arlo.workload import Trace, Workload, trace_of
from benchmarks.papers.common import RELEASE
from stoker.manager.policies.arlo import arlo
from stoker.manager.sim.calls_log import EachCall, LibraryPlace
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.families import of_lengths
from stoker.manager.sim.log import EventLog
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, SourceModel, World
from stoker.protocol.blocks import Rule
from stoker.protocol.calls import CallSpec, Objective
from stoker.site import Duration, Size

DEVICES, BEGINS_S = 10, 60.0
ENDS_S = {1_000.0: 150.0, 4_000.0: 90.0}
"""How long the requests come, in seconds, by their rate. The first is Figure 6a's; the second keeps devices busy."""
_MESSAGE_S = settings.OVERHEAD_S / 2
"""The overhead of a request is an order and an answer."""
_GB = 1_000_000_000


class Deployed(msgspec.Struct, frozen=True):
    """One seed: what the session's policy and the model make of the same requests. `release`: of Stoker."""

    seed: int
    rate: float
    release: str
    requests: int
    mean_ms: float
    p98_ms: float
    late: float
    model: Measures


class _Latencies(EachCall):
    """Latencies of calls by when they came, without a log of each."""

    def __init__(self) -> None:
        super().__init__(EventLog())
        self._came: dict[int, float] = {}
        self.found: list[tuple[float, float]] = []

    def came(self, at_s: float, call: int, *, items: int, due_at: float = 0.0) -> None:  # noqa: ARG002 (CallsLog)
        self._came[call] = at_s

    def began(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int) -> None:
        """Nothing."""

    def ended(self, at_s: float, spec: CallSpec, where: LibraryPlace, *, rank: int, items: int) -> None:  # noqa: ARG002
        came_at = self._came.pop(spec.call)
        self.found.append((came_at, at_s + _MESSAGE_S - came_at))


def compare(seed: int, rate: float) -> Deployed:
    """Takes half a minute, or one."""
    profile, workload = LatencyProfile("base"), Workload(rate, ENDS_S[rate], seed)
    trace = trace_of(workload)
    run = Simulation(_world(profile), of_lengths(_world(profile), _arrivals(trace, profile)), arlo(tracks=False))
    log = run.calls_log = _Latencies()
    outcome = run.run()
    if outcome.failed or not outcome.complete:
        raise ValueError(f"calls of the session failed: {outcome.failed}")
    rising = sorted(latency for came_at, latency in log.found if came_at >= BEGINS_S)
    return Deployed(
        seed, rate, RELEASE, len(rising),
        mean_ms=round(1000 * sum(rising) / len(rising), 4),
        p98_ms=round(1000 * percentile(rising, 0.98), 4),
        late=round(sum(latency > profile.slo_s for latency in rising) / len(rising), 6),
        model=simulate(Case(within_capacity(ARLO), profile, DEVICES, workload), _later(trace)),
    )  # fmt: skip


def _later(trace: Trace) -> Trace:
    """The requests that count, after those before them."""
    first = next(at for at, time in enumerate(trace.times) if time >= BEGINS_S)
    times = [time - BEGINS_S for time in trace.times[first:]]
    return Trace(times, trace.lengths[first:], trace.lengths[:first])


def _arrivals(trace: Trace, profile: LatencyProfile) -> Iterator[Arrival]:
    wanted = Objective(latency_s=profile.slo_s)
    for at, tokens in zip(trace.times, trace.lengths, strict=True):
        yield Arrival(at, "bert", input_length=tokens, objective=wanted)


def _world(profile: LatencyProfile) -> World:
    contexts = {
        f"bert-{tokens}": ContextModel(
            device_memory_bytes=Size(2 * _GB), load_s={"": Duration(settings.REPLACEMENT_S)},
            call_s={"": Duration(profile.static_s(tokens))}, family="bert", longest_input=tokens,
        )
        for tokens in lengths_of(8)
    }  # fmt: skip
    pool = SourceModel(
        "pool", "gpu", capacity=DEVICES, max_blocks=DEVICES, init_blocks=DEVICES, keep_pending=DEVICES, rule=Rule.FIXED
    )
    delays = Delays(message_s=Duration(_MESSAGE_S))
    return World(devices={"gpu": DeviceKind(Size(24 * _GB))}, sources=(pool,), contexts=contexts, delays=delays)
