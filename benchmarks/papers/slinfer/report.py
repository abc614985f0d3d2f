"""Write `docs/reproduction/slinfer.md`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import msgspec

from benchmarks.papers.common import Store, table, wrapped_text
from benchmarks.papers.slinfer import authors, tables
from benchmarks.papers.slinfer.cases import BASELINES, SLINFER, SLLM, SLLM_C, SLLM_CS, SLLM_CS_STATIC, Case, Result
from benchmarks.papers.slinfer.measures import TTFT_POINTS_S
from benchmarks.papers.slinfer.tables import (
    BAR_FACTOR,
    BAR_GPUS,
    BAR_POINTS,
    BAR_RUN_S,
    LOADS,
    MET,
    MORE_MET,
    NODES_USED,
    RESIZING,
    SEVEN,
    SHORT,
    SIZES,
    SMALL,
)
from benchmarks.papers.slinfer.worlds import CPU, GPU

MISSING = "–"
Of = Callable[[Case], Result | None]
READINGS: tuple[Callable[[Result], float], ...] = (
    lambda one: 100 * one.measures.met_strict,
    lambda one: 100 * one.measures.met_mean,
)
"""Percent of requests that met their objectives by the strict and the mean definition."""
PAPERS_SYSTEMS = {SLLM_CS_STATIC: SLLM_CS}
"""System of the paper, for systems here that are variants."""


class Verdict(msgspec.Struct, frozen=True):
    """`miss`: reason for a missed bar; empty = met, None = not run."""

    bar: str
    paper: str
    here: str
    miss: str | None

    @property
    def said(self) -> str:
        return f"{self.here} ({'not all run' if self.miss is None else self.miss or 'inside'})"

    @property
    def row(self) -> list[str]:
        said = "not run" if self.miss is None else f"**no**: {self.miss}" if self.miss else "yes"
        return [self.bar, self.paper, self.here, said]


def verdicts(of: Of) -> list[Verdict]:
    table_3 = [_table_3(of, *each) for each in product((SLINFER, SLLM_CS, SLLM_CS_STATIC), LOADS)]
    gains = [_gain(of, system, program=False) for system in BASELINES]
    in_program = [_gain(of, system, program=True) for system in tables.PROGRAM_SYSTEMS[:-1]]
    return [*in_program, *gains, *table_3, *(_resizing(of, watermark) for watermark in RESIZING), _speed(of)]


def nodes_used(result: Result | None, kind: str) -> float:
    use = result.measures.kinds.get(kind) if result is not None else None
    return use.nodes if use is not None else 0.0


def interval(low: float, high: float) -> str:
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"


def gain_percent(ours: Result | None, theirs: Result | None) -> tuple[float, float] | None:
    """Return the percent by which a system meets more objectives under both definitions, smaller value first."""
    if ours is None or theirs is None:
        return None
    found = sorted(100 * (each(ours) / max(1e-9, each(theirs)) - 1) for each in readings(ours))
    return found[0], found[-1]


def readings(result: Result) -> tuple[Callable[[Result], float], ...]:
    """Return the definitions of met objectives; the authors' program has only the mean definition."""
    return READINGS[1:] if result.case.program else READINGS


def off_table_3(result: Result, said: Mapping[str, float | None], *, met: float | None) -> list[str]:
    """Return differences from the paper that exceed the bar under both definitions."""
    points: list[str] = []
    if met is not None:
        low, high = sorted(each(result) for each in READINGS)
        nearest = min((low, high), key=lambda one: abs(one - met))
        if not low <= met <= high and abs(nearest - met) > BAR_POINTS:
            points.append(f"{nearest - met:+.1f} points")

    def nodes(kind: str) -> list[str]:
        wanted, used = said.get(kind), nodes_used(result, kind)
        is_off = wanted is not None and abs(used - wanted) > BAR_GPUS
        return [f"{used - wanted:+.1f} {kind.upper()}s"] if is_off and wanted is not None else []

    return [*nodes(GPU), *points, *nodes(CPU)]


def _gain(of: Of, system: str, *, program: bool) -> Verdict:
    named = PAPERS_SYSTEMS.get(system, system)
    least, most = MORE_MET[named]
    bar, paper = f"128 models: more objectives met than by `{system}`", f"+{least:.0f} to +{most:.0f} %, over the sizes"
    if program:
        bar = f"128 models, authors' program: more objectives met than by `{named}`"
    case = tables.program_case if program else (lambda name, size: Case(name, 128, (size,)))
    gains = {SHORT[size]: gain_percent(*(of(case(name, size)) for name in (SLINFER, system))) for size in SIZES}
    cells, off = list[str](), list[str]()
    for size, found in gains.items():
        if found is not None:
            low, high = found
            cells.append(f"{size} {_between(low, high)} %")
            off += [f"{size} is below"] * (high < least) + [f"{size} is above"] * (low > most)
    return Verdict(bar, paper, ", ".join(cells) or MISSING, None if None in gains.values() else ", ".join(off))


def _between(low: float, high: float) -> str:
    return f"{low:+.0f}" if f"{low:.0f}" == f"{high:.0f}" else f"{low:+.0f} to {high:+.0f}"


def _table_3(of: Of, system: str, models: int) -> Verdict:
    bar = f"Table III, {models} x 7B, `{system}`: within {BAR_POINTS:.0f} points and {BAR_GPUS} GPUs"
    named = PAPERS_SYSTEMS.get(system, system)
    gpus, met = NODES_USED[SEVEN, models, named, GPU], MET[SEVEN, models, named]
    paper, result = f"{met:.0f} %, {gpus} GPUs", of(Case(system, models, (SEVEN,)))
    if result is None:
        return Verdict(bar, paper, MISSING, None)
    share = interval(*sorted(each(result) for each in READINGS))
    here = f"{share} %, {result.measures.kinds[GPU].nodes:.1f} GPUs"
    return Verdict(bar, paper, here, ", ".join(off_table_3(result, {GPU: gpus}, met=met)))


def _resizing(of: Of, watermark: float) -> Verdict:
    said, bar = RESIZING[watermark], f"Resizing, of an instance's life, watermark {watermark:.0%}: within a factor of 2"
    result = of(Case(SLINFER, 64, settings={"watermark": watermark}))
    found = result.sampled.get(GPU) if result is not None else None
    if found is None:
        return Verdict(bar, f"{said:.1f} %", MISSING, None)
    percent = 100 * found.resizing
    is_met = said / BAR_FACTOR <= percent <= said * BAR_FACTOR
    return Verdict(bar, f"{said:.1f} %", f"{percent:.1f} %", "" if is_met else f"{percent / said:.1f} times as much")


def _speed(of: Of) -> Verdict:
    found = [result for result in (of(Case(SLINFER, 128, (size,))) for size in SIZES) if result is not None]
    bar = f"A run of 128 models: under {BAR_RUN_S:.0f} s of one core"
    if not found:
        return Verdict(bar, "", MISSING, None)
    slowest = max(result.took_s for result in found)
    is_met = slowest < BAR_RUN_S
    return Verdict(
        bar, "", f"{slowest:.0f} s, when it was recorded", "" if is_met else "too slow, or on a busy machine"
    )


PAGE = Path(__file__).with_name("page.template")


def write(records: Store[Case, Result], *, for_s: float = 0.0) -> str:
    of = _Page(records, for_s)
    text = PAGE.read_text().format(
        summary=table(("bar", "paper", "here", "met"), [verdict.row for verdict in verdicts(of.get)]),
        found=of.found(), largest_row=of.largest_row(), fixed=authors.program().fixed, program=of.program(),
        without=of.without(), small=of.small(), figure_22=of.figure_22(),
        table_ii=_table_ii(), figure_25=of.figure_25(), figure_27=of.figure_27(), figure_30=of.figure_30(),
        figure_32=of.figure_32(), figure_35=of.figure_35(), figure_23=of.figure_23(), figure_24=of.figure_24(),
        figure_31=of.figure_31(), resizes=of.resizes(),
    )  # fmt: skip
    return wrapped_text(text)


def met_text(result: Result | None) -> str:
    if result is None:
        return MISSING
    found = sorted(each(result) for each in readings(result))
    return interval(found[0], found[-1])


def shorten_case(case: Case, for_s: float) -> Case:
    return msgspec.structs.replace(case, for_s=for_s) if for_s else case


def _used_nodes_text(result: Result | None, kind: str) -> str:
    return f"{nodes_used(result, kind):.1f}" if result is not None else MISSING


def _table_ii() -> str:
    rows = [
        [f"{kind.upper()}, {SHORT[size]}, {length // 1024}K", str(said), str(tables.concurrency(kind, size, length))]
        for (kind, size, length), said in tables.TABLE_II.items()
    ]
    return table(("instance", "paper", "here"), rows)


class _Page:
    def __init__(self, records: Store[Case, Result], for_s: float) -> None:
        self._records, self._for_s = records, for_s

    def get(self, case: Case) -> Result | None:
        return self._records.get(shorten_case(case, self._for_s))

    def figure_22(self) -> str:
        every = product(SIZES, LOADS, tables.SYSTEMS)
        rows = [self._row_22(*each) for each in every if self.get(Case(each[2], each[1], (each[0],))) is not None]
        columns = (
            "models", "system", "GPUs", "paper", "CPUs", "paper", "met, %", "paper", "within the bar",
            "tokens/s a GPU", "a CPU", "running", "dropped, %", "first token within 0.5, 2, 8 s, %",
        )  # fmt: skip
        return table(columns, rows)

    def _row_22(self, size: str, models: int, system: str) -> list[str]:
        result = self.get(Case(system, models, (size,)))
        assert result is not None
        named, kinds = PAPERS_SYSTEMS.get(system, system), result.measures.kinds
        said = {kind: NODES_USED.get((size, models, named, kind)) for kind in (GPU, CPU)}
        share = MET.get((size, models, named))
        cells = [f"{models} x {SHORT[size]}", f"`{system}`"]
        for kind, number in said.items():
            cells += [_used_nodes_text(result, kind), "" if number is None else f"{number:.1f}"]
        cells += [met_text(result), "" if share is None else f"{share:.0f}", _share_within_text(result, said, share)]
        cells += [f"{kinds[kind].tokens_per_s:.0f}" if kind in kinds else MISSING for kind in (GPU, CPU)]
        cells.append(" / ".join(f"{kinds[kind].running:.1f}" for kind in (GPU, CPU) if kind in kinds) or MISSING)
        within = ", ".join(f"{100 * _first_within(result, point):.0f}" for point in (0.5, 2.0, 8.0))
        return [*cells, f"{100 * result.measures.dropped:.1f}", within]

    def found(self) -> str:
        """Return the findings in the introduction, from the verdicts of ratios and of Table III."""
        parts = []
        for name, program in (("in the authors' program", True), ("read plainly", False)):
            systems = tables.PROGRAM_SYSTEMS[:-1] if program else (SLLM, SLLM_C, SLLM_CS)
            judged = (f"`{PAPERS_SYSTEMS.get(x, x)}` {_gain(self.get, x, program=program).said}" for x in systems)
            parts.append(f"{name}, {'; '.join(judged)}")
        near = [one for models in LOADS if (one := _table_3(self.get, SLINFER, models)).miss is not None]
        bar = f"{BAR_POINTS:.0f} points and {BAR_GPUS} GPUs"
        count = f"{sum(one.miss == '' for one in near)} of {len(near)}"
        said = f"{count} rows of Table III for `slinfer` are within {bar}" if near else "Table III has not been run"
        return f"*Found*, against these ranges: {'. '.join(parts)}. {said}.".replace(". read", ". Read")

    def largest_row(self) -> str:
        """Return the row of the authors' program with the largest effect on the ratio over `sllm+c`, or ""."""
        moved = {row: self._moved(row) for row in authors.ROWS}
        known = {row: points for row, points in moved.items() if points is not None}
        if len(known) < len(moved):
            return ""
        row = max(known, key=lambda each: abs(known[each]))
        points = f"{known[row]:+.0f} points for 7B"
        return f"The row *{row.replace('_', '-')}* moves the ratio over `sllm+c` most, by {points}."

    def _moved(self, row: str) -> float | None:
        whole, without = (
            gain_percent(*(self.get(tables.program_case(system, SEVEN, without=each)) for system in (SLINFER, SLLM_C)))
            for each in ("", row)
        )
        return whole[0] - without[0] if whole is not None and without is not None else None

    def program(self) -> str:
        low_high = [f"+{low:.0f} to +{high:.0f}" for low, high in MORE_MET.values()]
        paper = ["paper", *[""] * len(tables.PROGRAM_SYSTEMS), *low_high]
        return self._in_program("128 x", [*((SHORT[size], size, "") for size in SIZES)], paper)

    def without(self) -> str:
        named = [(f"without *{row.replace('_', '-')}*", SEVEN, row) for row in authors.ROWS]
        return self._in_program("128 x 7B", [("all rows", SEVEN, ""), *named])

    def small(self) -> str:
        """Return text about the 3B ratio over `sllm`, with and without the row *cache*."""
        cases = (SLINFER, ""), (SLLM, ""), (SLLM, "cache")
        ours, theirs, other = (self.get(tables.program_case(system, SMALL, without=row)) for system, row in cases)
        return f"{_gain_text(ours, theirs)} %, and {_gain_text(ours, other)} % if `sllm` has no row *cache*"

    def _in_program(self, first: str, each: list[tuple[str, str, str]], *more: list[str]) -> str:
        rows = []
        for name, size, without in each:
            found = [self.get(tables.program_case(system, size, without=without)) for system in tables.PROGRAM_SYSTEMS]
            *baselines, ours = found
            rows.append([name, *map(met_text, found), *(_gain_text(ours, theirs) for theirs in baselines)])
        names = [f"`{PAPERS_SYSTEMS.get(system, system)}`" for system in tables.PROGRAM_SYSTEMS]
        columns = (first, *(f"{name} met, %" for name in names), *(f"over {name}, %" for name in names[:-1]))
        return table(columns, [*rows, *more])

    def figure_25(self) -> str:
        found = [(case.system, self.get(case)) for case in tables.TABLES["25"]()]
        rows = [
            [
                f"`{system}`", met_text(result), f"{nodes_used(result, GPU):.1f}", f"{gpu.memory_used:.2f}",
                f"{gpu.batch_p50:.0f}", f"{gpu.batch_p95:.0f}", f"{result.measures.kinds[GPU].running:.2f}",
            ]
            for system, result in found if result is not None and (gpu := result.sampled.get(GPU)) is not None
        ]  # fmt: skip
        return table(("system", "met, %", "GPUs", "memory used", "batch p50", "p95", "running on the mean"), rows)

    def figure_27(self) -> str:
        systems, rows = (SLLM, SLLM_C, SLLM_CS, SLINFER), []
        for per_s in tables.BURSTS:
            found = [self.get(tables.burst_case(system, per_s)) for system in systems]
            rows.append(
                [
                    f"{per_s:g}",
                    *(f"{_used_nodes_text(x, GPU)} + {_used_nodes_text(x, CPU)}; {met_text(x)}" for x in found),
                ]
            )
        return table(("requests/s", *(f"`{system}`" for system in systems)), rows)

    def figure_30(self) -> str:
        rows = []
        for system, seconds in product((SLLM_C, SLLM_CS, SLINFER), tables.KEEP_ALIVES_S):
            result = self.get(tables.keep_alive_case(system, seconds))
            within = [MISSING] * 3
            if result is not None:
                within = [f"{100 * _first_within(result, point):.0f}" for point in (0.5, 2.0, 8.0)]
            rows.append([f"`{system}`", f"{seconds:g} s", _used_nodes_text(result, GPU), met_text(result), *within])
        return table(("system", "keep-alive", "GPUs", "met, %", "first token in 0.5 s, %", "2 s", "8 s"), rows)

    def figure_32(self) -> str:
        systems = (SLLM_C, SLLM_CS, SLINFER)
        rows = [
            [f"{nodes.cpus} + {nodes.gpus}", *(met_text(self.get(Case(system, 64, nodes=nodes))) for system in systems)]
            for nodes in tables.NODES_32
        ]
        return table(("CPUs + GPUs", *(f"`{system}`" for system in systems)), rows)

    def figure_35(self) -> str:
        systems, rows = (SLLM_CS, SLINFER), []
        for name in tables.DATASETS:
            found = [self.get(Case(system, 64, ("llama-3.1-8b",), name)) for system in systems]
            rows.append(
                [
                    name,
                    *(
                        cell
                        for one in found
                        for cell in (met_text(one), _used_nodes_text(one, GPU), _used_nodes_text(one, CPU))
                    ),
                ]
            )
        whats = ("met, %", "GPUs", "CPUs")
        return table(("dataset", *(f"`{system}` {what}" for system in systems for what in whats)), rows)

    def figure_23(self) -> str:
        rows = [
            [name, met_text(result), _used_nodes_text(result, GPU), _used_nodes_text(result, CPU)]
            for name, settings in tables.ABLATIONS.items()
            for result in [self.get(Case(SLINFER, 64, settings=settings))]
        ]
        return table(("`slinfer`", "met, %", "GPUs", "CPUs"), rows)

    def figure_24(self) -> str:
        rows = [
            [f"{nodes.cpus} CPUs + {nodes.gpus} GPUs", met_text(self.get(Case(SLINFER, 64, nodes=nodes)))]
            for nodes in tables.NODES_24
        ]
        return table(("nodes", "met, %"), rows)

    def figure_31(self) -> str:
        rows = []
        for watermark in tables.WATERMARKS:
            result = self.get(Case(SLINFER, 64, settings={"watermark": watermark}))
            gpu = result.sampled.get(GPU) if result is not None else None
            cells = [MISSING] * 4
            if result is not None and gpu is not None:
                moved = f"{100 * result.measures.moved:.2f}"
                cells = [f"{100 * gpu.resizing:.1f}", f"{100 * gpu.cache_used:.0f}", moved, met_text(result)]
            rows.append([f"{watermark:.0%}", *cells])
        return table(("watermark", "resizing, % of samples", "cache used, %", "moved, %", "met, %"), rows)

    def resizes(self) -> str:
        rows = []
        for seconds, longest in tables.RESIZE_READINGS:
            found = [self.get(tables.resize_case(watermark, seconds, longest)) for watermark in RESIZING]
            gpus = [result.sampled.get(GPU) if result is not None else None for result in found]
            shares = [100 * gpu.resizing if gpu is not None else None for gpu in gpus]
            both = all(
                share is not None and said / BAR_FACTOR <= share <= said * BAR_FACTOR
                for share, said in zip(shares, RESIZING.values(), strict=True)
            )
            cells = [MISSING if share is None else f"{share:.1f}" for share in shares]
            rows.append([f"{seconds} s", f"{longest:,}", *cells, "yes" if both else "no"])
        marks = [f"resizing at {watermark:.0%}, % of samples" for watermark in RESIZING]
        return table(("a GB of a new cache takes", "smallest cache, tokens", *marks, "both within a factor of 2"), rows)


def _share_within_text(result: Result, said: dict[str, float | None], share: float | None) -> str:
    if share is None and all(each is None for each in said.values()):
        return ""
    off = off_table_3(result, said, met=share)
    return f"**no**: {', '.join(off)}" if off else "yes"


def _gain_text(ours: Result | None, theirs: Result | None) -> str:
    found = gain_percent(ours, theirs)
    return MISSING if found is None else _between(*found)


def _first_within(result: Result, point_s: float) -> float:
    return result.measures.ttft[TTFT_POINTS_S.index(point_s)]
