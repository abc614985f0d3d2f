"""The words of the page."""

from __future__ import annotations

from benchmarks.prompt_tuner.cases import SEEDS, TUNING_SEEDS, WHOLE_EXTENT
from benchmarks.prompt_tuner.parameters import Parameters
from benchmarks.prompt_tuner.why import MODELS_WHY

HEAD = f"""# PromptTuner §6, in the simulator

The paper is Wei Gao, Peng Sun, Dmitrii Ustiugov, Tianwei Zhang and Yonggang Wen, *PromptTuner: SLO-Aware Elastic System
for LLM Prompt Tuning*; its sections, figures and tables are meant where this page names one. Its trace, its code and
the bars of its figures' plots are not public in numbers: what its text says is set beside what comes of our policies.

`python -m benchmarks.prompt_tuner` writes this page and its plots anew. `prompt-tuner` is the policy of a
live session, and so is the manager around it; `infless` and `elastic-flow` are our versions of the paper's baselines,
with the bank and with jobs on several GPUs, as §6.1 has them. Models of what carries out their commands are in
`manager/sim`. Equal capacity, the same jobs: a seed decides when they come and what they are, and every policy meets
the same ones. All figures are means over seeds with 95 % intervals (Student's t), two systems are compared seed by
seed. There are {len(SEEDS)} seeds; 96 GPUs have the first {len(WHOLE_EXTENT.large_seeds)} of them. Rounds come
every 50 ms, of all policies (§5.3).

A *violation* is a job that is not done within its SLO, or was refused. *Cost* is GPU-seconds times the price of a
p4de.24xlarge by 8 (${Parameters().price_per_hour} an hour, on demand); storage is left out, which the paper takes at
its least possible price. `elastic-flow` pays for all GPUs until its last job is done, and for 20 minutes at least;
the others for GPUs on which a model is, is being loaded, or is used.
"""

BARS = """By the mean over seeds; ± is the 95 % interval. Ours learns from the jobs that have ended how many of their
iterations jobs need, which neither the paper nor any source of the baselines has (see "Beyond the paper"). So the
baselines are taken twice: as their sources tell them, and with the same ability, in the best setting for each."""

LEARNED = """Against baselines that learn as ours does, each in the best setting for that:"""

FIGURE_7 = "32 GPUs, jobs of GPT2-Base, GPT2-Large and Vicuna-7B at once."

TABLE_7 = """Replicas of the large models take four GPUs each; the text has no S for them, 1.0 is taken. The last is
the medium load three times on 96 GPUs. (At the price that is public, 96 GPUs for the 20 minutes alone cost $164: the
paper's 99.1 for a static cluster must come from another price, or from other GPUs.)"""

TABLE_8 = """Medium load, S = 1.0. *Without the warm allocator* each instance of a job takes a GPU as soon as one is
there, and waits for the others while it holds it. *Without DelaySchedulable* no job waits for GPUs that running jobs
will give back. *Without the latency budget* every job asks the bank."""

FIGURE_8 = """Medium load. *No prompt reusing*: all jobs start from induced prompts, whose making is taken to cost
nothing. *No runtime reusing*: a GPU is given back as soon as it has nothing to do. A smaller bank is searched faster
and holds a worse best prompt (as the best of fewer independent ones)."""

BEYOND = """The paper predicts a job's time with its iterations at most (§4.4). Ours learns from the jobs of a model how
many of them were needed at most, once eight have ended: those that asked the bank apart from the others. A scheduler
that does not know what a better prompt saves plans as if it saved nothing. `learn = false` is the paper's way.

A pool keeps idle GPUs for the whole window, also while a job of another model is late for want of a cold one (§4.4.2
knows no other way). With `early = true` they leave at once then; it is off elsewhere. S = 1.0."""

BASELINES = f"""Each baseline's rules, with their sources, are in the essays of `benchmarks/baselines/infless.py` and
`benchmarks/baselines/elastic_flow.py`. Both get the setting that has the fewest violations at medium load over
all three S (of those within half a point, the cheapest), on {len(TUNING_SEEDS)} seeds that no result on this page is
from. Ours has the paper's settings, a window of 60 s and the bank within a fifth of the SLO, and it learns (see
"Beyond the paper")."""

WORKLOAD = """Made up from the text. Each load is a trace of its own, with its models mixed: whole jobs for each minute,
one minute with five times the mean, the others with exponential shares; exponential gaps within a minute. A job's
duration and the replicas that it had in the trace are drawn independently, its iterations at most are what both stand
for, and it needs all of them from an induced prompt. No policy knows what a better prompt saves a job before it is
done; those that learn know what it saved others. An SLO is the duration times S and a cold start of the model.

Every value was written down before any two policies were compared, with one exception: at first each model had a trace
and a peak of its own. First looks, on seeds that no result is from, had far fewer violations than the paper under all
three systems; §6.1 was read again, and its "three 20-minute LPT traces" for three loads taken as they are now. What the
first reading gives is the last row of the table on unknowns."""

WHY = """## Where this is not as in the paper, and why

- *The order of the systems is the paper's by the mean at every load and S; the distances are not.* All three have fewer
  violations than in the paper: these jobs are easier. An SLO has a whole cold start in it, so a job that finds cold
  GPUs can still be in time. What would make jobs harder is not in the text.
- *INFless is nearer.* How the paper extended it is little known (§3.2). Ours launches all instances of a job at once,
  never holds some while it waits for others that are not there, takes the jobs of a model by deadline, and lets no
  instance idle for over a minute: the best setting found. The distance depends on how well iterations are known
  beforehand. Here a job that starts from an induced prompt needs all that it may do; were its bound twice what it
  needs, all else the same, INFless would be 16 points behind and not 6 (last table).
- *Against baselines that learn what jobs need the distance is smaller*, and half of these bars are missed. What is left
  is DelaySchedulable's, and the warm pools'.
- *The warm allocator makes no difference:* most jobs want one to three replicas, replicas that are ordered for a job
  are its own in both cases, and who is late gives back what it took.
- *The bank saves a fifth of the cost, where the paper has 30 to 40 %, and hardly any violations, where it has 13 to 23
  points.* A lookup takes as long on eight GPUs as on one. With a median of 30 s of work it is a third of a short
  job: 9 s for a Vicuna job that saves two fifths of its iterations pay from 23 s on. The latency budget does not
  prevent that, since it is a fifth of an SLO that holds a cold start. Idle windows are not shortened by it either.
- *Who is late*: half of them came in the fullest minute or the next one (34 of 66, in six seeds), and found too few
  GPUs cold or warm; jobs of all three models are among them."""

MODELS = MODELS_WHY

SENSITIVITY = (
    """Medium load, S = 1.0, one unknown changed at a time, for all systems; the baselines keep their settings."""
)

UNKNOWABLE = """## What cannot be known from the text

- *The trace.* Durations "from a few seconds to several minutes" and the counts of jobs are all there is: neither the
  work of a job, nor how its minutes are filled beside the fullest, nor how many GPUs it had.
- *What "resource allocation overhead" in an SLO is.* Here a whole cold start of the job's model. With less of it jobs
  that need a cold GPU are late whatever is done (see above).
- *Which prompt a job of the trace started from*, and so which share of its iterations the bank saves. The paper has
  1.2-4.7 in §4.4.3 and 1.28-2.8 in §6.3.
- *How much worse the prompts of a smaller bank are.* The paper finds 2,000 candidates much worse than 3,000; the best
  of fewer independent candidates is only a little worse, so what it saw must come from clusters that its smaller bank
  lacks.
- *The baselines' code.* Neither INFless nor ElasticFlow ran such jobs; how the paper extended them is told in two
  sentences (§3.2, §6.1).
- *What the paper's costs are made of.* They do not fit the list price on 96 GPUs (Table 7), and whether loads and
  idle GPUs of the last window are paid is not said. Here both are, until the last job is done.
"""
