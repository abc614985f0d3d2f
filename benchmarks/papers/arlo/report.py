"""Write `docs/reproduction/arlo.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.papers.arlo import measured, settings, summary, tables, workload
from benchmarks.papers.arlo.cases import ARLO, ARLO_IG, ARLO_ILB, ST, Case, Measures, Result, within_capacity
from benchmarks.papers.arlo.dispatch import dispatch_outcome, strategies
from benchmarks.papers.arlo.measured import LIGHT, Deployed, Measured
from benchmarks.papers.arlo.summary import Interval, What, interval_text, mean_ms, p98_ms, reduction_percent
from benchmarks.papers.arlo.workload import LatencyProfile, read_lengths
from benchmarks.papers.common import MISSING, Store, bullets, page
from stoker.manager.policies.arlo import dispatch

PAGE = Path(__file__).with_name("page.template")
OVERHEAD_MS = 1000 * settings.OVERHEAD_S
NAMED = {ours: theirs for theirs, several in tables.READINGS.items() for ours in several}
"""Names of the other systems in the paper, by our names."""
Rows = Iterator[list[str]]


def write(records: Store[Case, Result]) -> str:
    cells = Cells(records.get)
    figures = {name: cases for name in tables.TABLES if (cases := tables.TABLES[name]())}
    fours = {devices: tables.of_trace_4(devices) for devices in tables.TRACES_4}
    return page(
        PAGE, settings=settings, measured=measured, workload=workload, queues=dispatch, **_facts(),
        **{f"workload_{name}": _requests(cases) for name, cases in figures.items()},
        workload_lower_loads=_requests(tables.lower_loads()), summary=(each.row for each in summary.verdicts(records)),
        **{f"figure_{name}": _latency_rows(cells, name) for name in tables.FIXED},
        **{f"by_latency_{name}": cells.by_latency(figures[name]) for name in ("6b", "10b")},
        figure_4=_figure_4_rows(), figure_7=_figure_7_rows(cells), figure_8=_figure_8_rows(cells),
        figure_9=figure_9_rows(records.kept.measured), figure_11=_figure_11_rows(cells),
        by_load_11=cells.by_load(figures["11"]), table_2=table_2_rows(records.kept.measured),
        table_3=_table_3_rows(cells), by_load_3=cells.by_load(figures["3"]), table_4=_table_4_rows(cells, fours),
        by_latency_4=_table_4_by_latency(cells, fours), deployed=session_rows(records.kept.deployed),
        padding=padding_rows(), against_st=st_rows(cells), still=drift_rows(cells), overhead=overhead_rows(cells),
        lower=cells.by_load(tables.lower_loads(), tables.LOWER_LOADS),
        table_4_apart=_by_latency_rows(cells, {name: tables.apart_4(name) for name in tables.APART_4}),
        random=random_rows(cells), rated=rated_rows(cells),
        **{
            f"rs_{devices}_{longest:g}": cells.values(
                cases_of_latency(cases, within_capacity(ARLO), longest), mean_ms
            )
            for devices, cases in fours.items() for longest in settings.LARGE_MS
        },
    )  # fmt: skip


def _facts() -> dict[str, Any]:
    case, one_ms = tables.FIXED["6b"]()[0], LatencyProfile("large", 1.0).mean_s(tables.lengths_of_trace(), 8)
    arlo_ms = [devices / rate / one_ms for devices, (rate, _, _) in tables.TRACES_4.items()]
    between_s = settings.BURST_S + settings.CALM_S - settings.BURST_S * settings.BURST_RATE
    traces = (
        f"{devices:,} GPUs: {rate:,.0f} requests/s for {for_s:.0f} s, seeds {', '.join(map(str, seeds))}"
        for devices, (rate, for_s, seeds) in tables.TRACES_4.items()
    )
    table_3 = "; ".join(f"`{name}` {mean:,.1f}; {p98:,.1f}" for name, (mean, _, p98) in tables.TABLE_3.items())
    return {
        "tables": ", ".join(f"`{name}`" for name in tables.TABLES),
        "grid": ", ".join(f"{each:g}" for each in settings.LARGE_MS),
        "loads": ", ".join(f"{each:.0%}" for each in settings.UTILIZATIONS),
        "most_busy": settings.UTILIZATIONS[-1], "longest_ms": settings.LARGE_MS[-1],
        "st_ms": 1000 * case.devices / case.workload.rate,
        "arlo_least_ms": min(arlo_ms), "arlo_most_ms": max(arlo_ms), "calm": between_s / settings.CALM_S,
        "tweets": sum(map(len, read_lengths())), "seeds": ", ".join(map(str, settings.SEEDS)),
        "fresh_seeds": ", ".join(map(str, settings.FRESH_SEEDS)), "overhead_ms": OVERHEAD_MS,
        "traces_4": bullets(traces),
        "rates": " and ".join(f"{rate:,.0f} requests/s for {for_s:.0f} s" for rate, for_s in measured.ENDS_S.items()),
        "said": f"Paper, mean and 98th percentile in milliseconds: {table_3}.",
    }  # fmt: skip


def _requests(cases: Sequence[Case]) -> str:
    rates = sorted({case.workload.rate for case in cases})
    rate = f"{rates[0]:,.0f}" if len(rates) == 1 else f"{rates[0]:,.0f} to {rates[-1]:,.0f}"
    seeds = sorted({case.workload.seed for case in cases})
    shortest = min(case.workload.for_s for case in cases)
    return (
        f"Twitter-{cases[0].workload.pattern.capitalize()}, {rate} requests/s for {shortest:.0f} s,"
        f" {cases[0].devices:,} GPUs, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}."
    )


def latencies_of(cases: Sequence[Case]) -> list[float]:
    return sorted({case.profile.longest_ms for case in cases})


def cases_of_latency(cases: Sequence[Case], system: str, longest_ms: float) -> list[Case]:
    return [case for case in cases if (case.system, case.profile.longest_ms) == (system, longest_ms)]


def cases_of_system(cases: Iterable[Case], system: str) -> list[Case]:
    return [case for case in cases if case.system == system]


def late_percent(measures: Measures) -> float:
    return 100 * measures.late


class Cells(msgspec.Struct, frozen=True):
    of: summary.FindResult

    def values(self, cases: Iterable[Case], what: What, digits: int = 1) -> str:
        found = (what(result.measures) for case in cases if (result := self.of(case)) is not None)
        return interval_text(Interval.of(found), digits)

    def mean_and_p98(self, cases: Sequence[Case]) -> str:
        return f"{self.values(cases, mean_ms)}; {self.values(cases, p98_ms)}"

    def mean_p98_late(self, cases: Sequence[Case]) -> list[str]:
        return [self.values(cases, mean_ms), self.values(cases, p98_ms), self.values(cases, late_percent, 2)]

    def less(self, cases: Sequence[Case], ours: str, theirs: str, what: What) -> str:
        """Return by how many percent a system is below another system. Return nothing for Arlo's own variants."""
        return interval_text(reduction_percent(self.of, cases, ours, (theirs,), what)) if theirs in NAMED else ""

    def by_latency(self, cases: Sequence[Case]) -> Rows:
        for system in tables.MAIN:
            found = (self.values(cases_of_latency(cases, system, each), mean_ms) for each in latencies_of(cases))
            yield [f"`{system}`", *found]

    def by_load(self, cases: Sequence[Case], loads: Sequence[float] = settings.UTILIZATIONS) -> Rows:
        for system, count in dict.fromkeys((case.system, case.runtimes) for case in cases):
            keys = [(system, count, tables.rate_at(load)) for load in loads]
            apart = ([c for c in cases if (c.system, c.runtimes, c.workload.rate) == key] for key in keys)
            yield [f"`{system}`", str(count), *map(self.mean_and_p98, apart)]


def _figure_4_rows() -> Rows:
    for name, dispatcher in strategies():
        first, late = dispatch_outcome(dispatcher)
        yield [name, *map(str, first), str(late)]


def _latency_rows(cells: Cells, name: str) -> Rows:
    cases = tables.FIXED[name]()
    for system in tables.MAIN:
        own, said = cases_of_system(cases, system), tables.MEAN_LESS[name].get(NAMED.get(system, ""))
        less = (cells.less(cases, ours, system, what) for what in (mean_ms, p98_ms) for ours in tables.ARLOS)
        yield [
            f"`{system}`", cells.values(own, mean_ms, 2), cells.values(own, p98_ms), cells.values(own, late_percent, 2),
            f"{said:.1f}" if said else "", *less,
        ]  # fmt: skip


def _figure_7_rows(cells: Cells) -> Rows:
    cases = tables.TABLES["7"]()
    for system in tables.MAIN:
        own = ([c for c in cases if (c.system, c.workload.rate) == (system, rate)] for rate in tables.RATES_7)
        yield [f"`{system}`", *(cells.values(some, mean_ms) for some in own)]


def _figure_8_rows(cells: Cells) -> Rows:
    cases = tables.TABLES["8"]()
    for system in tables.MAIN:
        said = tables.FIGURE_8[NAMED.get(system, "Arlo")]
        row = [f"`{system}`", f"{said[0]:.2f}", f"{said[1]:.0f}"]
        for least in tables.LEAST_8:
            own = [case for case in cases if (case.system, case.least) == (system, least)]
            row += [cells.values(own, lambda one: one.devices, 2), cells.values(own, p98_ms, 0)]
        yield row


def _figure_11_rows(cells: Cells) -> Rows:
    cases = tables.TABLES["11"]()
    for count in tables.COUNTS_11:
        said, late = tables.FIGURE_11.get(count), tables.FIGURE_11_LATE.get(count)
        row = [str(count), *(f"{number:.2f}" for number in said or ()), *([""] * 2 if said is None else [])]
        row.append("" if late is None else f"{late:.1f}")
        for system in tables.ARLOS:
            row += cells.mean_p98_late([case for case in cases if (case.runtimes, case.system) == (count, system)])
        yield row


def _table_3_rows(cells: Cells) -> Rows:
    cases = tables.TABLES["3"]()
    for system in tables.ALLOCATIONS_3:
        mean, p98, late = cells.mean_p98_late(own := cases_of_system(cases, system))
        said = (f"{number:,.1f}" for number in tables.TABLE_3[system.removesuffix(within_capacity(""))])
        yield [f"`{system}`", *said, mean, cells.values(own, lambda one: one.p50_ms), p98, late]


def _table_4_rows(cells: Cells, fours: Mapping[int, Sequence[Case]]) -> Rows:
    for devices, cases in fours.items():
        for system in tables.DISPATCHES_4:
            said = (f"{number:,.1f}" for number in tables.TABLE_4[devices][system.removesuffix(within_capacity(""))])
            yield [f"{devices:,}", f"`{system}`", *said, *cells.mean_p98_late(cases_of_system(cases, system))]


def _table_4_by_latency(cells: Cells, fours: Mapping[int, Sequence[Case]]) -> Rows:
    for devices, cases in fours.items():
        for system in tables.DISPATCHES_4:
            apart = (cells.mean_and_p98(cases_of_latency(cases, system, longest)) for longest in latencies_of(cases))
            yield [f"{devices:,}", f"`{system}`", *apart]


def table_2_rows(found: Measured | None) -> Rows:
    for each in found.solving if found is not None else ():
        runs = list(zip(each.seconds, each.loads, strict=True))
        light, heavy = ([s for s, load in runs if (load < LIGHT) == is_light] for is_light in (True, False))
        apart = (
            f"{sum(seconds) / len(seconds):.4f}; {max(seconds):.4f}" if seconds else MISSING
            for seconds in (each.seconds, light, heavy)
        )  # fmt: skip
        yield [f"{each.devices:,}", str(each.runtimes), str(tables.TABLE_2[each.devices, each.runtimes]), *apart]


def figure_9_rows(found: Measured | None) -> Rows:
    rows: dict[tuple[int, int], list[str]] = {}
    for each in found.dispatching if found is not None else ():
        rows.setdefault((each.instances, each.requests), []).append(f"{each.ms:.2f}")
    for (instances, requests), times in rows.items():
        yield [f"{instances:,}", f"{requests:,}", *times]


def session_rows(found: Sequence[Deployed]) -> Rows:
    for each in found:
        yield [
            f"{each.rate:,.0f}", str(each.seed), f"{each.requests:,}", f"{each.mean_ms:.2f}",
            f"{each.model.mean_ms:.2f}", f"{each.p98_ms:.1f}", f"{each.model.p98_ms:.1f}", f"{100 * each.late:.2f}",
        ]  # fmt: skip


def padding_rows() -> Rows:
    for name, make in tables.FIXED.items():
        profile = make()[0].profile
        ideal_ms = 1000 * profile.mean_s(tables.lengths_of_trace(), 8) + OVERHEAD_MS
        shortest_ms = 1000 * profile.static_s(64) + OVERHEAD_MS
        less_by = [f"{100 * (1 - ms / (profile.longest_ms + OVERHEAD_MS)):.1f}" for ms in (ideal_ms, shortest_ms)]
        yield [name, f"{profile.longest_ms:g}", f"{tables.MEAN_LESS[name][tables.ST_]:.1f}", *less_by]


def st_rows(cells: Cells) -> Rows:
    for case in cases_of_system(tables.against_st(), ST):
        name, both = "6b" if case.devices == 10 else "10b", [case, replace(case, system=ARLO)]
        yield [
            name, f"{case.profile.longest_ms:g}", f"{case.workload.for_s:.0f}",
            *(cells.values([one], mean_ms, 2) for one in both),
            cells.less(both, ARLO, ST, mean_ms), f"{tables.MEAN_LESS[name][tables.ST_]:.1f}",
        ]  # fmt: skip


def drift_rows(cells: Cells) -> Rows:
    for name, make in tables.FIXED.items():
        for system in tables.STILL:
            own = [case for case in make() if (case.workload.seed, case.system) == (settings.SEEDS[0], system)]
            both = own, [replace(case, workload=replace(case.workload, drift=0.0)) for case in own]
            yield [name, f"`{system}`", *(cells.values(some, what, 2) for what in (mean_ms, p98_ms) for some in both)]


def overhead_rows(cells: Cells) -> Rows:
    cases = [case for case in tables.TABLES["6a"]() if case.workload.seed == settings.SEEDS[0]]
    both: list[list[Case]] = [cases, [replace(case, occupies=True) for case in cases]]
    for system in tables.MAIN:
        means = [cells.values(cases_of_system(some, system), mean_ms, 2) for some in both]
        yield [f"`{system}`", *means, *(cells.less(some, ARLO, system, mean_ms) for some in both)]


def _by_latency_rows(
    cells: Cells, groups: Mapping[str, Sequence[Case]], more: Callable[[Sequence[Case]], Iterable[str]] = lambda _: ()
) -> Rows:
    for name, cases in groups.items():
        for longest in latencies_of(cases):
            own = [case for case in cases if case.profile.longest_ms == longest]
            systems = dict.fromkeys(case.system for case in own)
            shown = (cells.mean_and_p98(cases_of_system(own, system)) for system in systems)
            yield [name, f"{longest:g} ms", *shown, *more(own)]


def rated_rows(cells: Cells) -> Rows:
    ours = within_capacity(ARLO)

    def below(cases: Sequence[Case]) -> Iterator[str]:
        for theirs in map(within_capacity, (ARLO_ILB, ARLO_IG)):
            found = [reduction_percent(cells.of, cases, ours, (theirs,), what) for what in (mean_ms, p98_ms)]
            yield "; ".join(map(interval_text, found))

    waves = {f"wave of {s:.0f} s": tables.rated_seconds(pattern) for pattern, s in settings.RATED_SECONDS_S.items()}
    return _by_latency_rows(cells, waves, below)


def random_rows(cells: Cells) -> Rows:
    for figure in tables.RANDOM_FIGURES:
        cases = tables.random_dispatch(figure)
        for system in tables.RANDOM:
            own = cases_of_system(cases, system)
            said = tables.MEAN_LESS[figure].get(tables.RANDOM_OF.get(system, ""))
            less = (
                interval_text(reduction_percent(cells.of, cases, ours, (system,), what)) if said else ""
                for what in (mean_ms, p98_ms) for ours in tables.ARLOS
            )  # fmt: skip
            mean, p98 = cells.values(own, mean_ms, 2), cells.values(own, p98_ms)
            yield [figure, f"`{system}`", mean, p98, f"{said or ''}", *less]
