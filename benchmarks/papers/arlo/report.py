"""`docs/reproduction/arlo.md`: the paper's numbers beside ours, from the records alone."""

from __future__ import annotations

from benchmarks.papers.arlo import experiments, paper, summary, tables, texts
from benchmarks.papers.arlo.intervals import mean_ms, p98_ms
from benchmarks.papers.arlo.records import Records
from benchmarks.papers.arlo.tables import NAMED, PLAIN, Cells, late, latencies_of, of_latency, table


def write(records: Records) -> str:
    cells, measured = Cells(records.get), records.measured
    parts = (
        texts.head(), _summary(records), texts.readings(), experiments.example(), _figure(cells, "6a"),
        _figure(cells, "6b"), _figure_7(cells), _figure_8(cells), _figure(cells, "10a"), _figure(cells, "10b"),
        _figure_11(cells), experiments.table_2(measured), _table_3(cells), _table_4(cells),
        experiments.figure_9(measured), experiments.deployed(records.deployed), texts.EXPLAINED,
        experiments.padding(), experiments.against_st(cells),
        experiments.still(cells),
        experiments.overhead(cells), experiments.lower_loads(cells), experiments.table_4_apart(cells),
        texts.open_points(),
    )  # fmt: skip
    return texts.filled("\n".join(parts))


def _summary(records: Records) -> str:
    rows = [verdict.row for verdict in summary.verdicts(records)]
    return f"{texts.SUMMARY}\n{table(summary.COLUMNS, rows)}"


def _figure(cells: Cells, name: str) -> str:
    cases = summary.FIGURES[name]()
    rows = []
    for system in tables.MAIN:
        own = [case for case in cases if case.system == system]
        said = paper.MEAN_LESS[name].get(NAMED.get(system, ""))
        means, tails = ([cells.less(cases, ours, system, what) for ours in tables.ARLOS] for what in (mean_ms, p98_ms))
        rows.append([
            f"`{system}`", cells.values(own, mean_ms, 2), cells.values(own, p98_ms), cells.values(own, late, 2),
            f"{said:.1f}" if said else "", *means, *tails,
        ])  # fmt: skip
    columns = (
        "system", "mean, ms", "p98, ms", "late, %", "paper: Arlo's mean is less by, %", "`arlo`", "within capacity",
        "p98 is less by, %: `arlo`", "within capacity",
    )  # fmt: skip
    text = f"{texts.figure(name, cases)}\n{table(columns, rows)}"
    return f"{text}\n{cells.by_latency(cases)}" if len(latencies_of(cases)) > 1 else text


def _figure_7(cells: Cells) -> str:
    cases = tables.figure_7()
    rows = []
    for system in tables.MAIN:
        own = [[case for case in cases if (case.system, case.workload.rate) == (system, r)] for r in tables.RATES_7]
        rows.append([f"`{system}`", *(cells.values(some, mean_ms) for some in own)])
    columns = ("mean, ms, at requests/s", *(f"{rate:,.0f}" for rate in tables.RATES_7))
    return f"{texts.figure_7(cases)}\n{table(columns, rows)}"


def _figure_8(cells: Cells) -> str:
    cases = tables.figure_8()
    rows = []
    for system in tables.MAIN:
        said = paper.FIGURE_8[NAMED.get(system, "Arlo")]
        row = [f"`{system}`", f"{said[0]:.2f}", f"{said[1]:.0f}"]
        for least in tables.LEAST_8:
            own = [case for case in cases if (case.system, case.least) == (system, least)]
            row += [cells.values(own, lambda one: one.devices, 2), cells.values(own, p98_ms, 0)]
        rows.append(row)
    kept = [f"{what}, at least {least}" for least in tables.LEAST_8 for what in ("GPUs", "p98, ms")]
    return f"{texts.figure_8(cases)}\n{table(('system', 'paper: GPUs', 'p98, ms', *kept), rows)}"


def _figure_11(cells: Cells) -> str:
    cases = tables.figure_11()
    rows = []
    for count in tables.COUNTS_11:
        said, late_said = paper.FIGURE_11.get(count), paper.FIGURE_11_LATE.get(count)
        row = [str(count), *(f"{number:.2f}" for number in said or ()), *([""] * 2 if said is None else [])]
        row.append("" if late_said is None else f"{late_said:.1f}")
        for system in tables.ARLOS:
            own = [case for case in cases if (case.runtimes, case.system) == (count, system)]
            row += [cells.values(own, mean_ms), cells.values(own, p98_ms), cells.values(own, late, 2)]
        rows.append(row)
    columns = (
        "runtimes", "paper: mean, ms", "p98, ms", "late, %", "`arlo`: mean, ms", "p98, ms", "late, %",
        "within capacity: mean, ms", "p98, ms", "late, %",
    )  # fmt: skip
    return f"{texts.figure_11(cases)}\n{table(columns, rows)}\n{cells.by_load(cases)}"


def _table_3(cells: Cells) -> str:
    cases = tables.table_3()
    rows = []
    for system in tables.ALLOCATIONS_3:
        own = [case for case in cases if case.system == system]
        rows.append([
            f"`{system}`", *(f"{number:,.1f}" for number in paper.TABLE_3[PLAIN.get(system, system)]),
            cells.values(own, mean_ms), cells.values(own, lambda one: one.p50_ms), cells.values(own, p98_ms),
            cells.values(own, late, 2),
        ])  # fmt: skip
    columns = ("system", "paper: mean, ms", "p50, ms", "p98, ms", "here: mean, ms", "p50, ms", "p98, ms", "late, %")
    return f"{texts.table_3(cases)}\n{table(columns, rows)}\n{cells.by_load(cases)}"


def _table_4(cells: Cells) -> str:
    rows, by_latency = [], []
    for devices in tables.TRACES_4:
        cases = list(tables.of_trace_4(devices))
        for system in tables.DISPATCHES_4:
            own = [case for case in cases if case.system == system]
            said = paper.TABLE_4[devices][PLAIN.get(system, system)]
            rows.append([
                f"{devices:,}", f"`{system}`", *(f"{number:,.1f}" for number in said), cells.values(own, mean_ms),
                cells.values(own, p98_ms), cells.values(own, late, 2),
            ])  # fmt: skip
            apart = (cells.mean_and_p98(of_latency(cases, system, longest)) for longest in latencies_of(cases))
            by_latency.append([f"{devices:,}", f"`{system}`", *apart])
    columns = ("GPUs", "system", "paper: mean, ms", "p98, ms", "here: mean, ms", "p98, ms", "late, %")
    names = ("GPUs", "mean; p98, ms, where 512 tokens take", *(f"{one.longest_ms:g} ms" for one in tables.LARGE))
    return f"{texts.table_4()}\n{table(columns, rows)}\n{table(names, by_latency)}"
