"""`docs/reproduction/prompttuner.md`: paper and ours side by side, the bars, and what cannot be known."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.prompt_tuner import ablations, paper, texts
from benchmarks.prompt_tuner.bars import bars
from benchmarks.prompt_tuner.cases import (
    ELASTIC_FLOW,
    HEAVY,
    INFLESS,
    MAIN,
    MEDIUM,
    OURS,
    SENSITIVITY,
    SYSTEMS,
    Group,
    System,
    at,
)
from benchmarks.prompt_tuner.parameters import MODELS, Parameters
from benchmarks.prompt_tuner.summary import Evaluation, show
from benchmarks.prompt_tuner.why import WHY
from stoker.manager.study.statistics import estimate

_BASELINES = (INFLESS, ELASTIC_FLOW)
_LEARNED_COLUMNS = [
    f"`{policy}`{what}" for policy in _BASELINES for what in (", %", ": points over ours", ": times our cost")
]
_YES = {True: "yes", False: "**no**"}


def write(of: Evaluation) -> str:
    """The page, in Markdown."""
    parts = (
        texts.HEAD, _bars(of), texts.WHY + "\n", _figure_7(of), _table_7(of), _table_8(of), _figure_8(of), _beyond(of),
        _settings(of), _workload(of), _checks(of), _sensitivity(of), texts.UNKNOWABLE,
    )  # fmt: skip
    return "\n".join(parts)


def _table(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _bars(of: Evaluation) -> str:
    lines = ["## Bars", "", texts.BARS, ""]
    lines += _table("what", "wanted", "came of it", "holds", "if baselines learn too", "holds")
    for bar in bars(of):
        too = ("", "") if bar.learned is None else (bar.learned[0], _YES[bar.learned[1]])
        lines.append(_row(bar.what, bar.wanted, bar.came, _YES[bar.holds], *too))
    return "\n".join([*lines, ""])


# ---- the comparison


def _figure_7(of: Evaluation) -> str:
    lines = ["## Figure 7: violations and cost by load and S", "", texts.FIGURE_7, ""]
    lines += _table("load, S", *(f"`{policy}`, %" for policy in SYSTEMS), *(f"`{policy}`, $" for policy in SYSTEMS))
    lines += [_compared(of, group) for group in MAIN]
    lines += ["", "![Figure 7](prompttuner-figure-7.png)", "", "Against the paper's words, pairwise by seed:", ""]
    lines += _table("what", "paper", "ours")
    lines += _said(of)
    lines += ["", texts.LEARNED, "", *_table("load, S", *_LEARNED_COLUMNS)]
    lines += [_learned(of, group) for group in MAIN]
    return "\n".join([*lines, ""])


def _learned(of: Evaluation, group: Group) -> str:
    ours, cells = of.systems[OURS], list[str]()
    for policy in _BASELINES:
        fewer = of.more_violations(group, of.learned[policy], ours)
        times = of.times_the_cost(group, of.learned[policy], ours)
        cells += [show(estimate(of.violations(group, of.learned[policy]))), show(fewer), show(times, digits=2)]
    return _row(group.name, *cells)


def _compared(of: Evaluation, group: Group) -> str:
    systems = [of.systems[policy] for policy in SYSTEMS]
    late = [show(estimate(of.violations(group, system))) for system in systems]
    return _row(group.name, *late, *(show(estimate(of.costs(group, system))) for system in systems))


def _said(of: Evaluation) -> Iterator[str]:
    ours = of.systems[OURS]
    for policy in _BASELINES:
        low, high = paper.FEWER_POINTS[policy]
        for load in paper.MAIN_LOADS:
            fewer = of.more_violations(at(load, 1.0), of.systems[policy], ours)
            yield _row(f"7a: points under `{policy}`, {load}", f"{low:.0f} to {high:.0f}", show(fewer))
    for emergence in paper.EMERGENCES:
        for policy in _BASELINES:
            fewer = of.more_violations(at("medium", emergence), of.systems[policy], ours)
            least = f"at least {paper.LEAST_FEWER_POINTS:.0f}"
            yield _row(f"7c: points under `{policy}`, S = {emergence:g}", least, show(fewer))
    for emergence, percent in paper.SAVED.items():
        yield _row(
            f"7d: % saved of `{INFLESS}`'s cost, S = {emergence:g}",
            f"{percent:.0f}",
            show(of.saved(at("medium", emergence), ours, of.systems[INFLESS])),
        )
    for emergence in paper.EMERGENCES:
        said = f"up to {paper.SAVED_OF_ELASTIC_FLOW:.0f}" if emergence == paper.EMERGENCES[-1] else "(figure only)"
        saved = show(of.saved(at("medium", emergence), ours, of.systems[ELASTIC_FLOW]))
        yield _row(f"7d: % saved of `{ELASTIC_FLOW}`'s cost, S = {emergence:g}", said, saved)


def _table_7(of: Evaluation) -> str:
    lines = ["## Table 7: large models, and 96 GPUs", "", texts.TABLE_7, ""]
    lines += _table("setting", "", *(f"`{policy}`" for policy in SYSTEMS))
    for group in HEAVY:
        said = paper.TABLE_7[group.name]
        systems = [of.systems[policy] for policy in SYSTEMS]
        late = (f"{said[policy].violations} / {said[policy].cost}" for policy in SYSTEMS)
        lines.append(_row(group.name, "paper: % / $", *late))
        ours = (
            f"{show(estimate(of.violations(group, system)))} / {show(estimate(of.costs(group, system)))}"
            for system in systems
        )
        lines.append(_row("", "here: % / $", *ours))
    return "\n".join([*lines, ""])


# ---- without a part


def _table_8(of: Evaluation) -> str:
    lines = ["## Table 8: the scheduler without a part", "", texts.TABLE_8, ""]
    lines += _table("scheduler", "paper: %", "$", "here: %", "$", "points more", "times the cost")
    for name, system in ablations.TABLE_8.items():
        said = paper.TABLE_8[name]
        here = _violations_and_cost(of, MEDIUM, system)
        more = ("", "") if name == "whole" else _against_whole(of, MEDIUM, system)
        lines.append(_row(ablations.SHOWN[name], f"{said.violations}", f"{said.cost}", *here, *more))
    return "\n".join([*lines, ""])


def _figure_8(of: Evaluation) -> str:
    lines = ["## Figure 8: reuse, the window, the size of the bank", "", texts.FIGURE_8, ""]
    lines += _table("S", "what", "%", "$", "points more", "times the cost")
    for emergence in paper.EMERGENCES:
        group = at("medium", emergence)
        for what, system in ablations.FIGURE_8_AB.items():
            more = ("", "") if system == ablations.WHOLE else _against_whole(of, group, system)
            lines.append(_row(f"{emergence:g}", what, *_violations_and_cost(of, group, system), *more))
    lines += ["", *_table("what the bank does", "paper", *(f"S = {emergence:g}" for emergence in paper.EMERGENCES))]
    lines += [_row(*cells) for cells in _bank_is_worth(of)]
    lines += [
        "",
        "![Figure 8](prompttuner-figure-8.png)",
        "",
        *_table("window, s", "%", "$", "points more", "times the cost"),
    ]
    for window_s in paper.WINDOWS_S:
        system = ablations.of_window(window_s)
        more = ("", "") if system == ablations.WHOLE else _against_whole(of, MEDIUM, system)
        lines.append(_row(f"{window_s:g}", *_violations_and_cost(of, MEDIUM, system), *more))
    lines += ["", *_table("candidates in the bank", "%", "$", "points more")]
    for size in paper.BANK_SIZES:
        group = ablations.of_bank(size)
        worse = of.more_violations(group, ablations.WHOLE, ablations.WHOLE, where=MEDIUM)
        shown = "" if group is MEDIUM else show(worse, sign=True)
        lines.append(_row(f"{size:,}", *_violations_and_cost(of, group, ablations.WHOLE), shown))
    return "\n".join([*lines, ""])


def _beyond(of: Evaluation) -> str:
    lines = ["## Beyond the paper: what jobs really need, and room for those that would be late", "", texts.BEYOND, ""]
    lines += _table("load", "setting", "%", "$", "points more", "times the cost")
    for group in ablations.LOADED:
        lines.append(_row(group.load, "`learn = true`", *_violations_and_cost(of, group, ablations.WHOLE), "", ""))
        for what, system in (("`learn = false`", ablations.BY_BOUND), ("`early = true`", ablations.EARLY)):
            cells = (*_violations_and_cost(of, group, system), *_against_whole(of, group, system))
            lines.append(_row(group.load, what, *cells))
    return "\n".join([*lines, ""])


def _bank_is_worth(of: Evaluation) -> Iterator[list[str]]:
    """What reusing prompts saves, beside the paper's words."""
    groups = [at("medium", emergence) for emergence in paper.EMERGENCES]
    points = [show(of.more_violations(group, ablations.NO_PROMPTS, ablations.WHOLE)) for group in groups]
    yield ["points fewer violations", "{:.0f} to {:.0f}".format(*paper.BANK_FEWER_POINTS), *points]
    saved = [show(of.saved(group, ablations.WHOLE, ablations.NO_PROMPTS)) for group in groups]
    yield ["% of the cost saved", "{:.0f} to {:.0f}".format(*paper.BANK_SAVED), *saved]


def _violations_and_cost(of: Evaluation, group: Group, system: System) -> tuple[str, str]:
    return show(estimate(of.violations(group, system))), show(estimate(of.costs(group, system)))


def _against_whole(of: Evaluation, group: Group, system: System) -> tuple[str, str]:
    more = of.more_violations(group, system, ablations.WHOLE)
    return show(more, sign=True), show(of.times_the_cost(group, system, ablations.WHOLE), digits=2)


# ---- what it rests on


def _settings(of: Evaluation) -> str:
    lines = ["## The baselines and their settings", "", texts.BASELINES, ""]
    lines += _table("setting", "%", "$", "taken")
    for search in of.searches:
        policy = search.system.policy
        taken = {of.systems[policy]: "yes", of.learned[policy]: "of those that learn"}.get(search.system, "")
        lines.append(_row(f"{search.system}", f"{search.violations:.1f}", f"{search.cost:.1f}", taken))
    return "\n".join([*lines, ""])


def _workload(of: Evaluation) -> str:  # noqa: ARG001 (as the others)
    lines = ["## The jobs, and what they depend on", "", texts.WORKLOAD, ""]
    lines += _table("parameter", "value", "source", "why")
    usual = Parameters()
    for name, why in WHY.items():
        lines.append(_row(f"`{name}`", value(getattr(usual, name)), why.source, why.reason))
    lines += ["", texts.MODELS, ""]
    lines += _table("model", "GPUs a replica", "weights, GB", "cold start, s", "lookup, s", "speedup by the bank")
    for model in MODELS.values():
        speedup = "{} to {}".format(*model.speedup)
        cells = (f"{model.devices}", f"{model.weights_bytes / 1e9:g}", f"{usual.cold_s(model):.1f}", f"{model.bank_s}")
        lines.append(_row(model.name, *cells, speedup))
    return "\n".join([*lines, ""])


def value(what: object) -> str:
    """A parameter as the page shows it."""
    if isinstance(what, tuple):
        return ", ".join(f"{many}: {share:.0%}" for many, share in what)
    return f"{what:.3g}" if isinstance(what, float) and what >= 1e6 else f"{what}"


def _checks(of: Evaluation) -> str:
    flow, infless = of.results(MEDIUM, of.systems[ELASTIC_FLOW]), of.results(MEDIUM, of.systems[INFLESS])
    wait, most = paper.INITIALISATION
    lines = ["## What was not fitted, and can be compared", "", *_table("what", "paper", "here")]
    used = show(estimate([100.0 * result.utilisation for result in flow]))
    lines.append(
        _row(f"`{ELASTIC_FLOW}`: GPUs allocated, % (3a; there of one model's jobs)", f"{paper.UTILISATION:.0%}", used)
    )
    shares = show(estimate([100.0 * result.wait_share for result in infless]))
    worst = 100.0 * max(result.wait_most for result in infless)
    said = f"{wait:.0%}, at most {most:.0%}"
    what = f"`{INFLESS}`: waiting before a job begins, % of its latency (3b; there initialisation alone)"
    lines.append(_row(what, said, f"{shares}, at most {worst:.0f}"))
    large = of.results(HEAVY[-1], of.systems[OURS])
    rounds = estimate([1e3 * result.round_s for result in large])
    longest = 1e3 * max(result.round_most_s for result in large)
    said = "{:.0f} ms, at most {:.0f} ms".format(*(1e3 * seconds for seconds in paper.ROUND_S))
    lines.append(
        _row(
            f"a round of scheduling at {paper.LARGE_GPUS} GPUs",
            said,
            f"{show(rounds, digits=2)} ms, at most {longest:.0f} ms",
        )
    )
    return "\n".join([*lines, ""])


def _sensitivity(of: Evaluation) -> str:
    lines = ["## If the unknowns were others", "", texts.SENSITIVITY, ""]
    lines += _table(
        "changed", *(f"`{policy}`: % / $" for policy in SYSTEMS), *(f"points under `{policy}`" for policy in _BASELINES)
    )
    for group in (MEDIUM, *SENSITIVITY):
        systems = [of.systems[policy] for policy in SYSTEMS]
        cells = [
            f"{estimate(of.violations(group, each)).mean:.1f} / {estimate(of.costs(group, each)).mean:.1f}"
            for each in systems
        ]
        fewer = [show(of.more_violations(group, each, systems[0])) for each in systems[1:]]
        lines.append(_row("nothing" if group is MEDIUM else group.name, *cells, *fewer))
    return "\n".join([*lines, ""])
