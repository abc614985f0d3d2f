"""Finding an initial prompt among 3,067: how many scores a lookup computes, and what the prompt it finds is worth.

A bank of the candidates is built over SmolLM2-135M (K = 50). For every task *all* candidates are scored once (equation
1 of PromptTuner §4.3.2, the same samples throughout), and each kind of lookup is then made over these scores: counts
and regret are exact. Regret is the score of what was found less the lowest score of all, in nats a target token; it
stands beside the same as a part of what the best candidate is better than a middling one by.

Kinds: the paper's two layers; best bin first (`lookup.py`) within a few limits, its default being a twelfth of the
bank (a limit: counts are no finding, and have no bar); and as many candidates drawn at random, which is what clusters
have to beat. Since a task's best cluster is one of few, the paper's lookup is also counted over all clusters: on
average if a task's best cluster is drawn as often as it is large, and at worst.

Candidates and tasks are read from `../shared/data` beside the repository. Scoring 3,067 prompts for a task takes half
an hour on one core with four samples, and minutes with sixteen on a GPU, so four samples of four tasks are the default
on a CPU. Scores and features are kept in the state folder (`$STOKER_HOME/prompt-bank-benchmark`): a run that was
stopped goes on. `python -m benchmarks.prompt_bank_side --help` has the options; its last line is JSON.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.paired import MODEL, missing, run_side
from benchmarks.prompt_tasks import DATA, PROMPTS
from benchmarks.table import Line, Table
from stoker.tuning.bank.lookup import SAVING

LANGUAGE_MODEL, SAMPLE_SEED = "SmolLM2-135M-Instruct", 0
"""What the bank is built over, and what the samples of a task are drawn with."""
SETTING = f"Model: {LANGUAGE_MODEL}; the samples of a task are drawn with seed {SAMPLE_SEED}."
NAME, TITLE = "prompt_bank", "the Prompt Bank: scores computed a lookup, and the regret against scoring every candidate"


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """One line a kind of lookup, with one number a task; then the bars."""
    found = scored(say, quick=quick)
    return Table(name=NAME, title=TITLE, skipped=found) if isinstance(found, str) else table_of(found)


def scored(say: Callable[[str], None], *, quick: bool = False) -> dict[str, Any] | str:
    """What the side finds, or why it cannot run here."""
    if reason := missing(*MODEL):
        return reason
    if not PROMPTS.exists():
        return f"{DATA} has no prompts; the candidates are not in the repository"
    size = ("--candidates", "60", "--samples", "2", "--tasks", "claims", "--clusters", "8") if quick else ()
    found: dict[str, Any] = run_side("benchmarks.prompt_bank_side", *size, timeout_s=12 * 3600)
    say(found["machine"])
    return found


def table_of(found: dict[str, Any]) -> Table:
    """What the side found, judged."""
    whole = found["candidates"]
    lines = []
    for kind, of_tasks in found["kinds"].items():
        cells = {
            "scores": [one["scores"] for one in of_tasks],
            "regret, nats": [one["regret"] for one in of_tasks],
            "of the best's lead": [one["part"] for one in of_tasks],
            "rank": [one["rank"] for one in of_tasks],
            "times fewer": [whole / one["scores"] for one in of_tasks],
        }
        lines.append(Line(what=kind, cells=cells, digits=3, last_digits=1))
    ours = [one["scores"] for one in found["kinds"]["best bin first, the default limit"]]
    for what, times in (
        ("two layers, a task's best cluster drawn by size: on average", whole / found["two_layers_mean"]),
        ("two layers: at worst", whole / found["two_layers_worst"]),
        ("best bin first, a limit of the search: on average", whole / statistics.mean(ours)),
        ("best bin first, a limit of the search: at worst", whole / max(ours)),
    ):
        lines.append(Line(what=what, cells={"times fewer": [times]}, last_digits=1))
    notes = [
        SETTING,
        f"Best bin first stops when it has scored a {SAVING}th of the bank. That it scores {SAVING} times fewer is"
        " therefore a setting and not a finding; the regret says what it costs.",
        f"{whole:,} candidates in {found['clusters']} clusters, the largest of {found['largest']:,};"
        f" {found['samples']} samples a task; tasks: {', '.join(found['tasks'])}",
        f"reading all features took {found['read_s']:,.0f} s, grouping {found['group_s']:.1f} s, a score"
        f" {found['score_s'] * 1000:.0f} ms",
    ]
    return Table(name=NAME, title=TITLE, lines=lines, notes=notes)
