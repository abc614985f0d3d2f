"""The words of `docs/reproduction/slinfer.md`."""

HEAD = """# SLINFER §IX, in the simulator

The paper is Chuhao Xu, Zijun Li, Quan Chen, Han Zhao, Xueyan Tang and Minyi Guo, *Towards Resource-Efficient Serverless
LLM Inference with SLINFER*; its sections, tables and figures are meant where this page names one. Workloads and step
times are those that its authors published (github.com/BarrinXu/SLINFER). They have no licence, so they are not in this
repository, and neither this page nor the tests of these numbers can be made without them.

`make reproduce` writes this page anew, and so does `python -m benchmarks.papers.slinfer --table all`, from
`slinfer.json` beside it: a run is repeated only where an earlier release has made it. Where nothing is kept that takes
about 20 minutes of one core, by the times of the single runs. The bars of the paper's figures are not in its text;
where it gives a number, that stands beside ours. SLINFER itself is the policy `slinfer`, with the manager and the
pilots of a session in virtual time; the baselines are `benchmarks/papers/slinfer/sllm.py`.
"""

SUMMARY = """## The bars, and which are met

A bar with two readings of a request's objectives (see below) is met where one of them meets it. The settings were
fixed before the runs, and none was changed for a bar that was missed. Where `slinfer` has a number in the paper it is
near it; what is missed are ratios to baselines, most of them because a baseline does better here than in the paper. The
last two sections have the experiments. They explain a part of the misses against `sllm+c`, and hardly any of the one
against `sllm` with models of 13B.
"""

READINGS = """## How to read it

*Met* is an interval over two readings of a request's objectives, because the text does not say which is meant. The
first is strict: every token is in time by eq. 1. The second is that of the authors' program: the first token is in
time, and the mean time per output token is at most 0.25 s. In both a request that waited for a load has as much
longer (§IX-A), and one that was dropped has missed them.

*GPUs* and *CPUs* are nodes that have an instance, on the mean over the half hour. *Tokens/s* are what a node writes
while it is used, *running* the requests that an instance which serves any has at once (GPUs / CPUs). *Within the bar*:
within 4 points and 0.4 nodes of the paper. A dash stands for what has not been run.

`sllm+c+s` gives each instance half of the memory of a node, and its instances take turns. `sllm+c+s, static` cuts the
node: half a node computes at half its speed, also while the other half does nothing. The first is better for the
baseline, the second is what the authors' program does (an instance sleeps for as long as it has computed).
"""

FAIR = """## What all systems have in common

The same requests, step times, nodes, loads and messages, and the same engine, which reads a prompt whole. All that
have CPUs prefer them. Instances that serve nothing stay for 1 s. A request that waits is dropped when its time to first
token is over, with the load that it waits for on top, and that load is granted when its tokens are judged. No policy
knows how much a request will write: it is told the mean of those of its model that have ended.

Three things are not the same. `slinfer` looks for late requests every 0.1 s, the baselines at the moment. An instance
of `slinfer` that serves nothing leaves at once where another needs its memory; one of a baseline stays for its second
(*instances leave at once*, below, is the other extreme). A request that `slinfer` moves to another instance is
computed from its prompt on, as in a session; in the authors' program it keeps what it has written.
"""

OPEN = """## What the text leaves open, one experiment each

- *Loading into CPUs.* "All models are cached in CPU memory": here, as in the authors' program, a CPU serves them from
  there and loads nothing.
- *The memory of CPU nodes* is not said: 80 GB here. Their program has 256 GB, of which an instance of 7B has 32 GB for
  its cache.
- *Drops*: "they proactively drop requests whose queuing delays exceed the TTFT SLO". Here a waiting request is dropped
  at that moment; their program looks every 0.25 s.
- *Routing* among instances with room is not said: here CPUs come first, then it goes in turn. In their program it goes
  in turn over all.
- *Prompts are read whole, one at a time* (§V), by all systems.
"""

FIGURE_25 = """## Figure 25: 64 models of 3B, 7B and 13B (2:2:2), on GPUs

Paper: SLINFER uses close to all of the memory, most instances of `sllm` less than half; SLINFER's mean batch is 74 %
larger than `sllm`'s.
"""

FIGURE_32 = """## Figure 32: per cent met by 64 x 7B, by CPU and GPU nodes

Paper: SLINFER on four nodes does what `sllm+c+s` does on eight.
"""

FIGURE_35 = """## Figure 35: 64 x 8B with other datasets

Paper: `sllm+c+s` violates 63.4 % of LongBench's objectives.
"""

FIGURE_23 = """## Figure 23: 64 x 7B without a part

Paper: without sharing 89 % are met, and every part saves GPUs.
"""

FIGURE_24 = """## Figure 24: CPU nodes in place of GPUs, 64 x 7B

Paper: three to four CPU nodes do what a GPU does.
"""

FIGURE_31 = """## Figure 31: the watermark, 64 x 7B

Paper: resizing takes 11.3 % of an instance's life at 0 %, 1.4 % at 25 %; 0 to 0.3 % of the requests move.
"""

ALLOCATES = """## Why fewer objectives more than in the paper: what a baseline's cold start takes

With 128 models the baselines do better here than in the paper: where SLINFER meets 86 % of the objectives of 7B and
47 % more than `sllm+c`, the latter meets 59 % at the most. One thing explains a part of that: a load here moves weights
and nothing else. The authors' program then allocates the cache of the new instance, all that is left of the GPU for
`sllm` and `sllm+c`, and half of that for `sllm+c+s`. By Figure 17 that takes 1.9 s for 64 GB, twice as long as the load
of a model of 7B; an instance of SLINFER begins with 2 GB. The paper calls the cold start "similar across all systems",
so the tables above leave it away. In this one each system has it.

What else differs from the authors' program, and was not tried: there a waiting request asks again every 0.25 s and has
no place in a queue, so that one that has just come may be served before it.
"""
