"""`docs/reproduction/prompttuner.md`, from its record: paper and ours side by side, and what cannot be known."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import quoted_records
from benchmarks.papers.prompt_tuner import report_bars, report_figures, texts
from benchmarks.papers.prompt_tuner.jobs import MODELS
from benchmarks.papers.prompt_tuner.page import Page, lines_of, span
from benchmarks.papers.prompt_tuner.readings import Reading
from benchmarks.papers.prompt_tuner.record import Record
from benchmarks.papers.prompt_tuner.report_bars import compared
from benchmarks.papers.prompt_tuner.report_sets import early, kept, sets_that_count
from benchmarks.papers.prompt_tuner.short import short
from benchmarks.papers.prompt_tuner.texts import WHY
from benchmarks.tables import head, paragraph, row

RECORD = "prompttuner.json"
_NEAR_POINTS, _FEW = 1.0, 4
"""A reading that was tried in more than `_FEW` settings shows those within `_NEAR_POINTS` of its best one."""


def write(record: Record) -> str:
    page = Page(record)
    parts = (
        texts.HEAD, _made(page), texts.TERMS, short(page), texts.write(), report_bars.against(page),
        report_bars.ablations(page), report_bars.experiments(page), sets_that_count(page),
        report_figures.figure_3c(page), report_figures.figure_7(page), report_figures.table_7(page),
        report_figures.figure_8(page), compared(page), kept(page), _settings(page), _workload(page), texts.UNKNOWABLE,
    )  # fmt: skip
    return "\n".join(parts)


def _made(page: Page) -> str:
    record, sets = page.record, len(page.sets)
    others = f"other sets seeds {span(record.few)}" if sets > 1 else "no other set was run"
    return lines_of(
        paragraph(f"""Made by {record.facts.line()}. Every result on this page is computed from [{RECORD}]({RECORD}),
            which has every run; `make reproduce` goes on where it was stopped, as long as the code is
            the same. The search had seeds
            {span(_searched_seeds(page))}, the most central set seeds {span(record.seeds)},
            {others}.{early(page)}{_again(page)}""")
    )


def _again(page: Page) -> str:
    again = page.record.again
    if again is None:
        return ""
    return f""" A baseline's settings were searched and all of its runs done again by {again.line()}; all other runs
        are of the first commit."""


def _searched_seeds(page: Page) -> tuple[int, ...]:
    return page.grid.stages[max(0, len(page.record.searched.stages) - 1)].seeds


def _settings(page: Page) -> str:
    lines = ["## The baselines and their settings", "", texts.BASELINES, ""]
    lines += head("reading", "setting", "%", "$", "taken")
    for reading in Reading:
        lines += _settings_of(page, reading)
    return lines_of(*lines)


def _settings_of(page: Page, reading: Reading) -> Iterator[str]:
    tried = [each for each in page.record.searches if each.reading is reading]
    least = min(each.violations for each in tried)
    far = [each for each in tried if each.violations > least + _NEAR_POINTS and page.chosen[reading] != each.system]
    for each in tried:
        if each not in far or len(tried) <= _FEW:
            taken = "yes" if page.chosen[reading] == each.system else ""
            yield row(reading.value, f"{each.system}", f"{each.violations:.1f}", f"{each.cost:.1f}", taken)
    if far and len(tried) > _FEW:
        low, high = (f"{pick(each.violations for each in far):.1f}" for pick in (min, max))
        yield row(reading.value, f"{len(far)} others, which the record has", f"{low} to {high}", "", "")


def _workload(page: Page) -> str:
    lines = ["## The jobs, and what they depend on", "", texts.WORKLOAD, ""]
    lines += head("parameter", "most central set", "source", "why")
    mine = page.central.parameters
    for name, why in WHY.items():
        lines.append(row(f"`{name}`", value(getattr(mine, name)), why.source, why.reason))
    lines += ["", paragraph(_not_ours()), "", texts.MODELS, ""]
    lines += head(
        "model", "GPUs a replica", "weights, GB", "cold start, s", "lookup on one GPU, s", "speedup by the bank"
    )
    for model in MODELS.values():
        cells = (f"{model.devices}", f"{model.weights_bytes / 1e9:g}", f"{mine.cold_s(model):.1f}", f"{model.bank_s}")
        lines.append(row(model.name, *cells, "{} to {}".format(*model.speedup)))
    return lines_of(*lines)


def _not_ours() -> str:
    return f"""Two of the paper's numbers are put in that our own measurements do not have, with another model: for
        `speedup`, {quoted_records.against_induced()}; for `gang_efficiency`, {quoted_records.communication()}."""


def value(what: object) -> str:
    if isinstance(what, tuple):
        return ", ".join(f"{many}: {share:.0%}" for many, share in what)
    return f"{what:.3g}" if isinstance(what, float) and what >= 1e6 else f"{what}"
