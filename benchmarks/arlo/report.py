"""`docs/reproduction/arlo.md`: the paper's numbers beside ours, from the records alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from benchmarks.arlo import paper, settings, summary, tables, texts
from benchmarks.arlo.cases import ARLO, ARLO_EVEN, ARLO_GLOBAL, ARLO_IG, ARLO_ILB, Case, Measures, within_capacity
from benchmarks.arlo.intervals import (
    READINGS,
    less,
    mean_ms,
    p98_ms,
    shown,
    values,
)
from benchmarks.arlo.overheads import SolvingTime
from benchmarks.arlo.paper import FIGURE_8, ST_, TABLE_4
from benchmarks.arlo.records import Records

_NAMED = {ours: theirs for theirs, several in READINGS.items() for ours in several}
"""What a system of ours is in the paper, Arlo's own apart."""
_PLAIN = {within_capacity(name): name for name in (ARLO, ARLO_EVEN, ARLO_GLOBAL, ARLO_IG, ARLO_ILB)}
"""The first reading of a system of Arlo's."""


def write(records: Records) -> str:
    """The page, in Markdown."""
    of = _Page(records)
    parts = (
        texts.head(), of.summary(), texts.readings(), of.figure("6a"), of.figure("6b"), of.figure_7(), of.figure_8(),
        of.figure("10a"), of.figure("10b"), of.figure_11(), of.table_2(), of.table_3(), of.table_4(), of.figure_9(),
        of.padding(), of.still(), of.overhead(), texts.open_points(),
    )  # fmt: skip
    return texts.filled("\n".join(parts))


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    names = list(columns)
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def late(of: Measures) -> float:
    """Per cent of the requests above the objective."""
    return 100 * of.late


class _Page:
    def __init__(self, records: Records) -> None:
        self._records = records
        self._of = records.get

    def summary(self) -> str:
        rows = [verdict.row for verdict in summary.verdicts(self._records)]
        return f"{texts.SUMMARY}\n{table(summary.COLUMNS, rows)}"

    def _values(self, cases: Sequence[Case], what: Callable[[Measures], float], digits: int = 1) -> str:
        return shown(values(self._of, cases, what), digits)

    def figure(self, name: str) -> str:
        """Latencies with a fixed number of devices, by system; by the latency of Bert-Large, too."""
        cases = summary.FIGURES[name]()
        rows = []
        for system in tables.MAIN:
            own = [case for case in cases if case.system == system]
            said = paper.MEAN_LESS[name].get(_NAMED.get(system, ""))
            means, tails = (
                [self._less(cases, ours, system, what) for ours in tables.ARLOS] for what in (mean_ms, p98_ms)
            )
            rows.append([
                f"`{system}`", self._values(own, mean_ms, 2), self._values(own, p98_ms), self._values(own, late, 2),
                f"{said:.1f}" if said else "", *means, *tails,
            ])  # fmt: skip
        columns = (
            "system", "mean, ms", "p98, ms", "late, %", "paper: Arlo's mean is less by, %", "`arlo`",
            "within capacity", "p98 is less by, %: `arlo`", "within capacity",
        )  # fmt: skip
        text = f"{texts.figure(name, cases)}\n{table(columns, rows)}"
        return text + "\n" + self._by_latency(cases) if len(_latencies(cases)) > 1 else text

    def _less(self, cases: Sequence[Case], ours: str, theirs: str, what: Callable[[Measures], float]) -> str:
        """By how many per cent one is below another; empty beside Arlo's own readings."""
        return shown(less(self._of, cases, ours, (theirs,), what)) if theirs in _NAMED else ""

    def _by_latency(self, cases: Sequence[Case]) -> str:
        latencies = _latencies(cases)
        rows = [
            [
                f"`{system}`",
                *(
                    self._values([c for c in cases if c.system == system and c.profile.longest_ms == longest], mean_ms)
                    for longest in latencies
                ),
            ]
            for system in tables.MAIN
        ]
        return table(("mean, ms, where 512 tokens take", *(f"{longest:g} ms" for longest in latencies)), rows)

    def figure_7(self) -> str:
        cases = tables.figure_7()
        rows = [
            [
                f"`{system}`",
                *(
                    self._values([c for c in cases if c.system == system and c.workload.rate == rate], mean_ms)
                    for rate in tables.RATES_7
                ),
            ]
            for system in tables.MAIN
        ]
        columns = ("mean, ms, at requests/s", *(f"{rate:,.0f}" for rate in tables.RATES_7))
        return f"{texts.figure_7(cases)}\n{table(columns, rows)}"

    def figure_8(self) -> str:
        cases = tables.figure_8()
        rows = []
        for system in tables.MAIN:
            said = FIGURE_8.get(_NAMED.get(system, "Arlo"))
            cells = [f"`{system}`", f"{said[0]:.2f}" if said else "", f"{said[1]:.0f}" if said else ""]
            for least in tables.LEAST_8:
                own = [case for case in cases if case.system == system and case.least == least]
                cells += [self._values(own, lambda one: one.devices, 2), self._values(own, p98_ms, 0)]
            rows.append(cells)
        kept = [f"{what}, at least {least}" for least in tables.LEAST_8 for what in ("GPUs", "p98, ms")]
        return f"{texts.figure_8(cases)}\n{table(('system', 'paper: GPUs', 'p98, ms', *kept), rows)}"

    def figure_11(self) -> str:
        cases = tables.figure_11()
        rows = []
        for count in tables.COUNTS_11:
            said, late_said = paper.FIGURE_11.get(count), paper.FIGURE_11_LATE.get(count)
            cells = [f"{number:.2f}" for number in said] if said is not None else ["", ""]
            cells.append("" if late_said is None else f"{late_said:.1f}")
            for system in tables.ARLOS:
                own = [case for case in cases if case.runtimes == count and case.system == system]
                cells += [self._values(own, mean_ms), self._values(own, p98_ms), self._values(own, late, 2)]
            rows.append([str(count), *cells])
        by_reading = [f"{system}: mean, ms; p98, ms; late, %".split("; ") for system in ("`arlo`", "within capacity")]
        columns = ("runtimes", "paper: mean, ms", "p98, ms", "late, %", *by_reading[0], *by_reading[1])
        return f"{texts.figure_11(cases)}\n{table(columns, rows)}\n{self._by_load(cases, tables.COUNTS_11)}"

    def _by_load(self, cases: Sequence[Case], counts: Sequence[int]) -> str:
        """Means by the load, for each system and number of runtimes."""
        systems = list(dict.fromkeys(case.system for case in cases))
        rows = []
        for system in systems:
            for count in counts:
                apart = [
                    [case for case in cases if _of_load(case) == (system, count, tables.rate_at(load))]
                    for load in settings.UTILIZATIONS
                ]
                rows.append([f"`{system}`", str(count), *(self._mean_and_p98(some) for some in apart)])
        loads = (f"{load:.0%} busy" for load in settings.UTILIZATIONS)
        return table(("mean; p98, ms", "runtimes", *loads), rows)

    def table_3(self) -> str:
        cases = tables.table_3()
        rows = []
        for system in tables.ALLOCATIONS_3:
            own = [case for case in cases if case.system == system]
            said = paper.TABLE_3.get(_PLAIN.get(system, system))
            rows.append([
                f"`{system}`", *([f"{number:,.1f}" for number in said] if said else [""] * 3),
                self._values(own, mean_ms), self._values(own, lambda one: one.p50_ms), self._values(own, p98_ms),
                self._values(own, late, 2),
            ])  # fmt: skip
        columns = ("system", "paper: mean, ms", "p50, ms", "p98, ms", "here: mean, ms", "p50, ms", "p98, ms", "late, %")
        return f"{texts.table_3(cases)}\n{table(columns, rows)}\n{self._by_load(cases, (8,))}"

    def table_4(self) -> str:
        rows, by_latency = [], []
        for devices in tables.TRACES_4:
            cases = list(tables.of_trace_4(devices))
            for system in tables.DISPATCHES_4:
                own = [case for case in cases if case.system == system]
                said = TABLE_4[devices][_PLAIN.get(system, system)]
                rows.append([
                    str(devices), f"`{system}`", *(f"{number:,.1f}" for number in said), self._values(own, mean_ms),
                    self._values(own, p98_ms), self._values(own, late, 2),
                ])  # fmt: skip
                each = [[case for case in own if case.profile.longest_ms == one] for one in _latencies(cases)]
                by_latency.append([str(devices), f"`{system}`", *(self._mean_and_p98(some) for some in each)])
        columns = ("GPUs", "system", "paper: mean, ms", "p98, ms", "here: mean, ms", "p98, ms", "late, %")
        names = ("GPUs", "mean; p98, ms, where 512 tokens take", *(f"{one.longest_ms:g} ms" for one in tables.LARGE))
        return f"{texts.table_4()}\n{table(columns, rows)}\n{table(names, by_latency)}"

    def _mean_and_p98(self, cases: Sequence[Case]) -> str:
        return f"{self._values(cases, mean_ms)}; {self._values(cases, p98_ms)}"

    def table_2(self) -> str:
        found = {(each.devices, each.runtimes): each.seconds for each in self._solving()}
        rows = []
        for size, said in paper.TABLE_2.items():
            seconds = found.get(size)
            here = (
                [f"{sum(seconds) / len(seconds):.4f}", f"{min(seconds):.4f} to {max(seconds):.4f}"] if seconds else []
            )
            rows.append([f"{size[0]:,}", str(size[1]), str(said), *here])
        return f"{texts.TABLE_2}\n{table(('GPUs', 'runtimes', 'paper, s', 'here, s', 'of the 20'), rows)}"

    def _solving(self) -> Sequence[SolvingTime]:
        return self._records.measured.solving if self._records.measured is not None else ()

    def figure_9(self) -> str:
        measured = self._records.measured
        every = measured.dispatching if measured is not None else []
        peeked = sorted({each.peeked for each in every})
        milliseconds = {(each.instances, each.peeked): each.ms for each in every}
        rows = [
            [
                f"{instances:,}", f"{2 * instances:,}",
                *(f"{milliseconds[instances, number]:.2f}" for number in peeked),
            ]
            for instances in sorted({each.instances for each in every})
        ]  # fmt: skip
        return (
            f"{texts.FIGURE_9}\n{table(('instances', 'requests', *(f'L = {number}, ms' for number in peeked)), rows)}"
        )

    def padding(self) -> str:
        """How much less than ST's Arlo's mean is where no request waits."""
        rows = []
        for name, make in summary.FIGURES.items():
            profile = make()[0].profile
            ideal_ms = 1000 * profile.mean_s(tables.lengths_of_trace(), 8) + texts.OVERHEAD_MS
            shortest_ms = 1000 * profile.static_s(64) + texts.OVERHEAD_MS
            longest_ms = profile.longest_ms + texts.OVERHEAD_MS
            less_by = [f"{100 * (1 - ms / longest_ms):.1f}" for ms in (ideal_ms, shortest_ms)]
            rows.append([name, f"{profile.longest_ms:g}", f"{paper.MEAN_LESS[name][ST_]:.1f}", *less_by])
        columns = (
            "Figure",
            "512 tokens, ms",
            "paper, %",
            "each in its ideal runtime, %",
            "all in the runtime of 64, %",
        )
        return f"{texts.PADDING}\n{table(columns, rows)}"

    def still(self) -> str:
        """Lengths that drift and lengths that do not."""
        rows = []
        for name, make in summary.FIGURES.items():
            cases = [case for case in make() if case.workload.seed == settings.SEEDS[0]]
            for system in tables.STILL:
                own = [case for case in cases if case.system == system]
                calm = [replace(case, workload=replace(case.workload, drift=0.0)) for case in own]
                rows.append([name, f"`{system}`", *(self._values(some, mean_ms, 2) for some in (own, calm)),
                             *(self._values(some, p98_ms) for some in (own, calm))])  # fmt: skip
        columns = ("Figure", "system", "mean, ms", "without drift", "p98, ms", "without drift")
        return f"{texts.still()}\n{table(columns, rows)}"

    def overhead(self) -> str:
        """The overhead of a request beside computing, or as a part of it."""
        cases = [case for case in tables.figure_6a() if case.workload.seed == settings.SEEDS[0]]
        busy = [replace(case, occupies=True) for case in cases]
        rows = [
            [
                f"`{system}`",
                *(self._values([case for case in some if case.system == system], mean_ms, 2) for some in (cases, busy)),
                *(self._less(some, ARLO, system, mean_ms) for some in (cases, busy)),
            ]
            for system in tables.MAIN
        ]  # fmt: skip
        columns = ("Figure 6a", "mean, ms", "device busy", "Arlo's is less by, %", "device busy")
        return f"{texts.overhead()}\n{table(columns, rows)}"


def _of_load(case: Case) -> tuple[str, int, float]:
    return case.system, case.runtimes, case.workload.rate


def _latencies(cases: Sequence[Case]) -> list[float]:
    return sorted({case.profile.longest_ms for case in cases})
