"""Write `docs/reproduction/prompttuner.md` from its record: paper, ours, and unknowns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks import quoted_records
from benchmarks.papers.prompt_tuner import report_bars
from benchmarks.papers.prompt_tuner.jobs import MODELS
from benchmarks.papers.prompt_tuner.record import Page, Record, span
from benchmarks.papers.prompt_tuner.report_bars import compared
from benchmarks.papers.prompt_tuner.report_sets import early, kept, sets_that_count, short
from benchmarks.papers.prompt_tuner.scenarios import Reading
from benchmarks.tables import head, paragraph, row

PAGE = Path(__file__).with_name("page.template")
RECORD = "prompttuner.json"
_NEAR_POINTS, _FEW = 1.0, 4
"""Of more than `_FEW` settings, the page shows those within `_NEAR_POINTS` of the best."""


def write(record: Record) -> str:
    page = Page(record)
    return PAGE.read_text().format(
        made=_made(page), short=short(page), bars=report_bars.against(page), learning=report_bars.learning(page),
        ablations=report_bars.ablations(page), experiments=report_bars.experiments(page), sets=sets_that_count(page),
        one_set=paragraph(page.one_set()), figure_3c=report_bars.figure_3c(page),
        figure_7=report_bars.figure_7(page), figure_7_said=report_bars.figure_7_said(page),
        table_7=report_bars.table_7(page), **report_bars.figure_8(page), compared=compared(page),
        kept=kept(page), settings=_settings(page), models=_models(page), not_ours=paragraph(_not_ours()),
        parameters={name: value(each) for name, each in msgspec.structs.asdict(page.central.parameters).items()},
        communication=quoted_records.communication(), fixed_costs=quoted_records.fixed_costs(),
        prompt_spread=quoted_records.prompt_spread(), chosen_prompt=quoted_records.chosen_prompt(),
    )  # fmt: skip


def _made(page: Page) -> str:
    record = page.record
    others = f"other sets seeds {span(record.few)}" if len(page.sets) > 1 else "no other set was run"
    searched = page.grid.stages[max(0, len(record.searched.stages) - 1)].seeds
    return paragraph(f"""Made by {record.facts.line()}. Every result on this page is computed from [{RECORD}]({RECORD}),
        which has every run; `make reproduce` goes on where it was stopped, as long as the code is the same. The search
        had seeds {span(searched)}, the most central set seeds {span(record.seeds)}, {others}.{early(page)}
        {_again(page)}""")


def _again(page: Page) -> str:
    again = page.record.again
    if again is None:
        return ""
    return f""" A baseline's settings were searched and all of its runs done again by {again.line()}; all other runs
        are of the first commit."""


def _settings(page: Page) -> str:
    lines = head("reading", "setting", "%", "$", "taken")
    for reading in Reading:
        lines += _settings_of(page, reading)
    return "\n".join(lines)


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


def _models(page: Page) -> str:
    lines = head(
        "model", "GPUs a replica", "weights, GB", "cold start, s", "lookup on one GPU, s", "speedup by the bank"
    )
    for model in MODELS.values():
        cold_s = f"{page.central.parameters.cold_s(model):.1f}"
        cells = (f"{model.devices}", f"{model.weights_bytes / 1e9:g}", cold_s, f"{model.bank_s}")
        lines.append(row(model.name, *cells, "{} to {}".format(*model.speedup)))
    return "\n".join(lines)


def _not_ours() -> str:
    return f"""Two of the paper's numbers are put in that our own measurements do not have, with another model: for
        `speedup`, {quoted_records.against_induced()}; for `gang_efficiency`, {quoted_records.communication()}."""


def value(what: object) -> str:
    if isinstance(what, tuple):
        return ", ".join(f"{many}: {share:.0%}" for many, share in what)
    return f"{what:.3g}" if isinstance(what, float) and what >= 1e6 else f"{what}"
