"""Write `docs/reproduction/arlo.md`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.papers.arlo import measured, settings, summary, tables, workload
from benchmarks.papers.arlo.cases import ARLO, ARLO_IG, ARLO_ILB, ST, Case, within_capacity
from benchmarks.papers.arlo.dispatch import dispatch_outcome, strategies
from benchmarks.papers.arlo.measured import LIGHT, Deployed, Measured, Records
from benchmarks.papers.arlo.summary import (
    MISSING,
    NAMED,
    PLAIN,
    Cells,
    cases_of_latency,
    interval_text,
    late_percent,
    latencies_of,
    mean_ms,
    p98_ms,
    reduction_percent,
)
from benchmarks.papers.arlo.workload import LatencyProfile, read_lengths
from benchmarks.papers.common import table, wrapped_text
from stoker.manager.policies.arlo import dispatch

PAGE = Path(__file__).with_name("page.template")
OVERHEAD_MS = 1000 * settings.OVERHEAD_S


def write(records: Records) -> str:
    cells, found = Cells(records.get), records.measured
    figures = {name: tables.TABLES[name]() for name in tables.TABLES}
    values: dict[str, Any] = {
        "settings": settings, "measured": measured, "workload": workload, "queues": dispatch,
        **_facts(), **{f"workload_{name}": _requests(cases) for name, cases in figures.items() if cases},
        "workload_lower_loads": _requests(tables.lower_loads()),
        "summary": table(summary.COLUMNS, [verdict.row for verdict in summary.verdicts(records)]),
        **{f"figure_{name}": _latency_table(cells, name) for name in tables.FIXED},
        "figure_4": _figure_4_table(), "figure_7": _figure_7_table(cells), "figure_8": _figure_8_table(cells),
        "figure_9": figure_9(found), "figure_11": _figure_11_table(cells), "table_2": table_2(found),
        "table_3": _table_3(cells), "table_4": _table_4(cells), "deployed": session_table(records.deployed),
        "padding": padding_table(), "against_st": st_table(cells), "still": drift_table(cells),
        "overhead": overhead_table(cells),
        "lower": cells.by_load(tables.lower_loads(), tables.LOWER_LOADS), "table_4_apart": table_4_apart(cells),
        "random": random_dispatch(cells), "rated": rated_seconds(cells), **_contradiction(cells),
    }  # fmt: skip
    return wrapped_text(PAGE.read_text().format(**values))


def _facts() -> dict[str, Any]:
    case, one_ms = tables.FIXED["6b"]()[0], LatencyProfile("large", 1.0).mean_s(tables.lengths_of_trace(), 8)
    arlo_ms = [devices / rate / one_ms for devices, (rate, _, _) in tables.TRACES_4.items()]
    between_s = settings.BURST_S + settings.CALM_S - settings.BURST_S * settings.BURST_RATE
    traces = [
        f"- {devices:,} GPUs: {rate:,.0f} requests/s for {for_s:.0f} s, seeds {', '.join(map(str, seeds))}"
        for devices, (rate, for_s, seeds) in tables.TRACES_4.items()
    ]
    table_3 = "; ".join(f"`{name}` {mean:,.1f}; {p98:,.1f}" for name, (mean, _, p98) in tables.TABLE_3.items())
    return {
        "tables": ", ".join(f"`{name}`" for name in tables.TABLES),
        "grid": ", ".join(f"{each:g}" for each in settings.LARGE_MS),
        "loads": ", ".join(f"{each:.0%}" for each in settings.UTILIZATIONS),
        "most_busy": settings.UTILIZATIONS[-1],
        "longest_ms": settings.LARGE_MS[-1],
        "st_ms": 1000 * case.devices / case.workload.rate,
        "arlo_least_ms": min(arlo_ms),
        "arlo_most_ms": max(arlo_ms),
        "calm": between_s / settings.CALM_S,
        "tweets": sum(map(len, read_lengths())),
        "seeds": ", ".join(map(str, settings.SEEDS)),
        "fresh_seeds": ", ".join(map(str, settings.FRESH_SEEDS)),
        "overhead_ms": OVERHEAD_MS,
        "traces_4": "\n".join(traces),
        "rates": " and ".join(f"{rate:,.0f} requests/s for {for_s:.0f} s" for rate, for_s in measured.ENDS_S.items()),
        "said": f"Paper, mean and 98th percentile in milliseconds: {table_3}.",
    }


def _requests(cases: Sequence[Case]) -> str:
    rates = sorted({case.workload.rate for case in cases})
    rate = f"{rates[0]:,.0f}" if len(rates) == 1 else f"{rates[0]:,.0f} to {rates[-1]:,.0f}"
    seeds = sorted({case.workload.seed for case in cases})
    shortest = min(case.workload.for_s for case in cases)
    return (
        f"Twitter-{cases[0].workload.pattern.capitalize()}, {rate} requests/s for {shortest:.0f} s,"
        f" {cases[0].devices:,} GPUs, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}."
    )


def _figure_4_table() -> str:
    outcomes = [(name, dispatch_outcome(dispatcher)) for name, dispatcher in strategies()]
    rows = [[name, *map(str, found.first), str(found.late)] for name, found in outcomes]
    return table(("of the first eight to", "GPU0", "GPU1", "GPU2", "GPU3", "late"), rows)


def _latency_table(cells: Cells, name: str) -> str:
    cases = tables.FIXED[name]()
    rows = []
    for system in tables.MAIN:
        own = [case for case in cases if case.system == system]
        said = tables.MEAN_LESS[name].get(NAMED.get(system, ""))
        means, tails = ([cells.less(cases, ours, system, what) for ours in tables.ARLOS] for what in (mean_ms, p98_ms))
        rows.append([
            f"`{system}`", cells.values(own, mean_ms, 2), cells.values(own, p98_ms), cells.values(own, late_percent, 2),
            f"{said:.1f}" if said else "", *means, *tails,
        ])  # fmt: skip
    columns = (
        "system", "mean, ms", "p98, ms", "late, %", "paper: Arlo's mean is less by, %", "`arlo`", "within capacity",
        "p98 is less by, %: `arlo`", "within capacity",
    )  # fmt: skip
    text = table(columns, rows)
    return f"{text}\n{cells.by_latency(cases)}" if len(latencies_of(cases)) > 1 else text


def _figure_7_table(cells: Cells) -> str:
    cases = tables.TABLES["7"]()
    rows = []
    for system in tables.MAIN:
        own = [[case for case in cases if (case.system, case.workload.rate) == (system, r)] for r in tables.RATES_7]
        rows.append([f"`{system}`", *(cells.values(some, mean_ms) for some in own)])
    columns = ("mean, ms, at requests/s", *(f"{rate:,.0f}" for rate in tables.RATES_7))
    return table(columns, rows)


def _figure_8_table(cells: Cells) -> str:
    cases = tables.TABLES["8"]()
    rows = []
    for system in tables.MAIN:
        said = tables.FIGURE_8[NAMED.get(system, "Arlo")]
        row = [f"`{system}`", f"{said[0]:.2f}", f"{said[1]:.0f}"]
        for least in tables.LEAST_8:
            own = [case for case in cases if (case.system, case.least) == (system, least)]
            row += [cells.values(own, lambda one: one.devices, 2), cells.values(own, p98_ms, 0)]
        rows.append(row)
    kept = [f"{what}, at least {least}" for least in tables.LEAST_8 for what in ("GPUs", "p98, ms")]
    return table(("system", "paper: GPUs", "p98, ms", *kept), rows)


def _figure_11_table(cells: Cells) -> str:
    cases = tables.TABLES["11"]()
    rows = []
    for count in tables.COUNTS_11:
        said, late_said = tables.FIGURE_11.get(count), tables.FIGURE_11_LATE.get(count)
        row = [str(count), *(f"{number:.2f}" for number in said or ()), *([""] * 2 if said is None else [])]
        row.append("" if late_said is None else f"{late_said:.1f}")
        for system in tables.ARLOS:
            own = [case for case in cases if (case.runtimes, case.system) == (count, system)]
            row += [cells.values(own, mean_ms), cells.values(own, p98_ms), cells.values(own, late_percent, 2)]
        rows.append(row)
    columns = (
        "runtimes", "paper: mean, ms", "p98, ms", "late, %", "`arlo`: mean, ms", "p98, ms", "late, %",
        "within capacity: mean, ms", "p98, ms", "late, %",
    )  # fmt: skip
    return f"{table(columns, rows)}\n{cells.by_load(cases)}"


def _table_3(cells: Cells) -> str:
    cases = tables.TABLES["3"]()
    rows = []
    for system in tables.ALLOCATIONS_3:
        own = [case for case in cases if case.system == system]
        rows.append([
            f"`{system}`", *(f"{number:,.1f}" for number in tables.TABLE_3[PLAIN.get(system, system)]),
            cells.values(own, mean_ms), cells.values(own, lambda one: one.p50_ms), cells.values(own, p98_ms),
            cells.values(own, late_percent, 2),
        ])  # fmt: skip
    columns = ("system", "paper: mean, ms", "p50, ms", "p98, ms", "here: mean, ms", "p50, ms", "p98, ms", "late, %")
    return f"{table(columns, rows)}\n{cells.by_load(cases)}"


def _table_4(cells: Cells) -> str:
    rows, by_latency = [], []
    for devices in tables.TRACES_4:
        cases = tables.of_trace_4(devices)
        for system in tables.DISPATCHES_4:
            own = [case for case in cases if case.system == system]
            said = tables.TABLE_4[devices][PLAIN.get(system, system)]
            rows.append([
                f"{devices:,}", f"`{system}`", *(f"{number:,.1f}" for number in said), cells.values(own, mean_ms),
                cells.values(own, p98_ms), cells.values(own, late_percent, 2),
            ])  # fmt: skip
            apart = (cells.mean_and_p98(cases_of_latency(cases, system, longest)) for longest in latencies_of(cases))
            by_latency.append([f"{devices:,}", f"`{system}`", *apart])
    columns = ("GPUs", "system", "paper: mean, ms", "p98, ms", "here: mean, ms", "p98, ms", "late, %")
    names = ("GPUs", "mean; p98, ms, where 512 tokens take", *(f"{one.longest_ms:g} ms" for one in tables.LARGE))
    return f"{table(columns, rows)}\n{table(names, by_latency)}"


def table_2(measured: Measured | None) -> str:
    rows = []
    for each in measured.solving if measured is not None else ():
        said = tables.TABLE_2[each.devices, each.runtimes]
        light, heavy = (
            [seconds for seconds, load in zip(each.seconds, each.loads, strict=True) if (load < LIGHT) == is_light]
            for is_light in (True, False)
        )
        apart = (
            (f"{sum(seconds) / len(seconds):.4f}; {max(seconds):.4f}" if seconds else MISSING)
            for seconds in (each.seconds, light, heavy)
        )
        rows.append([f"{each.devices:,}", str(each.runtimes), str(said), *apart])
    columns = ("GPUs", "runtimes", "paper, s", "here: mean; most, s", f"below {LIGHT:.0%} load", "from there on")
    return table(columns, rows)


def figure_9(measured: Measured | None) -> str:
    every = measured.dispatching if measured is not None else []
    peeked = sorted({each.peeked for each in every})
    spent = {(each.instances, each.peeked): each.ms for each in every}
    rows = [
        [f"{instances:,}", f"{requests:,}", *(f"{spent[instances, number]:.2f}" for number in peeked)]
        for instances, requests in sorted({(each.instances, each.requests) for each in every})
    ]
    columns = ("instances", "requests", *(f"L = {number}, ms" for number in peeked))
    return table(columns, rows)


def session_table(found: Sequence[Deployed]) -> str:
    rows = [
        [
            f"{each.rate:,.0f}", str(each.seed), f"{each.requests:,}", f"{each.mean_ms:.2f}",
            f"{each.model.mean_ms:.2f}", f"{each.p98_ms:.1f}", f"{each.model.p98_ms:.1f}", f"{100 * each.late:.2f}",
        ]
        for each in found
    ]  # fmt: skip
    columns = ("requests/s", "seed", "requests", "mean, ms: session", "model", "p98, ms: session", "model", "late, %")
    return table(columns, rows)


def padding_table() -> str:
    rows = []
    for name, make in tables.FIXED.items():
        profile = make()[0].profile
        ideal_ms = 1000 * profile.mean_s(tables.lengths_of_trace(), 8) + OVERHEAD_MS
        shortest_ms = 1000 * profile.static_s(64) + OVERHEAD_MS
        longest_ms = profile.longest_ms + OVERHEAD_MS
        less_by = [f"{100 * (1 - ms / longest_ms):.1f}" for ms in (ideal_ms, shortest_ms)]
        rows.append([name, f"{profile.longest_ms:g}", f"{tables.MEAN_LESS[name][tables.ST_]:.1f}", *less_by])
    columns = ("Figure", "512 tokens, ms", "paper, %", "each in its ideal runtime, %", "all in that of 64, %")
    return table(columns, rows)


def st_table(cells: Cells) -> str:
    rows = []
    for case in tables.against_st():
        if case.system == ST:
            name = "6b" if case.devices == 10 else "10b"
            both = [case, replace(case, system=ARLO)]
            means = [cells.values([one], mean_ms, 2) for one in both]
            rows.append([
                name, f"{case.profile.longest_ms:g}", f"{case.workload.for_s:.0f}", *means,
                cells.less(both, ARLO, ST, mean_ms), f"{tables.MEAN_LESS[name][tables.ST_]:.1f}",
            ])  # fmt: skip
    columns = ("Figure", "512 tokens, ms", "trace, s", "`st`: mean, ms", "`arlo`", "less by, %", "paper")
    return table(columns, rows)


def drift_table(cells: Cells) -> str:
    rows = []
    for name, make in tables.FIXED.items():
        for system in tables.STILL:
            own = [case for case in make() if (case.workload.seed, case.system) == (settings.SEEDS[0], system)]
            both = own, [replace(case, workload=replace(case.workload, drift=0.0)) for case in own]
            means, tails = ([cells.values(some, what, 2) for some in both] for what in (mean_ms, p98_ms))
            rows.append([name, f"`{system}`", *means, *tails])
    columns = ("Figure", "system", "mean, ms", "without drift", "p98, ms", "without drift")
    return table(columns, rows)


def overhead_table(cells: Cells) -> str:
    cases = [case for case in tables.TABLES["6a"]() if case.workload.seed == settings.SEEDS[0]]
    both: list[list[Case]] = [cases, [replace(case, occupies=True) for case in cases]]
    rows = []
    for system in tables.MAIN:
        means = [cells.values([case for case in some if case.system == system], mean_ms, 2) for some in both]
        rows.append([f"`{system}`", *means, *(cells.less(some, ARLO, system, mean_ms) for some in both)])
    columns = ("Figure 6a", "mean, ms", "device busy", "Arlo's is less by, %", "device busy")
    return table(columns, rows)


def table_4_apart(cells: Cells) -> str:
    rows = []
    for name in tables.APART_4:
        cases = tables.apart_4(name)
        for longest in latencies_of(cases):
            own = [case for case in cases if case.profile.longest_ms == longest]
            rows.append([name, f"{longest:g} ms", *_dispatches(cells, own)])
    return table(("25 GPUs; mean; p98, ms", "512 tokens", "ILB", "IG", "RS"), rows)


def rated_seconds(cells: Cells) -> str:
    waves = {f"wave of {s:.0f} s": tables.rated_seconds(pattern) for pattern, s in settings.RATED_SECONDS_S.items()}
    rows = []
    for name, cases in waves.items():
        for longest in latencies_of(cases):
            own = [case for case in cases if case.profile.longest_ms == longest]
            below = []
            for theirs in map(within_capacity, (ARLO_ILB, ARLO_IG)):
                both = (
                    reduction_percent(cells.of, own, within_capacity(ARLO), (theirs,), what)
                    for what in (mean_ms, p98_ms)
                )
                below.append("; ".join(map(interval_text, both)))
            rows.append([name, f"{longest:g} ms", *_dispatches(cells, own), *below])
    columns = ("ILB", "IG", "RS", "RS below ILB by, %", "RS below IG by, %")
    return table(("25 GPUs; mean; p98, ms", "512 tokens", *columns), rows)


def _dispatches(cells: Cells, cases: Sequence[Case]) -> list[str]:
    systems = dict.fromkeys(case.system for case in cases)
    return [cells.mean_and_p98([case for case in cases if case.system == system]) for system in systems]


def random_dispatch(cells: Cells) -> str:
    rows = []
    for figure in tables.RANDOM_FIGURES:
        cases = tables.random_dispatch(figure)
        for system in tables.RANDOM:
            own = [case for case in cases if case.system == system]
            said = tables.MEAN_LESS[figure].get(tables.RANDOM_OF.get(system, ""))
            row = [figure, f"`{system}`", cells.values(own, mean_ms, 2), cells.values(own, p98_ms), f"{said or ''}"]
            for what in (mean_ms, p98_ms):
                found = (reduction_percent(cells.of, cases, ours, (system,), what) for ours in tables.ARLOS)
                row += [interval_text(each) if said else "" for each in found]
            rows.append(row)
    columns = (
        "Figure", "system", "mean, ms", "p98, ms", "paper: Arlo's mean is less by, %", "`arlo`", "within capacity",
        "p98 is less by, %: `arlo`", "within capacity",
    )  # fmt: skip
    return table(columns, rows)


def _contradiction(cells: Cells) -> dict[str, str]:
    """Return the mean of RS in the traces of Table 4, by devices and latency."""
    system = within_capacity(ARLO)
    return {
        f"rs_{devices}_{longest:g}": cells.values(
            cases_of_latency(tables.of_trace_4(devices), system, longest), mean_ms
        )
        for devices in tables.TRACES_4 for longest in settings.LARGE_MS
    }  # fmt: skip
