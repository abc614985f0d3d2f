"""The first table of `docs/reproduction/arlo.md`: each bar, what the paper has, what came out here, met or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import msgspec

from benchmarks.arlo import paper, tables
from benchmarks.arlo.cases import ARLO, ARLO_EVEN, ARLO_GLOBAL, ARLO_IG, ARLO_ILB, Case, Measures
from benchmarks.arlo.intervals import MISSING, READINGS, Interval, Of, less, mean_ms, p98_ms, pairs, shown, with_system
from benchmarks.arlo.paper import DT_, INFAAS_, ST_
from benchmarks.arlo.records import Records

FIGURES: dict[str, Callable[[], list[Case]]] = {
    "6a": tables.figure_6a, "6b": tables.figure_6b, "10a": tables.figure_10a, "10b": tables.figure_10b
}  # fmt: skip
"""The figures with a fixed number of devices."""
TARGET_RATE = 150_000
"""Requests that the model answers in a second of one core."""


class Verdict(msgspec.Struct, frozen=True):
    """A line of the table. `is_met`: None if it has not been run; `why`: beside the answer."""

    bar: str
    paper: str
    here: str
    is_met: bool | None
    why: str = ""

    @property
    def row(self) -> list[str]:
        """Its cells."""
        said = "not run" if self.is_met is None else "yes" if self.is_met else "**no**"
        return [self.bar, self.paper, self.here, f"{said}: {self.why}" if self.why else said]


def verdicts(records: Records) -> list[Verdict]:
    """All bars, from the records."""
    of = records.get
    figures = [verdict for name in FIGURES for verdict in _figure(of, name)]
    tails = [verdict for pair in ("6", "10") for verdict in _tails(of, pair)]
    fours = [verdict for devices in tables.TRACES_4 for verdict in _table_4(of, devices)]
    return [
        *figures, *tails, *_table_3(of), *fours, _figure_8(of), *_figure_11(of), _table_2(records), _figure_9(records),
        _replacements(records), _speed(records),
    ]  # fmt: skip


def _inside(bar: str, said: float, found: Interval | None, unit: str, why: str = "") -> Verdict:
    """Whether the paper's number is inside our interval."""
    if found is None:
        return Verdict(bar, f"{said:,.1f}{unit}", MISSING, None)
    return Verdict(bar, f"{said:,.1f}{unit}", found.text() + unit, said in found, why)


def _always(bar: str, paper_says: str, held: Sequence[bool], why: str = "") -> Verdict:
    """Whether something holds in each of the runs."""
    if not held:
        return Verdict(bar, paper_says, MISSING, None)
    return Verdict(bar, paper_says, f"in {sum(held)} of {len(held)}", all(held), "" if all(held) else why)


# ---- figures with a fixed number of devices


def orders(of: Of, cases: Sequence[Case], dt: str, infaas: str) -> Iterator[bool]:
    """For each workload and latency whether the means are in the paper's order, with these readings of two systems."""
    for case in cases:
        if case.system == ARLO:
            found = [of(with_system(case, system)) for system in (ARLO, dt, infaas, READINGS[ST_][0])]
            means = [result.measures.mean_ms for result in found if result is not None]
            if len(means) == len(found):
                yield means == sorted(means)


def _figure(of: Of, name: str) -> Iterator[Verdict]:
    cases = FIGURES[name]()
    for other, said in paper.MEAN_LESS[name].items():
        bar = f"Figure {name}: Arlo's mean is below that of {other} by"
        yield _inside(bar, said, less(of, cases, READINGS[other], mean_ms), " %")
    readings = list(product(READINGS[DT_], READINGS[INFAAS_]))
    held = [each for dt, infaas in readings for each in orders(of, cases, dt, infaas)]
    best = max((sum(orders(of, cases, *each)), each) for each in readings)
    bar = f"Figure {name}: means in the order Arlo, DT, INFaaS, ST, in each reading and run"
    yield _always(bar, "yes", held, f"most often with `{best[1][0]}`, `{best[1][1]}`")
    lowest = [
        one.mean_ms < other.mean_ms
        for system in (system for several in READINGS.values() for system in several)
        for one, other in pairs(of, cases, ARLO, system)
    ]
    yield _always(f"Figure {name}: Arlo's mean is below each other one", "yes", lowest)


def _tails(of: Of, pair: str) -> Iterator[Verdict]:
    cases = [case for name in (f"{pair}a", f"{pair}b") for case in FIGURES[name]()]
    for other, said in paper.TAIL_LESS[pair].items():
        bar = f"Figure {pair}: Arlo's 98th percentile is below that of {other} by up to"
        yield _inside(bar, said, less(of, cases, READINGS[other], p98_ms), " %")


# ---- the parts of Arlo


def _ratio(of: Of, cases: Sequence[Case], theirs: str, what: Callable[[Measures], float]) -> Interval | None:
    return Interval.of(what(other) / what(one) for one, other in pairs(of, cases, ARLO, theirs))


def _table_3(of: Of) -> Iterator[Verdict]:
    cases = tables.table_3()
    for name, what, at in (("mean", mean_ms, 0), ("98th percentile", p98_ms, 2)):
        held = []
        for (one, even), (_, whole) in zip(
            pairs(of, cases, ARLO, ARLO_EVEN), pairs(of, cases, ARLO, ARLO_GLOBAL), strict=False
        ):
            held.append(what(one) < what(whole) < what(even))
        yield _always(f"Table 3: the {name} in the order Arlo, Global, Even", "yes", held)
        for theirs in (ARLO_EVEN, ARLO_GLOBAL):
            said = paper.TABLE_3[theirs][at] / paper.TABLE_3[ARLO][at]
            bar = f"Table 3: the {name} of `{theirs}` in relation to Arlo's"
            yield _inside(bar, said, _ratio(of, cases, theirs, what), "")


def _table_4(of: Of, devices: int) -> Iterator[Verdict]:
    cases = list(tables.of_trace_4(devices))
    for theirs in (ARLO_ILB, ARLO_IG):
        for name, what, at in (("mean", mean_ms, 0), ("98th percentile", p98_ms, 1)):
            said = 100 * (1 - paper.TABLE_4[devices][ARLO][at] / paper.TABLE_4[devices][theirs][at])
            bar = f"Table 4, {devices} GPUs: the {name} is below that of `{theirs}` by"
            yield _inside(bar, said, less(of, cases, (theirs,), what), " %")
            held = [what(one) <= what(other) for one, other in pairs(of, cases, ARLO, theirs)]
            yield _always(f"Table 4, {devices} GPUs: the {name} is not above that of `{theirs}`", "yes", held)


def _figure_8(of: Of) -> Verdict:
    cases = tables.figure_8()
    held = [
        one.devices < other.devices
        for systems in READINGS.values() for system in systems for one, other in pairs(of, cases, ARLO, system)
    ]  # fmt: skip
    return _always("Figure 8: Arlo uses fewer GPUs than each other system", "yes", held)


def _figure_11(of: Of) -> Iterator[Verdict]:
    found = {count: [of(case) for case in tables.figure_11() if case.runtimes == count] for count in tables.COUNTS_11}
    late = {
        count: Interval.of(100 * one.measures.late for one in results if one is not None)
        for count, results in found.items()
    }
    for count, said in paper.FIGURE_11_LATE.items():
        yield _inside(f"Figure 11, {count} runtimes: above the objective", said, late[count], " %")
    two = late[2]
    bar = "Figure 11: with 2 runtimes most requests are late"
    yield Verdict(bar, "yes", shown(two) + " %" if two else MISSING, None if two is None else two.low > 50)
    both = [(a, b) for a, b in zip(found[8], found[16], strict=True) if a is not None and b is not None]
    ratio = Interval.of(b.measures.mean_ms / a.measures.mean_ms for a, b in both)
    bar = "Figure 11: the mean with 16 runtimes in relation to that with 8"
    said = paper.FIGURE_11[16][0] / paper.FIGURE_11[8][0]
    yield Verdict(bar, f"{said:.2f}", shown(ratio, 2), None if ratio is None else said in ratio)


# ---- measured, and what holds in all runs


def _table_2(records: Records) -> Verdict:
    bar = f"Table 2, 1,000 GPUs, 16 runtimes: under {paper.BAR_TABLE_2_S} s in the mean of 20"
    said = f"{paper.TABLE_2[1000, 16]} s"
    if records.measured is None:
        return Verdict(bar, said, MISSING, None)
    seconds = next(each.seconds for each in records.measured.solving if (each.devices, each.runtimes) == (1000, 16))
    mean = sum(seconds) / len(seconds)
    why = f"the longest took {max(seconds):.2f} s"
    return Verdict(bar, said, f"{mean:.3f} s", mean < paper.BAR_TABLE_2_S, why)


def _figure_9(records: Records) -> Verdict:
    bar = "Figure 9: 2,400 requests, 1,200 instances, dispatched in"
    said = f"{paper.FIGURE_9_MS} ms"
    if records.measured is None:
        return Verdict(bar, said, MISSING, None)
    largest = [each.ms for each in records.measured.dispatching if each.instances == 1200]
    found = Interval(min(largest), max(largest))
    why = "it is Python, and the paper's is C++" if found.low > paper.FIGURE_9_MS else ""
    return Verdict(bar, said, f"{found.text(2)} ms", found.high <= paper.FIGURE_9_MS, why)


def _replacements(records: Records) -> Verdict:
    every = [result.measures for result in records.all()]
    bar = "All runs: instances out of service at once are not above the limit, and no request is lost"
    if not every:
        return Verdict(bar, "", MISSING, None)
    most, lost = max(each.most_out / each.at_once for each in every), sum(each.lost for each in every)
    replaced = sum(each.replaced for each in every)
    here = f"at most {100 * most:.0f} % of the limit, {replaced:,} replacements, {lost} lost, {len(every)} runs"
    return Verdict(bar, "", here, most <= 1 and not lost)


def _speed(records: Records) -> Verdict:
    bar = f"The model answers {TARGET_RATE:,} requests a second of one core"
    requests = sum(result.measures.requests for result in records.all())
    if not records.seconds:
        return Verdict(bar, "", MISSING, None)
    rate = requests / records.seconds
    here = f"{rate:,.0f}, {requests / 1e6:.0f} million requests in {records.seconds / 60:.0f} min"
    return Verdict(bar, "", here, rate >= TARGET_RATE)
