"""Make the first table of `docs/reproduction/arlo.md` (bar, paper, ours, met), with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from benchmarks.papers.arlo import settings, tables
from benchmarks.papers.arlo.cases import (
    ARLO,
    ARLO_EVEN,
    ARLO_GLOBAL,
    ARLO_IG,
    ARLO_ILB,
    Case,
    Measures,
    Result,
    within_capacity,
)
from benchmarks.papers.arlo.measured import Records
from benchmarks.papers.arlo.tables import DT_, INFAAS_, MAIN, READINGS, ST_, rate_at
from benchmarks.papers.common import table

FindResult = Callable[[Case], Result | None]
MISSING = "–"
NAMED = {ours: theirs for theirs, several in READINGS.items() for ours in several}
"""Names of the other systems in the paper, by our names."""
PLAIN = {within_capacity(name): name for name in (ARLO, ARLO_EVEN, ARLO_GLOBAL, ARLO_IG, ARLO_ILB)}


class Interval(msgspec.Struct, frozen=True):
    low: float
    high: float

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high

    def text(self, digits: int = 1) -> str:
        low, high = (f"{each:,.{0 if abs(each) >= 1000 else digits}f}" for each in (self.low, self.high))
        return low if low == high else f"{low} to {high}"

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Interval | None:
        found = list(numbers)
        return cls(min(found), max(found)) if found else None


def interval_text(interval: Interval | None, digits: int = 1) -> str:
    return MISSING if interval is None else interval.text(digits)


def mean_ms(of: Measures) -> float:
    return of.mean_ms


def p98_ms(of: Measures) -> float:
    return of.p98_ms


def late_percent(of: Measures) -> float:
    return 100 * of.late


def with_system(case: Case, system: str) -> Case:
    return msgspec.structs.replace(case, system=system)


def measured_pairs(
    of: FindResult, cases: Sequence[Case], ours: str, theirs: str
) -> Iterator[tuple[Measures, Measures]]:
    for case in cases:
        if case.system == theirs:
            one, other = of(with_system(case, ours)), of(case)
            if one is not None and other is not None:
                yield one.measures, other.measures


def reduction_percent(
    of: FindResult, cases: Sequence[Case], ours: str, theirs: Iterable[str], what: Callable[[Measures], float]
) -> Interval | None:
    """Return the percent by which a system is below each other system, on equal requests."""
    found = (pair for system in theirs for pair in measured_pairs(of, cases, ours, system))
    return Interval.of(100 * (1 - what(one) / what(other)) for one, other in found)


def latencies_of(cases: Sequence[Case]) -> list[float]:
    return sorted({case.profile.longest_ms for case in cases})


def cases_of_latency(cases: Sequence[Case], system: str, longest_ms: float) -> list[Case]:
    return [case for case in cases if (case.system, case.profile.longest_ms) == (system, longest_ms)]


class Cells(msgspec.Struct, frozen=True):
    of: FindResult

    def values(self, cases: Iterable[Case], what: Callable[[Measures], float], digits: int = 1) -> str:
        found = (what(result.measures) for case in cases if (result := self.of(case)) is not None)
        return interval_text(Interval.of(found), digits)

    def mean_and_p98(self, cases: Sequence[Case]) -> str:
        return f"{self.values(cases, mean_ms)}; {self.values(cases, p98_ms)}"

    def less(self, cases: Sequence[Case], ours: str, theirs: str, what: Callable[[Measures], float]) -> str:
        return interval_text(reduction_percent(self.of, cases, ours, (theirs,), what)) if theirs in NAMED else ""

    def by_latency(self, cases: Sequence[Case]) -> str:
        latencies = latencies_of(cases)
        rows = [
            [f"`{system}`", *(self.values(cases_of_latency(cases, system, each), mean_ms) for each in latencies)]
            for system in MAIN
        ]
        return table(("mean, ms, where 512 tokens take", *(f"{longest:g} ms" for longest in latencies)), rows)

    def by_load(self, cases: Sequence[Case], loads: Sequence[float] = settings.UTILIZATIONS) -> str:
        rows = []
        for system, count in dict.fromkeys((case.system, case.runtimes) for case in cases):
            keys = [(system, count, rate_at(load)) for load in loads]
            apart = ([c for c in cases if (c.system, c.runtimes, c.workload.rate) == key] for key in keys)
            rows.append([f"`{system}`", str(count), *map(self.mean_and_p98, apart)])
        return table(("mean; p98, ms", "runtimes", *(f"{load:.0%} busy" for load in loads)), rows)


TARGET_RATE = 150_000
NEAR = 5.0
"""Allowed percentage points from the paper with random dispatch."""
AT_MOST = 2.0
"""Limit of the 98th percentile in a session relative to the model."""

Reading = Callable[[str], str]
"""An Arlo system with one variant of its allocation."""
BOTH: tuple[Reading, ...] = (str, within_capacity)
COLUMNS = ("bar", "paper", "`arlo`", "met", "`arlo, within capacity`", "met")


class Finding(msgspec.Struct, frozen=True):
    """`is_met`: None = not run. `why`: remark."""

    here: str = MISSING
    is_met: bool | None = None
    why: str = ""

    @property
    def cells(self) -> list[str]:
        said = "not run" if self.is_met is None else "yes" if self.is_met else "**no**"
        return [self.here, f"{said}: {self.why}" if self.why else said]


class Verdict(msgspec.Struct, frozen=True):
    """A line of the table with a finding per variant of Arlo's allocation."""

    bar: str
    paper: str
    findings: tuple[Finding, ...]

    @property
    def row(self) -> list[str]:
        found = [cell for finding in self.findings for cell in finding.cells]
        return [self.bar, self.paper, *found, *[""] * (4 - len(found))]


def verdicts(records: Records) -> list[Verdict]:
    of = records.get
    figures = [verdict for name in tables.FIXED for verdict in _mean_verdicts(of, name)]
    tails = [verdict for pair in ("6", "10") for verdict in _p98_verdicts(of, pair)]
    fours = [verdict for devices in tables.TRACES_4 for verdict in _table_4_verdicts(of, devices)]
    return [
        *figures, *tails, *random_dispatch_verdicts(of), *_figure_8_verdicts(of), *_figure_11_verdicts(of),
        *_table_3_verdicts(of), *fours,
        _table_2_verdict(records), _figure_9_verdict(records),
        session_verdict(records), _replacement_verdict(records), _simulation_speed_verdict(records),
    ]  # fmt: skip


def _finding_in_interval(
    said: float, found: Interval | None, *, unit: str = "", digits: int = 1, why: str = ""
) -> Finding:
    if found is None:
        return Finding()
    return Finding(found.text(digits) + unit, said in found, why)


def _finding_in_all_runs(held: Sequence[bool], *, why: str = "") -> Finding:
    if not held:
        return Finding()
    return Finding(f"{sum(held)} of {len(held)}", all(held), "" if all(held) else why)


def _reduction_verdict(
    of: FindResult, cases: Sequence[Case], other: str, said: float, what: Callable[[Measures], float]
) -> Verdict:
    name = "mean" if what is mean_ms else "98th percentile"
    found = []
    for read in BOTH:
        apart = {one: reduction_percent(of, cases, read(ARLO), (one,), what) for one in READINGS[other]}
        having = [f"`{one}`" for one, interval in apart.items() if interval is not None and said in interval]
        having = having or ["between two readings"]
        whole = reduction_percent(of, cases, read(ARLO), READINGS[other], what)
        is_told = whole is not None and said in whole and len(apart) > 1
        found.append(_finding_in_interval(said, whole, unit=" %", why=", ".join(having) if is_told else ""))
    return Verdict(f"the {name} is below {other}'s by", f"{said:.1f} %", tuple(found))


def means_are_ordered(of: FindResult, cases: Sequence[Case], ours: str, dt: str, infaas: str) -> Iterator[bool]:
    return numbers_increase(of, cases, (ours, dt, infaas, *READINGS[ST_]), mean_ms)


def numbers_increase(
    of: FindResult, cases: Sequence[Case], systems: Sequence[str], what: Callable[[Measures], float]
) -> Iterator[bool]:
    """For each case of the first system, yield True if the numbers of the systems increase."""
    for case in cases:
        if case.system == systems[0]:
            found = [of(with_system(case, system)) for system in systems]
            numbers = [what(result.measures) for result in found if result is not None]
            if len(numbers) == len(found):
                yield numbers == sorted(numbers)


def _order_finding(of: FindResult, cases: Sequence[Case], read: Reading) -> Finding:
    held = {
        (dt, infaas): list(means_are_ordered(of, cases, read(ARLO), dt, infaas))
        for dt in READINGS[DT_] for infaas in READINGS[INFAAS_]
    }  # fmt: skip
    best = max(held, key=lambda pair: sum(held[pair]))
    most = f"{sum(held[best])} of {len(held[best])} with `{best[0]}` and `{best[1]}`"
    return _finding_in_all_runs(
        [each for several in held.values() for each in several], why=most if sum(held[best]) else ""
    )


def _arlo_is_below(
    of: FindResult, cases: Sequence[Case], read: Reading, what: Callable[[Measures], float], said: str
) -> Finding:  # fmt: skip
    """Check if Arlo is below each other system. `said`: text for a system and its failed runs."""
    held = {
        system: [what(one) < what(other) for one, other in measured_pairs(of, cases, read(ARLO), system)]
        for several in READINGS.values() for system in several
    }  # fmt: skip
    not_below = [said.format(system, len(each) - sum(each)) for system, each in held.items() if not all(each)]
    return _finding_in_all_runs([one for each in held.values() for one in each], why=", ".join(not_below))


def _mean_verdicts(of: FindResult, name: str) -> Iterator[Verdict]:
    cases = tables.FIXED[name]()
    for other, said in tables.MEAN_LESS[name].items():
        verdict = _reduction_verdict(of, cases, other, said, mean_ms)
        yield msgspec.structs.replace(verdict, bar=f"Figure {name}: {verdict.bar}")
    lowest = tuple(_arlo_is_below(of, cases, read, mean_ms, "`{}` is below it in {}") for read in BOTH)
    yield Verdict(f"Figure {name}: the mean is below each other one, in each run", "yes", lowest)
    order = tuple(_order_finding(of, cases, read) for read in BOTH)
    yield Verdict(f"Figure {name}: means in the order Arlo, DT, INFaaS, ST, in each run and reading", "yes", order)


def _p98_verdicts(of: FindResult, pair: str) -> Iterator[Verdict]:
    cases = [case for name in (f"{pair}a", f"{pair}b") for case in tables.FIXED[name]()]
    for other, said in tables.TAIL_LESS[pair].items():
        verdict = _reduction_verdict(of, cases, other, said, p98_ms)
        yield msgspec.structs.replace(
            verdict, bar=f"Figure {pair}, a and b: {verdict.bar}", paper=f"up to {verdict.paper}"
        )


def random_dispatch_verdicts(of: FindResult) -> Iterator[Verdict]:
    near = f"within {NEAR:.0f} points"
    for other, theirs in tables.RANDOM_READINGS.items():
        for figure in ("6a", "10a"):
            said, cases = tables.MEAN_LESS[figure][other], tables.random_dispatch(figure)
            means = (reduction_percent(of, cases, read(ARLO), (theirs,), mean_ms) for read in BOTH)
            bar = f"Figure {figure}: the mean is below `{theirs}`'s by, {near}"
            yield Verdict(bar, f"{said:.1f} %", tuple(_finding_near_paper(said, each) for each in means))
        for pair in ("6", "10"):
            said = tables.TAIL_LESS[pair][other]
            tails = (_larger_p98_reduction(of, pair, read(ARLO), theirs) for read in BOTH)
            bar = f"Figure {pair}, the larger of a and b: the 98th percentile is below `{theirs}`'s by, {near}"
            yield Verdict(bar, f"up to {said:.1f} %", tuple(_finding_near_paper(said, each) for each in tails))


def _larger_p98_reduction(of: FindResult, pair: str, ours: str, theirs: str) -> Interval | None:
    """Return the reduction of the 98th percentile over seeds, in the figure with the larger reduction."""
    cases = [case for part in "ab" for case in tables.random_dispatch(f"{pair}{part}")]
    seeds = {case.workload.seed for case in cases}
    of_seeds = (
        reduction_percent(of, [case for case in cases if case.workload.seed == seed], ours, (theirs,), p98_ms)
        for seed in seeds
    )
    return Interval.of(each.high for each in of_seeds if each is not None)


def _finding_near_paper(said: float, found: Interval | None) -> Finding:
    if found is None:
        return Finding()
    return Finding(f"{found.text()} %", said - NEAR <= found.low and found.high <= said + NEAR)


def _table_3_verdicts(of: FindResult) -> Iterator[Verdict]:
    cases = tables.TABLES["3"]()
    for name, what, at in (("mean", mean_ms, 0), ("98th percentile", p98_ms, 2)):
        order = tuple(
            _finding_in_all_runs(list(numbers_increase(of, cases, (read(ARLO), read(ARLO_GLOBAL), ARLO_EVEN), what)))
            for read in BOTH
        )
        yield Verdict(f"Table 3: the {name} in the order Arlo, Global, Even", "yes", order)
        for theirs in (ARLO_EVEN, ARLO_GLOBAL):
            said = tables.TABLE_3[theirs][at] / tables.TABLE_3[ARLO][at]
            found = []
            for read in BOTH:
                other = theirs if theirs == ARLO_EVEN else read(theirs)
                both = measured_pairs(of, cases, read(ARLO), other)
                found.append(_finding_in_interval(said, Interval.of(what(b) / what(a) for a, b in both), unit=" times"))
            bar = f"Table 3: the {name} of `{theirs}` in relation to Arlo's"
            yield Verdict(bar, f"{said:.1f} times", tuple(found))


def _table_4_verdicts(of: FindResult, devices: int) -> Iterator[Verdict]:
    cases = tables.of_trace_4(devices)
    said = tables.TABLE_4[devices]
    for theirs in (ARLO_ILB, ARLO_IG):
        for name, what, at in (("mean", mean_ms, 0), ("98th percentile", p98_ms, 1)):
            by = 100 * (1 - said[ARLO][at] / said[theirs][at])
            found = (reduction_percent(of, cases, read(ARLO), (read(theirs),), what) for read in BOTH)
            bar = f"Table 4, {devices:,} GPUs: RS's {name} is below `{theirs}`'s by"
            yield Verdict(bar, f"{by:.1f} %", tuple(_finding_in_interval(by, each, unit=" %") for each in found))
    order = tuple(_finding_in_all_runs(list(_rs_is_lowest(of, cases, read))) for read in BOTH)
    yield Verdict(f"Table 4, {devices:,} GPUs: RS's mean and 98th percentile are above no other", "yes", order)


def _rs_is_lowest(of: FindResult, cases: Sequence[Case], read: Reading) -> Iterator[bool]:
    for theirs in (ARLO_ILB, ARLO_IG):
        for one, other in measured_pairs(of, cases, read(ARLO), read(theirs)):
            yield one.mean_ms <= other.mean_ms
            yield one.p98_ms <= other.p98_ms


def _figure_8_verdicts(of: FindResult) -> Iterator[Verdict]:
    cases = tables.TABLES["8"]()
    for other, (devices, _) in tables.FIGURE_8.items():
        if other in READINGS:
            said = 100 * tables.FIGURE_8["Arlo"][0] / devices
            shares = [
                Interval.of(
                    100 * one.devices / theirs.devices
                    for system in READINGS[other] for one, theirs in measured_pairs(of, cases, read(ARLO), system)
                )
                for read in BOTH
            ]  # fmt: skip
            found = tuple(_finding_in_interval(said, each, unit=" %") for each in shares)
            yield Verdict(f"Figure 8: Arlo's GPUs in relation to {other}'s", f"{said:.1f} %", found)
    fewer = tuple(_arlo_is_below(of, cases, read, lambda one: one.devices, "not `{}` in {}") for read in BOTH)
    yield Verdict("Figure 8: Arlo uses fewer GPUs than each other system, in each run", "yes", fewer)


def _figure_11_verdicts(of: FindResult) -> Iterator[Verdict]:
    for count, said in tables.FIGURE_11_LATE.items():
        found = (_late_percent_of_figure_11(of, read, count) for read in BOTH)
        bar = f"Figure 11, {count} runtimes: requests above the objective"
        yield Verdict(
            bar, f"{said:.1f} %", tuple(_finding_in_interval(said, each, unit=" %", digits=2) for each in found)
        )
    two = [_late_percent_of_figure_11(of, read, 2) for read in BOTH]
    served = tuple(Finding() if each is None else Finding(f"{each.text()} %", each.low > 50) for each in two)
    yield Verdict("Figure 11: with 2 runtimes more than half are above it", "yes", served)
    said = tables.FIGURE_11[16][0] / tables.FIGURE_11[8][0]
    ratios = tuple(_finding_in_interval(said, _ratio_of_16_to_8_runtimes(of, read), digits=2) for read in BOTH)
    yield Verdict("Figure 11: the mean with 16 runtimes in relation to that with 8", f"{said:.2f}", ratios)


def _late_percent_of_figure_11(of: FindResult, read: Reading, count: int) -> Interval | None:
    cases = [case for case in tables.TABLES["11"]() if case.runtimes == count and case.system == read(ARLO)]
    return Interval.of(100 * found.measures.late for case in cases if (found := of(case)) is not None)


def _ratio_of_16_to_8_runtimes(of: FindResult, read: Reading) -> Interval | None:
    ratios = []
    for case in tables.TABLES["11"]():
        if case.runtimes == 8 and case.system == read(ARLO):
            eight, sixteen = of(case), of(msgspec.structs.replace(case, runtimes=16))
            if eight is not None and sixteen is not None:
                ratios.append(sixteen.measures.mean_ms / eight.measures.mean_ms)
    return Interval.of(ratios)


def _table_2_verdict(records: Records) -> Verdict:
    bar = f"Table 2, 1,000 GPUs, 16 runtimes: under {tables.BAR_TABLE_2_S} s in the mean of 20"
    found = Finding()
    if records.measured is not None:
        seconds = next(each.seconds for each in records.measured.solving if (each.devices, each.runtimes) == (1000, 16))
        mean = sum(seconds) / len(seconds)
        found = Finding(f"{mean:.3f} s", mean < tables.BAR_TABLE_2_S, f"the longest took {max(seconds):.2f} s")
    return Verdict(bar, f"{tables.TABLE_2[1000, 16]} s", (found,))


def _figure_9_verdict(records: Records) -> Verdict:
    found = Finding()
    if records.measured is not None:
        largest = Interval.of(each.ms for each in records.measured.dispatching if each.instances == 1200)
        is_met = largest is not None and largest.high <= tables.FIGURE_9_MS
        found = Finding(f"{interval_text(largest, 2)} ms", is_met, "" if is_met else "in Python; the paper's is in C++")
    return Verdict("Figure 9: 2,400 requests, 1,200 instances, dispatched in", f"{tables.FIGURE_9_MS} ms", (found,))


def session_verdict(records: Records) -> Verdict:
    busy = max((each.rate for each in records.deployed), default=0.0)
    ratio = Interval.of(each.p98_ms / each.model.p98_ms for each in records.deployed if each.rate == busy)
    found = Finding() if ratio is None else Finding(f"{ratio.text(2)} times", ratio.high <= AT_MOST)
    bar = (
        f"A session at {busy:,.0f} requests/s: the 98th percentile is within {AT_MOST:.0f} times the model's, each seed"
    )
    return Verdict(bar, "", (found,))


def _replacement_verdict(records: Records) -> Verdict:
    every = [result.measures for result in records.store.found.values()]
    found = Finding()
    if every:
        most, lost = max(each.most_out / each.at_once for each in every), sum(each.lost for each in every)
        replaced = sum(each.replaced for each in every)
        here = f"at most {100 * most:.0f} % of the limit, {replaced:,} replacements, {lost} lost, {len(every)} runs"
        found = Finding(here, most <= 1 and not lost)
    bar = "All runs: instances out of service at once are within the limit, and no request is lost"
    return Verdict(bar, "", (found,))


def _simulation_speed_verdict(records: Records) -> Verdict:
    requests = sum(result.measures.requests for result in records.store.found.values())
    seconds = sum(result.took_s for result in records.store.found.values())
    found = Finding()
    if seconds:
        rate = requests / seconds
        here = f"{rate:,.0f}, {requests / 1e6:.0f} million requests in {seconds / 60:.0f} min"
        found = Finding(here, rate >= TARGET_RATE)
    return Verdict(f"The model answers {TARGET_RATE:,} requests a second of one core", "", (found,))
