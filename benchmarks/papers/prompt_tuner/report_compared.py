"""The section of the page on what was no anchor and can be compared: waiting under INFless, rounds of scheduling."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.prompt_tuner import bars, paper, texts
from benchmarks.papers.prompt_tuner.cases import MEDIUM, VICUNA, Group
from benchmarks.papers.prompt_tuner.page import Page, lines_of
from benchmarks.papers.prompt_tuner.readings import OF_INFLESS, Reading
from benchmarks.papers.prompt_tuner.record import KeptRun
from benchmarks.papers.prompt_tuner.report_figures import verdict
from benchmarks.papers.prompt_tuner.summary import Evaluation, show
from benchmarks.tables import head, row
from stoker.manager.study.statistics import MeanEstimate, estimate

_SAID, _MOST = (100.0 * share for share in paper.INITIALISATION)


def compared(page: Page) -> str:
    """The section."""
    lines = ["## What was no anchor, and can be compared", "", texts.COMPARED, ""]
    lines += head("what", "paper", "the most central set", f"all {len(page.sets)} sets", "against the paper's mean")
    for reading in OF_INFLESS:
        lines += [row(*cells) for cells in _waiting(page, reading)]
    mean, longest = bars.rounds(page.central)
    said = "{:.0f} ms, at most {:.0f} ms".format(*(1e3 * seconds for seconds in paper.ROUND_S))
    what = f"a round of scheduling at {paper.LARGE_GPUS} GPUs that has something to look at"
    lines.append(row(what, said, f"{show(mean, digits=2)} ms, at most {longest:.0f} ms", "", ""))
    return lines_of(*lines)


def starts(page: Page, reading: Reading) -> list[MeanEstimate]:
    """Percent of a job's latency while its instances start, in each set at medium load; empty if it was not measured
    in all of them."""
    found = [_starts(one, page, reading, MEDIUM) for one in page.sets]
    return [each for each in found if each is not None] if all(found) else []


def starts_most(page: Page, reading: Reading) -> float:
    """The most of any job of the central set, in percent."""
    return max(100.0 * (run.start_most or 0.0) for run in page.central.results(MEDIUM, page.chosen[reading]))


def _waiting(page: Page, reading: Reading) -> Iterator[tuple[str, ...]]:
    one, system, found = page.central, page.chosen[reading], starts(page, reading)
    paper_has = f"{_SAID:.0f}, at most {_MOST:.0f}"
    if found:
        over = sum(each.mean > _SAID for each in found)
        judged = f"{verdict(found[0], _SAID, _SAID)}; the mean is over it in {over} of {len(found)} sets"
        what = f"{reading.value}: waiting while instances start, % of a job's latency (3b)"
        yield what, paper_has, _told(found[0], starts_most(page, reading)), _between(found), judged
    for group in VICUNA:
        alone = _starts(one, page, reading, group)
        if alone is not None:
            most = max(100.0 * (run.start_most or 0.0) for run in one.results(group, system))
            yield f"the same, {group.name}", paper_has, _told(alone, most), "", verdict(alone, _SAID, _SAID)
    waits = [_shares([run.wait_share for run in each.results(MEDIUM, system)]) for each in page.sets]
    most = 100.0 * max(run.wait_most for run in one.results(MEDIUM, system))
    yield f"{reading.value}: all waiting before a job begins", "", _told(waits[0], most), _between(waits), ""


def _starts(one: Evaluation, page: Page, reading: Reading, group: Group) -> MeanEstimate | None:
    runs: list[KeptRun] = one.runs.get((group.name, str(page.chosen[reading])), [])
    shares = [run.start_share for run in runs if run.start_share is not None]
    return _shares(shares) if shares and len(shares) == len(runs) else None


def _shares(shares: list[float]) -> MeanEstimate:
    return estimate([100.0 * share for share in shares])


def _told(found: MeanEstimate, most: float) -> str:
    return f"{show(found)}, at most {most:.0f}"


def _between(found: list[MeanEstimate]) -> str:
    means = [each.mean for each in found]
    return f"{min(means):.1f} to {max(means):.1f}"
