"""`docs/reproduction/slinfer.md`: the paper's numbers beside ours, from the records alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from benchmarks.papers.slinfer import paper, summary, tables, texts
from benchmarks.papers.slinfer.cases import (
    BASELINES,
    SLINFER,
    SLLM,
    SLLM_C,
    SLLM_CS,
    SLLM_CS_STATIC,
    Case,
    Records,
    Result,
    is_there,
)
from benchmarks.papers.slinfer.measures import TTFT_POINTS_S
from benchmarks.papers.slinfer.paper import BAR_GPUS, LOADS, MET, NODES_USED, SHORT, SIZES
from benchmarks.papers.slinfer.tables import concurrency
from benchmarks.papers.slinfer.worlds import CPU, GPU, Nodes

_MISSING = "–"
_PAPERS_SYSTEMS = {SLLM_CS_STATIC: SLLM_CS}
"""What a system of ours is in the paper, where it is another reading of the same one."""


def write(records: Records, *, for_s: float = 0.0) -> str:
    of = _Page(records, for_s)
    parts = (
        texts.HEAD, of.summary(), texts.READINGS, of.figure_22(), of.capacity(), of.ttft(), of.table_ii(),
        of.figure_25(), of.figure_32(), of.figure_35(), of.slinfer_alone(), texts.FAIR, texts.OPEN, of.doubts(),
        of.larger_cpus(), texts.ALLOCATES, of.allocations(),
    )  # fmt: skip
    return "\n".join(part for part in parts if part)


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(columns)
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def met(result: Result | None) -> str:
    if result is None:
        return _MISSING
    low, high = sorted((100 * result.measures.met_strict, 100 * result.measures.met_mean))
    return _interval(low, high)


def _interval(low: float, high: float) -> str:
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"


def _used(result: Result | None, kind: str) -> str:
    return f"{nodes_used(result, kind):.1f}" if result is not None else _MISSING


def nodes_used(result: Result | None, kind: str) -> float:
    use = result.measures.kinds.get(kind) if result is not None else None
    return use.nodes if use is not None else 0.0


class _Page:
    def __init__(self, records: Records, for_s: float) -> None:
        self._records = records
        self._for_s = for_s
        self._systems = [system for system in (*BASELINES, SLINFER) if is_there(system)]

    def _of(self, case: Case) -> Result | None:
        return self._records.get(case if not self._for_s else _shortened(case, self._for_s))

    def summary(self) -> str:
        rows = [verdict.row for verdict in summary.verdicts(self._of)]
        return f"{texts.SUMMARY}\n{_table(('bar', 'paper', 'here', 'met'), rows)}"

    def figure_22(self) -> str:
        every = product(SIZES, LOADS, self._systems)
        rows = [self._row_22(*each) for each in every if self._of(Case(each[2], each[1], (each[0],))) is not None]
        head = "## Figure 22 and Table III (aggregated): nodes used, decode speed, objectives met\n"
        columns = (
            "models", "system", "GPUs", "paper", "CPUs", "paper", "met, %", "paper", "within the bar",
            "tokens/s a GPU", "a CPU", "running", "dropped, %",
        )  # fmt: skip
        return f"{head}\n{_table(columns, rows)}"

    def _row_22(self, size: str, models: int, system: str) -> list[str]:
        result = self._of(Case(system, models, (size,)))
        named = _PAPERS_SYSTEMS.get(system, system)
        said = {kind: NODES_USED.get((size, models, named, kind)) for kind in (GPU, CPU)}
        share = MET.get((size, models, named))
        cells = [f"{models} x {SHORT[size]}", f"`{system}`"]
        for kind in (GPU, CPU):
            cells += [_used(result, kind), _said(said[kind], "{:.1f}")]
        cells += [met(result), _said(share, "{:.0f}"), _within(result, said, share)]
        kinds = result.measures.kinds if result is not None else {}
        cells += [f"{kinds[kind].tokens_per_s:.0f}" if kind in kinds else _MISSING for kind in (GPU, CPU)]
        cells.append(" / ".join(f"{kinds[kind].running:.1f}" for kind in (GPU, CPU) if kind in kinds) or _MISSING)
        cells.append(f"{100 * result.measures.dropped:.1f}" if result is not None else _MISSING)
        return cells

    def capacity(self) -> str:
        if all(self._of(Case(SLINFER, 128, (size,))) is None for size in SIZES):
            return ""
        rows = []
        for system in (SLLM, SLLM_C, SLLM_CS, SLLM_CS_STATIC):
            low, high = paper.MORE_MET[_PAPERS_SYSTEMS.get(system, system)]
            cells = [f"`{system}`", f"+{low:.0f} to +{high:.0f}"]
            for size in SIZES:
                ours, theirs = (self._of(Case(name, 128, (size,))) for name in (SLINFER, system))
                cells.append(_more(ours, theirs))
            rows.append(cells)
        head = "## 128 models: how many per cent more objectives `slinfer` meets\n"
        return f"{head}\n{_table(('against', 'paper, all sizes', *(SHORT[size] for size in SIZES)), rows)}"

    def ttft(self) -> str:
        rows = [
            [f"{models} x {SHORT[size]}", f"`{system}`", *(f"{100 * share:.0f}" for share in result.measures.ttft)]
            for size in SIZES for models in LOADS for system in self._systems
            if (result := self._of(Case(system, models, (size,)))) is not None
        ]  # fmt: skip
        head = "## Figure 22: per cent of all requests with a first token within so many seconds\n"
        return f"{head}\n{_table(('models', 'system', *(f'{point:g} s' for point in TTFT_POINTS_S)), rows)}"

    def table_ii(self) -> str:
        rows = [
            [f"{kind.upper()}, {SHORT[size]}, {length // 1024}K", str(said), str(concurrency(kind, size, length))]
            for (kind, size, length), said in paper.TABLE_II.items()
        ]
        head = "## Table II: requests at once on a whole node, by the profile alone\n"
        return f"{head}\n{_table(('instance', 'paper', 'here'), rows)}"

    def figure_25(self) -> str:
        found = [(case.system, self._of(case)) for case in tables.TABLES["25"]()]
        rows = [
            [
                f"`{system}`", met(result), f"{nodes_used(result, GPU):.1f}", f"{gpu.memory_used:.2f}",
                f"{gpu.batch_p50:.0f}", f"{gpu.batch_p95:.0f}", f"{result.measures.kinds[GPU].running:.2f}",
            ]
            for system, result in found if result is not None and (gpu := result.sampled.get(GPU)) is not None
        ]  # fmt: skip
        columns = ("system", "met, %", "GPUs", "memory used", "batch p50", "p95", "running on the mean")
        return f"{texts.FIGURE_25}\n{_table(columns, rows)}" if rows else ""

    def figure_32(self) -> str:
        systems = (SLLM_C, SLLM_CS, SLINFER)
        rows = []
        for count in tables.NODE_COUNTS:
            nodes = Nodes(gpus=count, cpus=count)
            results = (self._of(Case(system, 64, nodes=nodes)) for system in systems)
            rows.append([f"{count} + {count}", *map(met, results)])
        columns = ("CPUs + GPUs", *(f"`{system}`" for system in systems))
        return f"{texts.FIGURE_32}\n{_table(columns, rows)}"

    def figure_35(self) -> str:
        systems, whats = (SLLM_CS, SLINFER), ("met, %", "GPUs", "CPUs")
        rows = []
        for name in tables.DATASETS:
            cells = [name]
            for system in systems:
                result = self._of(Case(system, 64, ("llama-3.1-8b",), name))
                cells += [met(result), *(_used(result, kind) for kind in (GPU, CPU))]
            rows.append(cells)
        columns = ("dataset", *(f"`{system}` {what}" for system in systems for what in whats))
        return f"{texts.FIGURE_35}\n{_table(columns, rows)}"

    def slinfer_alone(self) -> str:
        if all(self._of(case) is None for name in ("23", "24", "31") for case in tables.TABLES[name]()):
            return "## Figures 23, 24, 31\n\nThey are of SLINFER alone, which has not been run yet.\n"
        ablations = [
            [name, met(result), _used(result, GPU), _used(result, CPU)]
            for name, settings in tables.ABLATIONS.items()
            for result in [self._of(Case(SLINFER, 64, settings=settings))]
        ]
        counts = [*((cpus, 2) for cpus in tables.CPU_COUNTS), *((0, gpus) for gpus in tables.GPU_COUNTS)]
        scaling = [
            [f"{cpus} CPUs + {gpus} GPUs", met(self._of(Case(SLINFER, 64, nodes=Nodes(gpus=gpus, cpus=cpus))))]
            for cpus, gpus in counts
        ]
        watermarks = [self._watermark(watermark) for watermark in tables.WATERMARKS]
        columns = ("watermark", "resizing, % of samples", "cache used, %", "moved, %", "met, %")
        parts = (
            texts.FIGURE_23, _table(("`slinfer`", "met, %", "GPUs", "CPUs"), ablations), texts.FIGURE_24,
            _table(("nodes", "met, %"), scaling), texts.FIGURE_31, _table(columns, watermarks),
        )  # fmt: skip
        return "\n".join(parts)

    def _watermark(self, watermark: float) -> list[str]:
        result = self._of(Case(SLINFER, 64, settings={"watermark": watermark}))
        gpu = result.sampled.get(GPU) if result is not None else None
        if result is None or gpu is None:
            return [f"{watermark:.0%}", *[_MISSING] * 4]
        moved = f"{100 * result.measures.moved:.2f}"
        return [f"{watermark:.0%}", f"{100 * gpu.resizing:.1f}", f"{100 * gpu.cache_used:.0f}", moved, met(result)]

    def doubts(self) -> str:
        rows = []
        for name, system, nodes, settings in (("as above", SLLM_CS, Nodes(), {}), *_doubts()):
            results = [self._of(Case(system, models, nodes=nodes, settings=settings)) for models in LOADS]
            cells = [f"{_used(result, GPU)}; {met(result)}" for result in results]
            rows.append([name, *cells])
        said = [f"{NODES_USED['llama-2-7b', n, SLLM_CS, GPU]:.1f}; {MET['llama-2-7b', n, SLLM_CS]:.0f}" for n in LOADS]
        return _table(
            ("`sllm+c+s`, 7B: GPUs; met, %", *(f"{models} models" for models in LOADS)), [["paper", *said], *rows]
        )

    def larger_cpus(self) -> str:
        rows = []
        for name, nodes in (("80 GB", Nodes()), ("256 GB", tables.LARGER_CPUS)):
            found = [(size, self._of(Case(SLINFER, 128, (size,), nodes=nodes))) for size in SIZES]
            more = [_more(result, self._of(Case(SLLM, 128, (size,)))) for size, result in found]
            rows.append([name, *(met(result) for _, result in found), *more])
        sizes = [SHORT[size] for size in SIZES]
        columns = ("`slinfer`, 128 models, CPU nodes of", *(f"{size} met, %" for size in sizes))
        return _table((*columns, *(f"{size} over `sllm`" for size in sizes)), rows)

    def allocations(self) -> str:
        rows = []
        for size in SIZES:
            found = [self._of(Case(system, 128, (size,), nodes=tables.ALLOCATES)) for system in tables.ALLOCATING]
            *baselines, ours = found
            rows.append([SHORT[size], *map(met, found), *(_more(ours, theirs) for theirs in baselines)])
        names = [f"`{system}`" for system in tables.ALLOCATING]
        return _table(("128 x", *(f"{name} met, %" for name in names), *(f"over {name}" for name in names[:-1])), rows)


def _doubts() -> Iterator[tuple[str, str, Nodes, dict[str, float | bool]]]:
    for name, (system, nodes, settings) in tables.DOUBTS.items():
        yield name, system, nodes, settings


def _shortened(case: Case, for_s: float) -> Case:
    return Case(case.system, case.models, case.sizes, case.workload, case.nodes, case.settings, for_s)


def shortened(case: Case, for_s: float) -> Case:
    return _shortened(case, for_s) if for_s else case


def _said(number: float | None, show: str) -> str:
    return show.format(number) if number is not None else ""


def _within(result: Result | None, said: dict[str, float | None], share: float | None) -> str:
    if result is None or (share is None and all(each is None for each in said.values())):
        return ""
    off = summary.off_table_3(result, gpus=said[GPU], met=share)
    cpus = said[CPU]
    if cpus is not None and abs(nodes_used(result, CPU) - cpus) > BAR_GPUS:
        off.append(f"{nodes_used(result, CPU) - cpus:+.1f} CPUs")
    return f"**no**: {', '.join(off)}" if off else "yes"


def _more(ours: Result | None, theirs: Result | None) -> str:
    found = summary.gain(ours, theirs)
    return _MISSING if found is None else " to ".join(f"{share:+.0f}" for share in found)
