"""Figure 4, the paper's example of what is difficult about dispatching, for each strategy.

GPU0 and GPU1 take up to 128 tokens and have 78 and 79 of 80 requests that they answer in time; GPU2 takes up to 256 and
has 28 of 40; GPU3 takes up to 512 and has 6 of 20. Eight requests of less than 128 tokens arrive, and a moment later 14
of more than 256. A request is late if it is given to an instance that was full.

The page's last tables: what is computed or run to explain misses, and what is measured on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from benchmarks.papers.arlo import paper, settings, summary, tables, texts
from benchmarks.papers.arlo.cases import ARLO, ST, Case
from benchmarks.papers.arlo.dispatch import BucketDispatcher, Dispatcher, inter_groups_greedy
from benchmarks.papers.arlo.intervals import MISSING, mean_ms, p98_ms
from benchmarks.papers.arlo.measured import LIGHT, Deployed, Measured
from benchmarks.papers.arlo.paper import ST_
from benchmarks.papers.arlo.runtime_queues import RuntimeQueues
from benchmarks.papers.arlo.tables import Cells, latencies_of, of_latency, table
from stoker.manager.policies.arlo.dispatch import THRESHOLD

RUNTIMES = ((128, 80), (256, 40), (512, 20))
GPUS = ((1, 0, 79), (0, 0, 78), (2, 1, 28), (3, 2, 6))
"""GPU, runtime, requests that it has. GPU1 comes first, so that the requests before the example fill GPU0 second."""
FIRST, LATER = (100,) * 8, (400,) * 14
PATIENT = 0.99
"""A threshold at which Algorithm 1 demotes as the paper would have it."""


class Outcome(msgspec.Struct, frozen=True):
    """How many of the first eight requests each GPU got, and how many of all requests are late."""

    first: tuple[int, int, int, int]
    late: int


def strategies() -> Iterator[tuple[str, Dispatcher]]:
    """By name."""
    yield "ILB", RuntimeQueues[int](RUNTIMES, peeked=1)
    yield "IG", BucketDispatcher(RUNTIMES, inter_groups_greedy)
    yield f"Algorithm 1, threshold {THRESHOLD}", RuntimeQueues[int](RUNTIMES)
    yield f"Algorithm 1, threshold {PATIENT}", RuntimeQueues[int](RUNTIMES, threshold=PATIENT)


def outcome(dispatcher: Dispatcher) -> Outcome:
    """What comes of the example."""
    for gpu, runtime, has in GPUS:
        dispatcher.add(gpu, runtime)
        taken = {dispatcher.take(RUNTIMES[runtime][0]) for _ in range(has)}
        if taken != {gpu}:
            raise ValueError(f"the requests before the example went to {taken}, not to {gpu} alone")
    capacities = {gpu: RUNTIMES[runtime][1] for gpu, runtime, _ in GPUS}
    got, late = [0, 0, 0, 0], 0
    for number, tokens in enumerate((*FIRST, *LATER)):
        gpu = dispatcher.take(tokens)
        late += dispatcher.load(gpu) > capacities[gpu]
        got[gpu] += number < len(FIRST)
    return Outcome((got[0], got[1], got[2], got[3]), late)


def example() -> str:
    """Figure 4, by strategy."""
    outcomes = [(name, outcome(dispatcher)) for name, dispatcher in strategies()]
    rows = [[name, *map(str, found.first), str(found.late)] for name, found in outcomes]
    return f"{texts.FIGURE_4}\n{table(('of the first eight to', 'GPU0', 'GPU1', 'GPU2', 'GPU3', 'late'), rows)}"


def table_2(measured: Measured | None) -> str:
    """Seconds of an allocation."""
    rows = []
    for each in measured.solving if measured is not None else ():
        said = paper.TABLE_2[each.devices, each.runtimes]
        light, heavy = (
            [seconds for seconds, load in zip(each.seconds, each.loads, strict=True) if (load < LIGHT) == is_light]
            for is_light in (True, False)
        )
        apart = (_mean_and_most(seconds) for seconds in (each.seconds, light, heavy))
        rows.append([f"{each.devices:,}", str(each.runtimes), str(said), *apart])
    columns = ("GPUs", "runtimes", "paper, s", "here: mean; most, s", f"below {LIGHT:.0%} load", "from there on")
    return f"{texts.TABLE_2}\n{table(columns, rows)}"


def _mean_and_most(seconds: Sequence[float]) -> str:
    return f"{sum(seconds) / len(seconds):.4f}; {max(seconds):.4f}" if seconds else MISSING


def figure_9(measured: Measured | None) -> str:
    """Milliseconds of a burst."""
    every = measured.dispatching if measured is not None else []
    peeked = sorted({each.peeked for each in every})
    spent = {(each.instances, each.peeked): each.ms for each in every}
    rows = [
        [f"{instances:,}", f"{requests:,}", *(f"{spent[instances, number]:.2f}" for number in peeked)]
        for instances, requests in sorted({(each.instances, each.requests) for each in every})
    ]
    columns = ("instances", "requests", *(f"L = {number}, ms" for number in peeked))
    return f"{texts.FIGURE_9}\n{table(columns, rows)}"


def deployed(found: Sequence[Deployed]) -> str:
    """The policy of a session beside the model."""
    rows = [
        [
            f"{each.rate:,.0f}", str(each.seed), f"{each.requests:,}", f"{each.mean_ms:.2f}",
            f"{each.model.mean_ms:.2f}", f"{each.p98_ms:.1f}", f"{each.model.p98_ms:.1f}", f"{100 * each.late:.2f}",
        ]
        for each in found
    ]  # fmt: skip
    columns = ("requests/s", "seed", "requests", "mean, ms: session", "model", "p98, ms: session", "model", "late, %")
    return f"{texts.deployed()}\n{table(columns, rows)}"


def padding() -> str:
    """How much less than ST's Arlo's mean is where no request waits."""
    rows = []
    for name, make in summary.FIGURES.items():
        profile = make()[0].profile
        ideal_ms = 1000 * profile.mean_s(tables.lengths_of_trace(), 8) + texts.OVERHEAD_MS
        shortest_ms = 1000 * profile.static_s(64) + texts.OVERHEAD_MS
        longest_ms = profile.longest_ms + texts.OVERHEAD_MS
        less_by = [f"{100 * (1 - ms / longest_ms):.1f}" for ms in (ideal_ms, shortest_ms)]
        rows.append([name, f"{profile.longest_ms:g}", f"{paper.MEAN_LESS[name][ST_]:.1f}", *less_by])
    columns = ("Figure", "512 tokens, ms", "paper, %", "each in its ideal runtime, %", "all in that of 64, %")
    return f"{texts.PADDING}\n{table(columns, rows)}"


def against_st(cells: Cells) -> str:
    """ST and Arlo with a faster Bert-Large and with longer traces."""
    rows = []
    for case in tables.against_st():
        if case.system == ST:
            name = "6b" if case.devices == 10 else "10b"
            both = [case, replace(case, system=ARLO)]
            means = [cells.values([one], mean_ms, 2) for one in both]
            rows.append([
                name, f"{case.profile.longest_ms:g}", f"{case.workload.for_s:.0f}", *means,
                cells.less(both, ARLO, ST, mean_ms), f"{paper.MEAN_LESS[name][ST_]:.1f}",
            ])  # fmt: skip
    columns = ("Figure", "512 tokens, ms", "trace, s", "`st`: mean, ms", "`arlo`", "less by, %", "paper")
    return f"{texts.against_st()}\n{table(columns, rows)}"


def still(cells: Cells) -> str:
    """Lengths that drift and lengths that do not."""
    rows = []
    for name, make in summary.FIGURES.items():
        for system in tables.STILL:
            own = [case for case in make() if (case.workload.seed, case.system) == (settings.SEEDS[0], system)]
            both = own, [replace(case, workload=replace(case.workload, drift=0.0)) for case in own]
            means, tails = ([cells.values(some, what, 2) for some in both] for what in (mean_ms, p98_ms))
            rows.append([name, f"`{system}`", *means, *tails])
    columns = ("Figure", "system", "mean, ms", "without drift", "p98, ms", "without drift")
    return f"{texts.still()}\n{table(columns, rows)}"


def overhead(cells: Cells) -> str:
    """The overhead of a request beside computing, or as a part of it."""
    cases = [case for case in tables.figure_6a() if case.workload.seed == settings.SEEDS[0]]
    both: list[list[Case]] = [cases, [replace(case, occupies=True) for case in cases]]
    rows = []
    for system in tables.MAIN:
        means = [cells.values([case for case in some if case.system == system], mean_ms, 2) for some in both]
        rows.append([f"`{system}`", *means, *(cells.less(some, ARLO, system, mean_ms) for some in both)])
    columns = ("Figure 6a", "mean, ms", "device busy", "Arlo's is less by, %", "device busy")
    return f"{texts.overhead()}\n{table(columns, rows)}"


def table_4_apart(cells: Cells) -> str:
    """Table 4's smallest trace without bursts and without drift."""
    rows = []
    for name in tables.APART_4:
        cases = list(tables.apart_4(name))
        for longest in latencies_of(cases):
            systems = dict.fromkeys(case.system for case in cases)
            apart = (cells.mean_and_p98(of_latency(cases, system, longest)) for system in systems)
            rows.append([name, f"{longest:g} ms", *apart])
    columns = ("25 GPUs; mean; p98, ms", "512 tokens", "ILB", "IG", "RS")
    return f"{texts.table_4_apart()}\n{table(columns, rows)}"


def lower_loads(cells: Cells) -> str:
    """Table 3 with lower loads."""
    cases = tables.lower_loads()
    return f"{texts.lower_loads(cases)}\n{cells.by_load(cases, tables.LOWER_LOADS)}"
