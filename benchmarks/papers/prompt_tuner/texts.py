"""Every figure and table of the paper, and where the page or another benchmark has ours.

Where the usual value of each parameter comes from, and why it is what it is.

The words of the page that have no result in them. Numbers in them are the paper's or the settings'.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from benchmarks.papers.prompt_tuner.cases import TUNING_SEEDS
from benchmarks.papers.prompt_tuner.jobs import Parameters
from benchmarks.quoted_records import chosen_prompt, communication, fixed_costs, prompt_spread
from benchmarks.tables import head, row

_QUALITY = "`make bench ARGS=prompt_quality`, real tunings of ten tasks (found: `benchmarks/RESULTS.md`)"


def write() -> str:
    lines = ["## Every figure and table of the paper", "", *head("paper", "what it has", "here")]
    lines += [row(*part) for part in _parts()]
    said = (
        "What is in the simulator comes of `python -m benchmarks.papers.prompt_tuner`, under the seeds that stand above"
        " (96 GPUs: the first three of them)."
    )
    return "\n".join([*lines, "", said, ""])


def _parts() -> tuple[tuple[str, str, str], ...]:
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


class Why(msgspec.Struct, frozen=True):
    """Where a value comes from, and why it is what it is."""

    source: str
    reason: str


_OURS = "ours"
WHY: Mapping[str, Why] = {
    "peak": Why("§2.2", "the fullest minute has five times the jobs of the mean one, rounded to whole jobs"),
    "mixed": Why("§6.1", '"three 20-minute LPT traces" for three loads: the models of a load come in one trace'),
    "duration_median_s": Why(_OURS, "durations \"from a few seconds to several minutes\" (§6.1): the grid has four"),
    "duration_spread": Why("Philly", "standard deviation of the logarithm, of its 30,610 jobs of 5 s to 10 min"),
    "duration_least_s": Why("§6.1", '"from a few seconds": what is drawn below is this long'),
    "duration_most_s": Why("§6.1", '"to several minutes": what is drawn above is this long'),
    "replicas": Why(_OURS, "GPUs (of a large model: replicas) that a job had in the trace, with their shares"),
    "widest": Why(_OURS, 'most GPUs of a job, half a server or two ("at most tens", §7): the grid has both'),
    "bound": Why(_OURS, "iterations at most, over those that a job needs from an induced prompt"),
    "speedup": Why("Figure 9b", "factor on the speedups by model; log-uniform between least and most, drawn by job"),
    "prepare_s": Why("§2.2", 'before a model is read: "tens of seconds" (§3.2), 37-41 % of a job; the grid has three'),
    "read_bytes_per_s": Why(_OURS, "weights into one GPU; each GPU of a replica reads its part of them"),
    "overhead": Why("§6.1", '"resource allocation overhead" in an SLO: so many cold starts of the model'),
    "meet_s": Why("§5.1", "members of a gang meet: at most 2 s, and so long here"),
    "gang_efficiency": Why("§2.2", "communication takes 0.4-0.5 %: kept with each doubling"),
    "budget": Why("§4.4.3", "the bank is skipped when its lookup takes more of the SLO"),
    "bank_size": Why("§4.3.3", "candidates; a lookup scores 50 and a fiftieth of these, shared by the GPUs of a job"),
    "prompt_spread": Why("Figure 2c", "of the iterations' logarithm: the worst of 20 prompts takes 4.5 times the best"),
    "price_per_hour": Why("AWS", "p4de.24xlarge (8 GPUs) on demand, US East, 2024; ratios do not depend on it"),
}  # fmt: skip
MODELS_WHY = (
    "`bank_s`: §6.3 for the first three; the two large ones by these over the weights that a GPU reads. "
    "`speedup`: the least are those of Figure 9b (§6.3), GPT2-B's most too; the others' most are ours, under GPT2-B's, "
    "which §6.3 calls the highest. The 4.7 of §4.4.3 are not used. `weights_bytes`: parameters of 16 bits (GPT-2: 32)."
)


HEAD = f"""# PromptTuner §6, in the simulator

The paper is Wei Gao, Peng Sun, Dmitrii Ustiugov, Tianwei Zhang and Yonggang Wen, *PromptTuner: SLO-Aware Elastic System
for LLM Prompt Tuning*; its sections, figures and tables are meant where this page names one. Its trace, its code and
its plots' values are not given as numbers: what its text says is set beside what comes of our policies.

`prompt-tuner` is the policy of a live session, and so is the manager around it; `infless` and `elastic-flow` are our
versions of the paper's baselines, with the bank and with jobs on several GPUs, as §6.1 has them, in every reading that
the text allows. Models of what carries out their commands are in `manager/sim`. Equal capacity, the same jobs: a seed
decides when they come and what they are, and every policy meets the same ones. Rounds come every 50 ms, of all
policies (§5.3). ± is the 95 % interval over seeds (Student's t); two systems are compared seed by seed.

A *violation* is a job that is not done within its SLO, or was refused. *Cost* is GPU-seconds times the price of a
p4de.24xlarge by 8 (${Parameters().price_per_hour} an hour, on demand); storage is left out, which the paper takes at
its least possible price. `elastic-flow` pays for all GPUs until its last job is done, and for 20 minutes at least;
the others for GPUs on which a model is, is being loaded, or is used.

In the paper nobody learns how many of its iterations a job needs: each is planned with all that it may do. That is the
condition of every figure here, unless it says otherwise. A session's policy learns it from the jobs that have ended;
what that is worth stands beside it, for all systems and for ours alone.
"""

SEARCH = """What the text leaves open of the jobs was written down with the values that are tried of each, in
`benchmarks/papers/prompt_tuner/grid.toml`, before any set was run (decision 031). What was known by then: an earlier
page with one set of values, and a review that had tried others by hand and found that shorter jobs and half of the cold
start in an SLO come nearer to the paper; both values are among the grid's. That combinations are drawn was added after
the first runs, when the machine turned out to be busy, and before a result was looked at. A set counts when it gives
the numbers of the text that are its anchors; none of them is about INFless. What is predicted runs on seeds that the
search has not seen."""

TERMS = """## Words

- *Anchor*: a number of the paper's text that a set is chosen by, so that to meet it is no evidence.
- *Set*: one choice of what the text leaves open of the jobs; *the most central* is the one nearest to the others, and
  has all the figures. *The sets that count* says how they were found.
- *S*: how much of its usual duration a job may take, as the paper varies it.
- *Bar*: what was asked of this reproduction; a bar is this project's, not the paper's.
- *Reading*: one way to understand what the text says of a baseline.
"""

BARS = """The bars are this project's, set below what the paper has; each is taken in the reading that is named, where
nobody learns. *Holds*: the whole 95 % interval of the most central set is on the right side; *by the mean*: only its
middle is. *All sets*: the least and the most of the sets' means, and in how many of them the bar holds by the interval;
those other than the most central one have fewer seeds."""

CONDITIONS = """The most central set, in the other conditions. Where ours alone learns the comparison is not fair, and
is what a session would have over a baseline that does not learn."""

ABLATIONS = """Medium load, S = 1. *Without the warm allocator* each instance of a job takes a GPU as soon as one is
there, and holds it while it waits for the others, also when its job is late by then. *Without DelaySchedulable* no job
waits for GPUs that running jobs will give back. *Without the latency budget* every job asks the bank. *Without the
bank* all jobs start from induced prompts, whose making is taken to cost nothing. *Without reusing runtimes* a GPU is
given back as soon as it has nothing to do. Two things are judged: whether violations rise as in the paper, and whether
cost moves to the same side. *Same sign* says nothing of the size, which stands beside it."""

EXPERIMENTS = """One thing is changed at a time, with the most central set at medium load, S = 1. `order`: whose job
INFless looks at first; `hold`: its instances hold their GPUs while they wait for the others; `window_s`: it launches
instances ahead of the traffic of so many seconds (0: when a job is there); `bank budget`: the bank is asked within the
latency budget. Jobs' *bounds*, which schedulers plan with where nobody learns, are what jobs need from an induced
prompt in every set: whoever plans by them profits, ours most, so a row has them twice as large."""

FIGURE_3C = """Medium load, S = 1, the most central set. The text says "up to 70%" of INFless and ElasticFlow, of jobs
of Vicuna-7B alone (§3), and neither how many GPUs there were nor how many jobs; here three models are mixed."""

COMPARED = """Medium load, S = 1, 32 GPUs, over jobs that were done; ± is over seeds, and *at most* is the most of any
job under any seed, where the paper has one run. Both readings of INFless have the bank, which §6.1 gives to the
baselines. Figure 3 is of Vicuna-7B's jobs alone (§3), without their number: these have rows of their own. *Instances
start* while a library on which the job then ran is started or loads its model, also if it was ordered for another job:
so these are upper values of what initialisation alone costs a job. The time of a round is the policy's on one thread,
under the first three seeds."""

FIGURE_7 = """32 GPUs, jobs of GPT2-Base, GPT2-Large and Vicuna-7B at once; the most central set. The text has no S for
7a and 7b; 1 is taken."""

TABLE_7 = """Replicas of the large models take four GPUs each; the text has no S for them, 1 is taken, and 32 GPUs for
both, which it has for the second alone. The last is the medium load three times on 96 GPUs. Its costs cannot be the
paper's: at the public price 96 GPUs for 20 minutes cost more than the paper's static cluster did."""

FIGURE_8 = """A smaller bank is searched faster and holds a worse best prompt; candidates are taken to be independent.
Of the window the text says that 60 s "strikes a satisfactory balance" (8c), of the bank that with 2,000 candidates
"both SLO violations and costs increase significantly" (8d); the other windows and the smallest bank are ours."""

KEPT = """Medium load, S = 1, 32 GPUs, the most central set; the last column is by the means. Who keeps idle GPUs longer
has fewer late jobs and pays more, so a comparison at one setting of each says little: INFless keeps instances by a
histogram of the times between arrivals, ours gives a GPU back after 60 s as the paper has it, and both could do
otherwise. This section was added when results without it were known."""

BASELINES = f"""Each baseline's rules, with their sources, are in the essays of `benchmarks/baselines/infless.py` and
`benchmarks/baselines/elastic_flow.py`. Each reading gets the setting that has the fewest violations at medium load, S
= 1, with the most central set (of those within half a point, the cheapest), on four seeds that no result is from
({TUNING_SEEDS[0]} to {TUNING_SEEDS[-1]}), and keeps it for all sets. INFless's margin and the mix of its times are
tried as in its essay, and each of them lower and higher, with each order and with and without instances ahead of
traffic: this was added when results without it were known, for the baseline's good. Idle instances kept for 15 s and
120 s were tried too, which the record does not have on these seeds: 120 s had the fewest late jobs and cost the most,
as in the section above under the seeds of the results, so this rule would have taken it; it is left out of the choice
because ours could keep GPUs longer as well, and the section above sets both side by side. ElasticFlow plans at most
once in its slot. Ours has the paper's settings, a window of 60 s after which an idle GPU is given back, and the bank
within a fifth of the SLO."""

WORKLOAD = """Made up from the text. Each load is a trace of its own, with its models mixed: whole jobs for each minute,
one minute with five times the mean, the others with exponential shares; exponential gaps within a minute. A job's
duration and the replicas that it had in the trace are drawn independently, its iterations at most are what both stand
for, and it needs all of them from an induced prompt. No policy knows what a better prompt saves a job before it is
done. An SLO is the duration times S and a part of a cold start of the model. A lookup is shared by the GPUs of its job,
as it is in a session, and every policy predicts it so."""

MODELS = MODELS_WHY

UNKNOWABLE = """## What cannot be known from the text

- *The trace.* Durations "from a few seconds to several minutes" and the counts of jobs are all there is: neither the
  work of a job, nor how its minutes are filled beside the fullest, nor how many GPUs it had.
- *What "resource allocation overhead" in an SLO is.* Here a part of a cold start of the job's model.
- *Which prompt a job of the trace started from*, and so which share of its iterations the bank saves. The paper has
  1.2-4.7 in §4.4.3 and 1.28-2.8 in §6.3.
- *How much worse the prompts of a smaller bank are.* The paper finds 2,000 candidates much worse than 3,000; the best
  of fewer independent candidates is only a little worse, so what it saw must come from clusters that its smaller bank
  lacks.
- *The baselines' code.* Neither INFless nor ElasticFlow ran such jobs; how the paper extended them is told in two
  sentences (§3.2, §6.1).
- *What the paper's costs are made of.* They do not fit the list price on 96 GPUs (Table 7), and whether loads and
  idle GPUs of the last window are paid is not said. Here both are, until the last job is done.
- *How many jobs Figure 3a's trace had.* Its 56 % are of Vicuna jobs alone; here they are an anchor at medium load.
"""
