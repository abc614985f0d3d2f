"""Every figure and table of the paper, and where the page or another benchmark has ours."""

from __future__ import annotations

from benchmarks.quoted_records import chosen_prompt, communication, fixed_costs, prompt_spread
from benchmarks.tables import head, row

_QUALITY = "`make bench ARGS=prompt_quality`, real tunings of ten tasks (found: `benchmarks/RESULTS.md`)"


def write() -> str:
    """The section of the page."""
    lines = ["## Every figure and table of the paper", "", *head("paper", "what it has", "here")]
    lines += [row(*part) for part in _parts()]
    said = (
        "What is in the simulator comes of `python -m benchmarks.papers.prompt_tuner`, under the seeds that stand above"
        " (96 GPUs: the first three of them)."
    )
    return "\n".join([*lines, "", said, ""])


def _parts() -> tuple[tuple[str, str, str], ...]:
    """Each with what it has, and where ours is."""
    return (
        ("Figures 1, 4 to 6, Tables 2 to 5", "an example, drawings, notation", "nothing to measure"),
        ("Table 1", "scores of tuned prompts against few shots, five large models",
         "not measured: none of them runs here"),
        ("Figure 2a", "where a job's time goes: communication, allocation",
         f"a real job: {communication()}, and {fixed_costs()} (`make bench ARGS=tuning_times`; found:"
         " `benchmarks/RESULTS.md`); in the simulator `prepare_s` and `gang_efficiency`, under *The jobs*"),
        ("Figure 2b", "the trace: a minute with five times the mean", "made up, under *The jobs*"),
        ("Figure 2c", "iterations from 20 prompts",
         f"{prompt_spread()} ({_QUALITY}); in the simulator `prompt_spread` is put in"),
        ("Figure 3a", "ElasticFlow's allocation, 56 %",
         "its mean is an anchor: *The sets that count*; its course over time is not compared"),
        ("Figure 3b", "INFless's waiting for instances that start", "*What was no anchor, and can be compared*"),
        ("Figure 3c", "violations by the number of GPUs", "the section of that name"),
        ("Table 6", "twelve tasks and their targets", "its data sets are not ours: ten others in `prompt_quality`"),
        ("Figure 7, Table 7", "violations and cost of the three systems", "the sections of those names"),
        ("Figure 8, Table 8", "the parts of the scheduler", "the sections of those names"),
        ("Figure 9", "the chosen prompt against the ideal and the induced one", f"{chosen_prompt()} ({_QUALITY})"),
        ("Figure 10", "the bank's two layers",
         "`python -m benchmarks.tuning.prompt_bank --samples 16 --tasks ...`, then `make bench ARGS=prompt_groups`"
         " (found, with the tasks: `benchmarks/RESULTS.md`); 10b by regret, not ITA"),
    )  # fmt: skip
