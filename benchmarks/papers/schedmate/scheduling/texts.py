"""The words of `docs/reproduction/schedmate.md`. Each number in them comes from the settings and the records."""

from __future__ import annotations

import math
from statistics import fmean

from benchmarks.papers.schedmate.scheduling import errors, settings
from benchmarks.papers.schedmate.scheduling.records import Records

FIGURE = "schedmate-figure.png"
_GB = 1e9
_PAPER_S, _LUCID_S = (errors.spread_of(share) for share in (settings.PAPER_SHARE, settings.LUCID_SHARE))
_PAPER_2, _LUCID_2 = (errors.spread_both_ways(share) for share in (settings.PAPER_SHARE, settings.LUCID_SHARE))


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


HEAD = """# SchedMate's scheduling, on jobs of Philly

The paper is Zerui Wang et al., *Semantic-Aware Scheduling for GPU Clusters with Large Language Models*; its sections
are meant where this page names one. It predicts how long a job will run from its source code and its history, and puts
the job with the shortest prediction first (§4.3). This page asks what that is worth when predictions are as wrong as
ours, as the paper's, and as those of Lucid that the paper compares with. How good our predictions are is measured
elsewhere ([estimates](../../benchmarks/papers/schedmate/estimates.md)); here their errors are injected.

The jobs are those of Microsoft's Philly clusters, in a file that this repository does not ship. So results cannot be
computed anew without it; this page and its figure are made from `schedmate.json` beside it, which has numbers of whole
weeks and none of single jobs. `make reproduce` writes all three anew, and so does
`python -m benchmarks.papers.schedmate.scheduling`. A run is repeated only where an earlier release has made it.

Each policy runs in Stoker's manager, in the simulator: `shortest_first.py` and `tiresias.py` in
[benchmarks/baselines](../../benchmarks/baselines) are policies that a session can name too. A job is a call for a gang
of libraries, one a GPU.
"""


BARS = f"""## The bars, and which are met

An interval holds the middle {percent(settings.CONFIDENCE, 0)} of {settings.RESAMPLES:,} numbers, each
computed from weeks drawn
again within each virtual cluster, the same weeks for both policies. A policy is worse than FIFO beyond its interval if
the whole interval of its mean completion time over FIFO's lies above 1.
"""


def findings(*, ours: str, tiresias: str, tiresias_weeks: str, costs: str, shuffled: str, weeks: str) -> str:
    return f"""## What came of it

Mean completion times at load {settings.MAIN_LOAD:g}:

- Shortest first with our error, over all jobs: {ours}. It is more than 1 % above FIFO's in
  {weeks}.
- The same against Tiresias, over all jobs: {tiresias}. Where each week counts the same: {tiresias_weeks}. Tiresias
  predicts nothing, but it preempts: a short job need not wait until a long one has ended. Shortest first does not
  preempt.
- What an error adds to SJF, which knows each duration: {costs}.
- Predictions that say nothing, shuffled: {shuffled}.
"""


MAIN = f"""## The policies at load {settings.MAIN_LOAD:g}

*Completion* is from when a job comes until it ends, *waiting* what remains without the job's own duration; both in the
mean over all jobs of all weeks. Quantiles are those of each week's completion times, in the geometric mean over weeks.
*Over FIFO* divides mean completion times over all jobs, which the weeks with many jobs decide; *by weeks* is the
geometric mean of the weeks' own ratios, in which each week counts the same. In brackets: the interval.
"""


def by_load(records: Records) -> str:
    windows = records.kept.windows
    real = [
        f"{fmean(window.gpus_at_work / window.gpus[place] for window in windows):.2f}"
        for place in range(len(settings.LOADS))
    ]
    return f"""## By load

Mean completion time over FIFO's and over Tiresias's, over all jobs. Clusters have whole nodes and room for their
largest job, so loads are lower than their names: {", ".join(real)} in the mean over weeks.
"""


BY_CLUSTER = f"""## By virtual cluster

Shortest first with our error, load {settings.MAIN_LOAD:g}. Of clusters with two to four weeks the intervals say little.
"""

SWEEP = f"""## By the error

log(prediction / truth) is normal around zero with this standard deviation, drawn for each job; below all, predictions
that were shuffled among the jobs of a week, which say nothing. Load {settings.MAIN_LOAD:g}.

![mean completion time over FIFO's by the spread of the error]({FIGURE})
"""


def hidden(*, shuffled: float) -> str:
    return f"""## What a share of errors under 100 % says, and what it hides

The paper gives one number for the errors of durations: {percent(settings.PAPER_SHARE)} of them are under 100
%, of Lucid's
{percent(settings.LUCID_SHARE)} (§5.4). The relative error of a prediction that is too low is under 100 %
however low it is.
So the smallest duration of a cluster, as a constant, has 100 % of its errors under 100 %; with it shortest first is
FIFO (`tests/benchmarks/test_schedmate_scheduling.py`). And predictions that are all three times too high have no error
under 100 % and put jobs into the right order. Predictions that were shuffled among the jobs of a week say nothing, and
{percent(shuffled)} of their errors are under 100 %. What matters to shortest first is the spread of
prediction over truth,
which that number does not give. The share within a factor of two both ways tells more.

So an assumption makes distributions of the two numbers. Here errors are lognormal, and right in the mean of truth over
prediction: the spread is {_PAPER_S:.2f} for SchedMate and {_LUCID_S:.2f} for Lucid, whose median is then
{math.exp(_LUCID_S**2 / 2):.1f} times too high. With a median that is right, and the share read as that within a
factor of two, spreads are {_PAPER_2:.2f} and {_LUCID_2:.2f}, nearly the same.

Ours are resampled from the estimates for 108 recipes of small models, measured on one processor after the method was
fixed. They are drawn independently of the job. A job of Philly ends early when it fails or its user stops it, and it is
submitted again with changes: errors for such jobs would be larger, and alike for similar jobs. One system leaves
{percent(settings.UNKNOWN_SHARE, 0)} of the jobs without an estimate, as our estimator does for families that
it has not seen.
"""


def beside(*, passing: str) -> str:
    return f"""## Variants

Load {settings.MAIN_LOAD:g}. *The average of similar recipes* is the paper's way to estimate (§3.1), on our recipes.
*Others may pass*: jobs behind the head of the line begin where they fit, without a reservation for it; where
they may under both, ours is {passing} of FIFO. *Three queues*
have the thresholds of Tiresias's own simulator, {
        " and ".join(f"{each:,.0f}" for each in settings.TIRESIAS_OTHER_GPU_S)
    } GPU-seconds. *Preempting costs nothing*: jobs go on at once.
"""


PAPER = """## The paper's numbers

None stands beside ours, because no protocol is the same. In §5.3 standalone SchedMate has a mean completion time 25.7 %
below that of QSSF and 16 % below that of Tiresias, and its failure handler takes off another 12.5 %: all three on jobs
of Acme from June to August 2023, which could not be had, with failures that resume, and with predictions that its
advisor made. On Philly the paper has Lucid with SchedMate, 1.23 to 1.91 times faster than Lucid
over four traces, and Sia with SchedMate, 0.59 h against 0.74 h in Sia's own simulator.
"""


NOT_HERE = """## What cannot be reproduced, and why

- QSSF, and our predictions themselves on Philly. QSSF learns from users and names of jobs, our advisor from source
  code. The file has neither, and no states: only when a job came, how long it ran, on how many GPUs, in which cluster.
- Failure handling. No row says that a job failed or which job came back, so nothing can be restarted sooner. What our
  handler finds in logs is evaluated apart, on logs.
- Lucid with and without SchedMate. Lucid gains from jobs that share a GPU. The measured pairs that are there, 1,388,
  have 5.7 % whose speed falls under 0.65, so cancelling bad pairs can gain little,
  and not the 1.9 times that the paper has on Acme. Which model a job of Philly runs is not known either.
- Sia with SchedMate. The gain is profiling that is left out. Sia's decisions need its optimiser of goodput and
  throughputs by GPU type, and Stoker has neither.
- Horus, a baseline of the paper: it predicts how much of a GPU a job uses, from its model's graph.
"""


def settings_text(records: Records) -> str:
    kept, windows = records.kept, records.kept.windows
    took_s = sum(result.took_s for result in kept.runs)
    thresholds = " and ".join(f"{each:,.0f}" for each in settings.TIRESIAS_THRESHOLDS_GPU_S)
    short_s, wide_s = settings.TIRESIAS_RESTART_S
    before, after = kept.load_average
    return f"""## Settings

Fixed on {settings.FIXED_ON}, and committed before any policy had run on the trace
(`benchmarks/papers/schedmate/scheduling/settings.py`).

- *Windows.* A window is a week of one virtual cluster, from its first job on. All weeks with at least
  {settings.LEAST_JOBS} jobs and {settings.LEAST_GPUS:g} GPUs at work in the mean take part: {len(windows)} weeks of
  {len(set(records.strata))} of the 15 virtual clusters, with
  {sum(window.jobs for window in windows):,} of the file's 77,456 jobs. A week begins with an empty cluster, and its run
  ends with its last job, so jobs of the week before do not take part.
- *Size.* The file does not say how large clusters were. A window's GPU-seconds inside the week, if each job ran when it
  came, over the seconds of the week are its GPUs at work; over the load, rounded up to whole nodes of
  {settings.NODE_GPUS} GPUs, they are its cluster, which has room for the largest job at least.
- *Jobs.* A job takes as long as it took, on any GPUs, and never starts slower or waits for files. It is not known which
  jobs want one node, so gangs span nodes under each policy, and nothing is lost to fragments.
- *FIFO, SJF.* Nobody passes the head of the line, and none is preempted, as in the published simulator of Lucid
  (`fifo.py`, `sjf.py`), which is by authors of SchedMate. Shortest means the duration, not GPUs times the duration.
- *Tiresias.* Discretised two-dimensional LAS as in that simulator: two queues, a threshold of {thresholds} GPU-seconds,
  {short_s:g} s that a preempted job takes longer ({wide_s:g} s on more than 8 GPUs), and no promotion. Plans are made
  at once instead of each minute, which is in its favour.
- *Errors* are drawn {settings.DRAWS} times for each week, those of the sweep once; a week has the mean of its draws.
- *Check.* Event loops of a few lines (`tests/scheduling_replay.py`) agree with the manager's core: FIFO and shortest
  first within 1 % of the mean completion time, Tiresias within 2 %, on 300 made-up jobs; shortest first with our error
  on the smallest window too.

Runs took {took_s / 60:.0f} minutes of one core and at most {kept.peak_bytes / _GB:.2f} GB a process ({kept.machine};
load average {before:g} before, {after:g} after), with commit {kept.commit}.
"""


WINDOWS = """## The weeks
"""
