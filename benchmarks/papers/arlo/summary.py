"""Judge Arlo's numbers by the bars of `docs/reproduction/arlo.md`, with intervals over runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.papers.arlo import cases as runs
from benchmarks.papers.arlo import tables
from benchmarks.papers.arlo.cases import ARLO, ARLO_EVEN, ARLO_GLOBAL, ARLO_IG, ARLO_ILB, Case, Measures, Result
from benchmarks.papers.arlo.tables import DT_, INFAAS_, READINGS, ST_
from benchmarks.papers.common import MISSING, Store

FindResult = Callable[[Case], Result | None]
What = Callable[[Measures], float]
Records = Store[Case, Result]


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


mean_ms: What = attrgetter("mean_ms")
p98_ms: What = attrgetter("p98_ms")


def measured_pairs(
    of: FindResult, cases: Sequence[Case], ours: str, theirs: str
) -> Iterator[tuple[Measures, Measures]]:
    """Yield measures of two systems on equal requests."""
    for case in cases:
        if case.system == theirs:
            one, other = of(replace(case, system=ours)), of(case)
            if one is not None and other is not None:
                yield one.measures, other.measures


def reduction_percent(
    of: FindResult, cases: Sequence[Case], ours: str, theirs: Iterable[str], what: What
) -> Interval | None:
    """Return the percent by which a system is below each other system, on equal requests."""
    found = (pair for system in theirs for pair in measured_pairs(of, cases, ours, system))
    return Interval.of(100 * (1 - what(one) / what(other)) for one, other in found)


TARGET_RATE = 150_000
NEAR = 5.0
"""Allowed difference from the paper in percentage points, with random dispatch."""
AT_MOST = 2.0
"""Allowed ratio of the 98th percentile in a session to the model."""

Reading = Callable[[str], str]
"""A function that names a variant of an Arlo system."""
BOTH: tuple[Reading, ...] = (str, runs.within_capacity)


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
    """A line of the table, with one finding per variant of Arlo's allocation."""

    bar: str
    paper: str
    findings: tuple[Finding, ...]

    @property
    def row(self) -> list[str]:
        found = [cell for finding in self.findings for cell in finding.cells]
        return [self.bar, self.paper, *found, *[""] * (4 - len(found))]


def verdict(bar: str, paper: str, findings: Iterable[Finding]) -> Verdict:
    return Verdict(bar, paper, tuple(findings))


def verdicts(records: Records) -> list[Verdict]:
    of = records.get
    figures = [each for name in tables.FIXED for each in _mean_verdicts(of, name)]
    tails = [each for pair in ("6", "10") for each in _p98_verdicts(of, pair)]
    fours = [each for devices in tables.TRACES_4 for each in _table_4_verdicts(of, devices)]
    return [
        *figures, *tails, *random_dispatch_verdicts(of), *_figure_8_verdicts(of), *_figure_11_verdicts(of),
        *_table_3_verdicts(of), *fours, *_measured_verdicts(records), session_verdict(records),
        *_run_verdicts(records),
    ]  # fmt: skip


def _in_interval(said: float, found: Interval | None, *, unit: str = "", digits: int = 1, why: str = "") -> Finding:
    return Finding() if found is None else Finding(found.text(digits) + unit, said in found, why)


def _in_all_runs(held: Iterable[bool], *, why: str = "") -> Finding:
    runs = list(held)
    return Finding(f"{sum(runs)} of {len(runs)}", all(runs), "" if all(runs) else why) if runs else Finding()


def _reduction_findings(
    of: FindResult, cases: Sequence[Case], other: str, said: float, what: What
) -> Iterator[Finding]:
    """Yield findings; each names the readings of the other system that give the paper's number."""
    for read in BOTH:
        apart = {one: reduction_percent(of, cases, read(ARLO), (one,), what) for one in READINGS[other]}
        having = [f"`{one}`" for one, interval in apart.items() if interval is not None and said in interval]
        whole = reduction_percent(of, cases, read(ARLO), READINGS[other], what)
        is_told = whole is not None and said in whole and len(apart) > 1
        why = ", ".join(having or ["between two readings"]) if is_told else ""
        yield _in_interval(said, whole, unit=" %", why=why)


def _numbers_increase(of: FindResult, cases: Sequence[Case], systems: Sequence[str], what: What) -> Iterator[bool]:
    """For each case of the first system, yield True if the numbers increase from system to system."""
    for case in cases:
        if case.system == systems[0]:
            found = [of(replace(case, system=system)) for system in systems]
            numbers = [what(result.measures) for result in found if result is not None]
            if len(numbers) == len(found):
                yield numbers == sorted(numbers)


def _order_finding(of: FindResult, cases: Sequence[Case], read: Reading) -> Finding:
    held = {
        (dt, infaas): list(_numbers_increase(of, cases, (read(ARLO), dt, infaas, *READINGS[ST_]), mean_ms))
        for dt in READINGS[DT_] for infaas in READINGS[INFAAS_]
    }  # fmt: skip
    best = max(held, key=lambda pair: sum(held[pair]))
    most = f"{sum(held[best])} of {len(held[best])} with `{best[0]}` and `{best[1]}`"
    return _in_all_runs((each for several in held.values() for each in several), why=most if sum(held[best]) else "")


def _below_each(of: FindResult, cases: Sequence[Case], read: Reading, what: What, said: str) -> Finding:
    """`said`: text for a system and its failed runs."""
    held = {
        system: [what(one) < what(other) for one, other in measured_pairs(of, cases, read(ARLO), system)]
        for several in READINGS.values() for system in several
    }  # fmt: skip
    not_below = [said.format(system, len(each) - sum(each)) for system, each in held.items() if not all(each)]
    return _in_all_runs((one for each in held.values() for one in each), why=", ".join(not_below))


def _mean_verdicts(of: FindResult, name: str) -> Iterator[Verdict]:
    cases, figure = tables.FIXED[name](), f"Figure {name}"
    for other, said in tables.MEAN_LESS[name].items():
        found = _reduction_findings(of, cases, other, said, mean_ms)
        yield verdict(f"{figure}: the mean is below {other}'s by", f"{said:.1f} %", found)
    lowest = (_below_each(of, cases, read, mean_ms, "`{}` is below Arlo in {}") for read in BOTH)
    yield verdict(f"{figure}: the mean is below each other system's, in each run", "yes", lowest)
    order = (_order_finding(of, cases, read) for read in BOTH)
    yield verdict(f"{figure}: means in the order Arlo, DT, INFaaS, ST, in each run and reading", "yes", order)


def _p98_verdicts(of: FindResult, pair: str) -> Iterator[Verdict]:
    cases, figure = [case for part in "ab" for case in tables.FIXED[pair + part]()], f"Figure {pair}, a and b"
    for other, said in tables.TAIL_LESS[pair].items():
        found = _reduction_findings(of, cases, other, said, p98_ms)
        yield verdict(f"{figure}: the 98th percentile is below {other}'s by", f"up to {said:.1f} %", found)


def random_dispatch_verdicts(of: FindResult) -> Iterator[Verdict]:
    near = f"within {NEAR:.0f} points"
    for other, theirs in tables.RANDOM_READINGS.items():
        for figure in ("6a", "10a"):
            said, cases = tables.MEAN_LESS[figure][other], tables.random_dispatch(figure)
            means = [reduction_percent(of, cases, read(ARLO), (theirs,), mean_ms) for read in BOTH]
            bar = f"Figure {figure}: the mean is below `{theirs}`'s by, {near}"
            yield verdict(bar, f"{said:.1f} %", map(_near_paper, (said, said), means))
        for pair in ("6", "10"):
            said = tables.TAIL_LESS[pair][other]
            tails = [_larger_p98_reduction(of, pair, read(ARLO), theirs) for read in BOTH]
            bar = f"Figure {pair}, the larger of a and b: the 98th percentile is below `{theirs}`'s by, {near}"
            yield verdict(bar, f"up to {said:.1f} %", map(_near_paper, (said, said), tails))


def _larger_p98_reduction(of: FindResult, pair: str, ours: str, theirs: str) -> Interval | None:
    """Return an interval over seeds of the larger reduction of the 98th percentile in two figures."""
    cases = [case for part in "ab" for case in tables.random_dispatch(f"{pair}{part}")]
    of_seeds = (
        reduction_percent(of, [case for case in cases if case.workload.seed == seed], ours, (theirs,), p98_ms)
        for seed in {case.workload.seed for case in cases}
    )
    return Interval.of(each.high for each in of_seeds if each is not None)


def _near_paper(said: float, found: Interval | None) -> Finding:
    if found is None:
        return Finding()
    return Finding(f"{found.text()} %", said - NEAR <= found.low and found.high <= said + NEAR)


def _table_3_verdicts(of: FindResult) -> Iterator[Verdict]:
    cases = tables.TABLES["3"]()
    for name, what, at in (("mean", mean_ms, 0), ("98th percentile", p98_ms, 2)):
        systems = [(read(ARLO), read(ARLO_GLOBAL), ARLO_EVEN) for read in BOTH]
        order = (_in_all_runs(_numbers_increase(of, cases, each, what)) for each in systems)
        yield verdict(f"Table 3: the {name} in the order Arlo, Global, Even", "yes", order)
        for theirs, place in ((ARLO_EVEN, 2), (ARLO_GLOBAL, 1)):
            said = tables.TABLE_3[theirs][at] / tables.TABLE_3[ARLO][at]
            both = (measured_pairs(of, cases, each[0], each[place]) for each in systems)
            ratios = [Interval.of(what(b) / what(a) for a, b in pairs) for pairs in both]
            bar = f"Table 3: the {name} of `{theirs}` divided by Arlo's"
            yield verdict(bar, f"{said:.1f} times", [_in_interval(said, each, unit=" times") for each in ratios])


def _table_4_verdicts(of: FindResult, devices: int) -> Iterator[Verdict]:
    cases, said, table = tables.of_trace_4(devices), tables.TABLE_4[devices], f"Table 4, {devices:,} GPUs"
    for theirs in (ARLO_ILB, ARLO_IG):
        for name, what, at in (("mean", mean_ms, 0), ("98th percentile", p98_ms, 1)):
            by = 100 * (1 - said[ARLO][at] / said[theirs][at])
            found = [reduction_percent(of, cases, read(ARLO), (read(theirs),), what) for read in BOTH]
            bar = f"{table}: RS's {name} is below `{theirs}`'s by"
            yield verdict(bar, f"{by:.1f} %", [_in_interval(by, each, unit=" %") for each in found])
    order = (_in_all_runs(_rs_is_lowest(of, cases, read)) for read in BOTH)
    yield verdict(f"{table}: RS's mean and 98th percentile are the lowest", "yes", order)


def _rs_is_lowest(of: FindResult, cases: Sequence[Case], read: Reading) -> Iterator[bool]:
    for theirs in (ARLO_ILB, ARLO_IG):
        for one, other in measured_pairs(of, cases, read(ARLO), read(theirs)):
            yield one.mean_ms <= other.mean_ms
            yield one.p98_ms <= other.p98_ms


def _figure_8_verdicts(of: FindResult) -> Iterator[Verdict]:
    cases = tables.TABLES["8"]()
    for other, several in READINGS.items():
        said = 100 * tables.FIGURE_8["Arlo"][0] / tables.FIGURE_8[other][0]
        pairs = [[pair for one in several for pair in measured_pairs(of, cases, read(ARLO), one)] for read in BOTH]
        shares = [Interval.of(100 * one.devices / theirs.devices for one, theirs in each) for each in pairs]
        found = [_in_interval(said, each, unit=" %") for each in shares]
        yield verdict(f"Figure 8: Arlo's GPUs divided by {other}'s", f"{said:.1f} %", found)
    fewer = (_below_each(of, cases, read, attrgetter("devices"), "not below `{}` in {}") for read in BOTH)
    yield verdict("Figure 8: Arlo uses fewer GPUs than each other system, in each run", "yes", fewer)


def _figure_11_verdicts(of: FindResult) -> Iterator[Verdict]:
    def results(system: str, runtimes: int) -> dict[Any, Measures]:
        cases = [case for case in tables.TABLES["11"]() if (case.runtimes, case.system) == (runtimes, system)]
        return {case.workload: result.measures for case in cases if (result := of(case)) is not None}

    by_count = {count: [results(read(ARLO), count) for read in BOTH] for count in tables.COUNTS_11}
    late = {
        count: [Interval.of(100 * one.late for one in each.values()) for each in both]
        for count, both in by_count.items()
    }
    for count, said in tables.FIGURE_11_LATE.items():
        found = [_in_interval(said, each, unit=" %", digits=2) for each in late[count]]
        yield verdict(f"Figure 11, {count} runtimes: requests above the objective", f"{said:.1f} %", found)
    served = [Finding() if each is None else Finding(f"{each.text()} %", each.low > 50) for each in late[2]]
    yield verdict("Figure 11, 2 runtimes: more than half of the requests are above the objective", "yes", served)
    said = tables.FIGURE_11[16][0] / tables.FIGURE_11[8][0]
    both = zip(by_count[8], by_count[16], strict=True)
    ratios = [Interval.of(b[each].mean_ms / a[each].mean_ms for each in a if each in b) for a, b in both]
    found = [_in_interval(said, each, digits=2) for each in ratios]
    yield verdict("Figure 11: the mean with 16 runtimes divided by the mean with 8", f"{said:.2f}", found)


def _measured_verdicts(records: Records) -> Iterator[Verdict]:
    table_2, figure_9, measured = Finding(), Finding(), records.kept.measured
    if measured is not None:
        seconds = next(each.seconds for each in measured.solving if (each.devices, each.runtimes) == (1000, 16))
        mean = sum(seconds) / len(seconds)
        table_2 = Finding(f"{mean:.3f} s", mean < tables.BAR_TABLE_2_S, f"the longest took {max(seconds):.2f} s")
        largest = Interval.of(each.ms for each in measured.dispatching if each.instances == 1200)
        is_met = largest is not None and largest.high <= tables.FIGURE_9_MS
        why = "" if is_met else "our code is Python, the paper's is C++"
        figure_9 = Finding(f"{interval_text(largest, 2)} ms", is_met, why)
    bar = f"Table 2, 1,000 GPUs, 16 runtimes: under {tables.BAR_TABLE_2_S} s in the mean of 20"
    yield Verdict(bar, f"{tables.TABLE_2[1000, 16]} s", (table_2,))
    bar = "Figure 9: time to dispatch 2,400 requests to 1,200 instances"
    yield Verdict(bar, f"{tables.FIGURE_9_MS} ms", (figure_9,))


def session_verdict(records: Records) -> Verdict:
    deployed = records.kept.deployed
    busy = max((each.rate for each in deployed), default=0.0)
    ratio = Interval.of(each.p98_ms / each.model.p98_ms for each in deployed if each.rate == busy)
    found = Finding() if ratio is None else Finding(f"{ratio.text(2)} times", ratio.high <= AT_MOST)
    limit = f"the 98th percentile is within {AT_MOST:.0f} times the model's, each seed"
    return Verdict(f"A session at {busy:,.0f} requests/s: {limit}", "", (found,))


def _run_verdicts(records: Records) -> Iterator[Verdict]:
    """Yield two verdicts over all runs: on replaced instances, and on the speed of the simulation."""
    every = [result.measures for result in records.found.values()]
    limits = speed = Finding()
    if every:
        most, lost = max(each.most_out / each.at_once for each in every), sum(each.lost for each in every)
        replaced = sum(each.replaced for each in every)
        here = f"at most {100 * most:.0f} % of the limit, {replaced:,} replacements, {lost} lost, {len(every)} runs"
        limits = Finding(here, most <= 1 and not lost)
        requests, seconds = sum(each.requests for each in every), sum(each.took_s for each in records.found.values())
        here = f"{requests / seconds:,.0f}, {requests / 1e6:.0f} million requests in {seconds / 60:.0f} min"
        speed = Finding(here, requests / seconds >= TARGET_RATE)
    bar = "All runs: instances out of service at once are within the limit, and no request is lost"
    yield Verdict(bar, "", (limits,))
    yield Verdict(f"The model answers {TARGET_RATE:,} requests a second of one core", "", (speed,))
