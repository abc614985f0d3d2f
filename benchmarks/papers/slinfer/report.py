"""Write `docs/reproduction/slinfer.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path

import msgspec

from benchmarks.papers.common import MISSING, Store, page
from benchmarks.papers.slinfer import authors, tables
from benchmarks.papers.slinfer.cases import BASELINES, SLINFER, SLLM, SLLM_C, SLLM_CS, SLLM_CS_STATIC, Case, Result
from benchmarks.papers.slinfer.measures import TTFT_POINTS_S
from benchmarks.papers.slinfer.tables import BAR_FACTOR, BAR_GPUS, BAR_POINTS, LOADS, RESIZING, SEVEN, SHORT, SIZES
from benchmarks.papers.slinfer.worlds import CPU, GPU

Of = Callable[[Case], Result | None]
Rows = Iterator[list[str]]
READINGS: tuple[Callable[[Result], float], ...] = (
    lambda one: 100 * one.measures.met_strict,
    lambda one: 100 * one.measures.met_mean,
)
"""Percent of requests that met their objectives by the strict and the mean definition."""
PAPERS_SYSTEMS = {SLLM_CS_STATIC: SLLM_CS}
"""For systems here that are variants: the system of the paper."""
PAGE = Path(__file__).with_name("page.template")


def write(records: Store[Case, Result], *, for_s: float = 0.0) -> str:
    def of(case: Case) -> Result | None:
        return records.get(shorten_case(case, for_s))

    rows = [(f"without *{row.replace('_', '-')}*", SEVEN, row) for row in authors.ROWS]
    low_high = [f"+{low:.0f} to +{high:.0f}" for low, high in tables.MORE_MET.values()]
    return page(
        PAGE, summary=(verdict.row for verdict in verdicts(of)), found=findings(of), largest_row=largest_row(of),
        fixed=authors.program()["fixed"], small=small_text(of),
        program=program_rows(of, ((SHORT[size], size, "") for size in SIZES)),
        program_paper=" | ".join(["paper", *[""] * len(tables.PROGRAM_SYSTEMS), *low_high]),
        without=program_rows(of, [("all rows", SEVEN, ""), *rows]), figure_22=figure_22(of), figure_23=figure_23(of),
        figure_24=figure_24(of), figure_25=figure_25(of), figure_27=figure_27(of), figure_30=figure_30(of),
        figure_31=figure_31(of), figure_32=figure_32(of), figure_35=figure_35(of), resizes=resizes(of),
        table_ii=table_ii(),
    )  # fmt: skip


def shorten_case(case: Case, for_s: float) -> Case:
    return msgspec.structs.replace(case, for_s=for_s) if for_s else case


class Verdict(msgspec.Struct, frozen=True):
    """`miss`: reason why the bar is missed; empty = met, None = not run."""

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
    consolidation = [_consolidation(of, models) for models in (64, 128)]
    return [
        *in_program,
        *gains,
        *table_3,
        *consolidation,
        *(_resizing(of, watermark) for watermark in RESIZING),
        _speed(of),
    ]


def readings(result: Result) -> tuple[Callable[[Result], float], ...]:
    """Return the definitions of met objectives; the authors' program has only the mean definition."""
    return READINGS[1:] if result.case.program else READINGS


def met_text(result: Result | None) -> str:
    if result is None:
        return MISSING
    low, high = (f"{each([one(result) for one in readings(result)]):.1f}" for each in (min, max))
    return low if low == high else f"{low} to {high}"


def gain_percent(ours: Result | None, theirs: Result | None) -> tuple[float, float] | None:
    """Return how many percent more objectives a system meets than another, as smaller and larger value of the
    definitions.
    """
    if ours is None or theirs is None:
        return None
    found = sorted(100 * (each(ours) / max(1e-9, each(theirs)) - 1) for each in readings(ours))
    return found[0], found[-1]


def _gain_text(found: tuple[float, float] | None) -> str:
    if found is None:
        return MISSING
    low, high = (f"{each:+.0f}" for each in found)
    return low if low == high else f"{low} to {high}"


def nodes_used(result: Result | None, kind: str) -> float:
    use = result.measures.kinds.get(kind) if result is not None else None
    return use.nodes if use is not None else 0.0


def _nodes_text(result: Result | None, kind: str) -> str:
    return f"{nodes_used(result, kind):.1f}" if result is not None else MISSING


def _first_within(result: Result | None) -> list[str]:
    """Return the percent of requests whose first token comes within 0.5, 2 and 8 s."""
    if result is None:
        return [MISSING] * 3
    return [f"{100 * result.measures.ttft[TTFT_POINTS_S.index(point)]:.0f}" for point in (0.5, 2.0, 8.0)]


def off_table_3(result: Result, said: Mapping[str, float | None], *, met: float | None) -> str:
    """Return differences from the paper that exceed the bar under both definitions."""
    off = {}
    for kind, wanted in said.items():
        used = nodes_used(result, kind)
        if wanted is not None and abs(used - wanted) > BAR_GPUS:
            off[kind] = f"{used - wanted:+.1f} {kind.upper()}s"
    if met is not None:
        low, high = sorted(each(result) for each in READINGS)
        nearest = min((low, high), key=lambda one: abs(one - met))
        if not low <= met <= high and abs(nearest - met) > BAR_POINTS:
            off["points"] = f"{nearest - met:+.1f} points"
    return ", ".join(off[name] for name in (GPU, "points", CPU) if name in off)


def _gain(of: Of, system: str, *, program: bool) -> Verdict:
    named = PAPERS_SYSTEMS.get(system, system)
    least, most = tables.MORE_MET[named]
    bar, paper = f"128 models: more objectives met than by `{system}`", f"+{least:.0f} to +{most:.0f} %, by model size"
    if program:
        bar = f"128 models, authors' program: more objectives met than by `{named}`"
    case = tables.program_case if program else (lambda name, size: Case(name, 128, (size,)))
    gains = {SHORT[size]: gain_percent(*(of(case(name, size)) for name in (SLINFER, system))) for size in SIZES}
    known = {size: found for size, found in gains.items() if found is not None}
    off = [f"{size} is {'below' if found[1] < least else 'above'}" for size, found in known.items()
           if found[1] < least or found[0] > most]  # fmt: skip
    here = ", ".join(f"{size} {_gain_text(found)} %" for size, found in known.items())
    return Verdict(bar, paper, here or MISSING, None if None in gains.values() else ", ".join(off))


def _table_3(of: Of, system: str, models: int) -> Verdict:
    bar = f"Table III, {models} x 7B, `{system}`: within {BAR_POINTS:.0f} points and {BAR_GPUS} GPUs"
    named = PAPERS_SYSTEMS.get(system, system)
    gpus, met = tables.NODES_USED[SEVEN, models, named, GPU], tables.MET[SEVEN, models, named]
    paper, result = f"{met:.0f} %, {gpus} GPUs", of(Case(system, models, (SEVEN,)))
    if result is None:
        return Verdict(bar, paper, MISSING, None)
    here = f"{met_text(result)} %, {result.measures.kinds[GPU].nodes:.1f} GPUs"
    return Verdict(bar, paper, here, off_table_3(result, {GPU: gpus}, met=met))


def _consolidation(of: Of, models: int) -> Verdict:
    whole, without = (of(tables.ablated_case(models, name)) for name in ("whole", "without consolidation"))
    bar = f"{models} x 7B without consolidation: fewer objectives met, in both readings, and more GPUs"
    if whole is None or without is None:
        return Verdict(bar, "yes", MISSING, None)
    points = [each(without) - each(whole) for each in READINGS]
    more = nodes_used(without, GPU) - nodes_used(whole, GPU)
    here = f"{min(points):+.2f} to {max(points):+.2f} points, {more:+.3f} GPUs"
    wrong = [what for what, is_wrong in (("objectives", max(points) >= 0), ("GPUs", more <= 0)) if is_wrong]
    return Verdict(bar, "yes", here, ", ".join(wrong))


def _resizing(of: Of, watermark: float) -> Verdict:
    said, bar = RESIZING[watermark], f"Resizing, of an instance's life, watermark {watermark:.0%}: within a factor of 2"
    percent = _resizing_percent(of(Case(SLINFER, 64, settings={"watermark": watermark})))
    if percent is None:
        return Verdict(bar, f"{said:.1f} %", MISSING, None)
    miss = "" if _is_near(percent, said) else f"{percent / said:.1f} times as much"
    return Verdict(bar, f"{said:.1f} %", f"{percent:.1f} %", miss)


def _resizing_percent(result: Result | None) -> float | None:
    gpu = result.sampled.get(GPU) if result is not None else None
    return 100 * gpu.resizing if gpu is not None else None


def _is_near(percent: float, said: float) -> bool:
    return said / BAR_FACTOR <= percent <= said * BAR_FACTOR


def _speed(of: Of) -> Verdict:
    found = [result.took_s for size in SIZES if (result := of(Case(SLINFER, 128, (size,)))) is not None]
    bar = f"A run of 128 models: under {tables.BAR_RUN_S:.0f} s of one core"
    if not found:
        return Verdict(bar, "", MISSING, None)
    miss = "" if max(found) < tables.BAR_RUN_S else "too slow, or on a busy machine"
    return Verdict(bar, "", f"{max(found):.0f} s, when it was recorded", miss)


def findings(of: Of) -> str:
    """Return the text of findings, from the verdicts on ratios and on Table III."""
    parts = []
    for name, program in (("in the authors' program", True), ("Read plainly", False)):
        systems = tables.PROGRAM_SYSTEMS[:-1] if program else (SLLM, SLLM_C, SLLM_CS)
        judged = (f"`{PAPERS_SYSTEMS.get(x, x)}` {_gain(of, x, program=program).said}" for x in systems)
        parts.append(f"{name}, {'; '.join(judged)}")
    near = [one for models in LOADS if (one := _table_3(of, SLINFER, models)).miss is not None]
    count = f"{sum(one.miss == '' for one in near)} of {len(near)} rows of Table III for `slinfer` are within"
    said = f"{count} {BAR_POINTS:.0f} points and {BAR_GPUS} GPUs" if near else "Table III has not been run"
    return f"*Found*, against these ranges: {'. '.join(parts)}. {said}."


def largest_row(of: Of) -> str:
    """Return a sentence about the row that changes the ratio over `sllm+c` most, or an empty text."""

    def gain(without: str) -> float | None:
        both = (of(tables.program_case(system, SEVEN, without=without)) for system in (SLINFER, SLLM_C))
        found = gain_percent(*both)
        return found[0] if found is not None else None

    whole, gains = gain(""), {row: gain(row) for row in authors.ROWS}
    known = {row: whole - found for row, found in gains.items() if whole is not None and found is not None}
    if len(known) < len(gains):
        return ""
    row = max(known, key=lambda each: abs(known[each]))
    points = f"{known[row]:+.0f} points for 7B"
    return f"The row *{row.replace('_', '-')}* moves the ratio over `sllm+c` most, by {points}."


def small_text(of: Of) -> str:
    """Return text about the 3B ratio over `sllm`, with and without the row *cache*."""
    cases = (SLINFER, ""), (SLLM, ""), (SLLM, "cache")
    ours, *theirs = (of(tables.program_case(system, tables.SMALL, without=row)) for system, row in cases)
    whole, without = (_gain_text(gain_percent(ours, each)) for each in theirs)
    return f"{whole} %, and {without} % if `sllm` has no row *cache*"


def program_rows(of: Of, each: Iterable[tuple[str, str, str]]) -> Rows:
    for name, size, without in each:
        found = [of(tables.program_case(system, size, without=without)) for system in tables.PROGRAM_SYSTEMS]
        gains = (_gain_text(gain_percent(found[-1], theirs)) for theirs in found[:-1])
        yield [name, *map(met_text, found), *gains]


def table_ii() -> Rows:
    for (kind, size, length), said in tables.TABLE_II.items():
        here = tables.concurrency(kind, size, length)
        yield [f"{kind.upper()}, {SHORT[size]}, {length // 1024}K", str(said), str(here)]


def figure_22(of: Of) -> Rows:
    for size, models, system in product(SIZES, LOADS, tables.SYSTEMS):
        if (result := of(Case(system, models, (size,)))) is None:
            continue
        named, kinds = PAPERS_SYSTEMS.get(system, system), result.measures.kinds
        said = {kind: tables.NODES_USED.get((size, models, named, kind)) for kind in (GPU, CPU)}
        share = tables.MET.get((size, models, named))
        cells = [f"{models} x {SHORT[size]}", f"`{system}`"]
        for kind, number in said.items():
            cells += [_nodes_text(result, kind), "" if number is None else f"{number:.1f}"]
        within = ""
        if share is not None or any(each is not None for each in said.values()):
            off = off_table_3(result, said, met=share)
            within = f"**no**: {off}" if off else "yes"
        cells += [met_text(result), "" if share is None else f"{share:.0f}", within]
        cells += [f"{kinds[kind].tokens_per_s:.0f}" if kind in kinds else MISSING for kind in (GPU, CPU)]
        cells.append(" / ".join(f"{kinds[kind].running:.1f}" for kind in (GPU, CPU) if kind in kinds) or MISSING)
        yield [*cells, f"{100 * result.measures.dropped:.1f}", ", ".join(_first_within(result))]


def figure_23(of: Of) -> Rows:
    for models, name in tables.ABLATED:
        result = of(tables.ablated_case(models, name))
        yield [f"{models} x 7B", name, met_text(result), f"{nodes_used(result, GPU):.3f}", _nodes_text(result, CPU)]


def figure_24(of: Of) -> Rows:
    for nodes in tables.NODES_24:
        yield [f"{nodes.cpus} CPUs + {nodes.gpus} GPUs", met_text(of(Case(SLINFER, 64, nodes=nodes)))]


def figure_25(of: Of) -> Rows:
    for case in tables.TABLES["25"]():
        result = of(case)
        if result is not None and (gpu := result.sampled.get(GPU)) is not None:
            yield [
                f"`{case.system}`", met_text(result), f"{nodes_used(result, GPU):.1f}", f"{gpu.memory_used:.2f}",
                f"{gpu.batch_p50:.0f}", f"{gpu.batch_p95:.0f}", f"{result.measures.kinds[GPU].running:.2f}",
            ]  # fmt: skip


def figure_27(of: Of) -> Rows:
    for per_s in tables.BURSTS:
        found = [of(tables.burst_case(system, per_s)) for system in (SLLM, SLLM_C, SLLM_CS, SLINFER)]
        yield [f"{per_s:g}", *(f"{_nodes_text(x, GPU)} + {_nodes_text(x, CPU)}; {met_text(x)}" for x in found)]


def figure_30(of: Of) -> Rows:
    for system, seconds in product((SLLM_C, SLLM_CS, SLINFER), tables.KEEP_ALIVES_S):
        result = of(tables.keep_alive_case(system, seconds))
        yield [f"`{system}`", f"{seconds:g} s", _nodes_text(result, GPU), met_text(result), *_first_within(result)]


def figure_31(of: Of) -> Rows:
    for watermark in tables.WATERMARKS:
        result = of(Case(SLINFER, 64, settings={"watermark": watermark}))
        gpu = result.sampled.get(GPU) if result is not None else None
        cells = [MISSING] * 4
        if result is not None and gpu is not None:
            moved = f"{100 * result.measures.moved:.2f}"
            cells = [f"{100 * gpu.resizing:.1f}", f"{100 * gpu.cache_used:.0f}", moved, met_text(result)]
        yield [f"{watermark:.0%}", *cells]


def figure_32(of: Of) -> Rows:
    for nodes in tables.NODES_32:
        found = (met_text(of(Case(system, 64, nodes=nodes))) for system in (SLLM_C, SLLM_CS, SLINFER))
        yield [f"{nodes.cpus} + {nodes.gpus}", *found]


def figure_35(of: Of) -> Rows:
    for name in tables.DATASETS:
        found = [of(Case(system, 64, ("llama-3.1-8b",), name)) for system in (SLLM_CS, SLINFER)]
        cells = [(met_text(one), _nodes_text(one, GPU), _nodes_text(one, CPU)) for one in found]
        yield [name, *cells[0], *cells[1]]


def resizes(of: Of) -> Rows:
    for seconds, longest in tables.RESIZE_READINGS:
        found = [_resizing_percent(of(tables.resize_case(watermark, seconds, longest))) for watermark in RESIZING]
        both = all(
            share is not None and _is_near(share, said) for share, said in zip(found, RESIZING.values(), strict=True)
        )
        cells = [MISSING if share is None else f"{share:.1f}" for share in found]
        yield [f"{seconds} s", f"{longest:,}", *cells, "yes" if both else "no"]
