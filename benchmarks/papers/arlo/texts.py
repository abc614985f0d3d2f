"""The words of `docs/reproduction/arlo.md`. Each number in them comes from the settings and the cases.

The words of the last part of `docs/reproduction/arlo.md`: what explains misses, and the experiments on them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import wrap

from benchmarks.papers.arlo import settings, tables
from benchmarks.papers.arlo.cases import Case
from benchmarks.papers.arlo.measured import BEGINS_S, BURSTS, DEVICES, ENDS_S, FULL, LEVELS, LOADS, REPEATS
from benchmarks.papers.arlo.paper import TABLE_3
from benchmarks.papers.arlo.workload import INFLATION, LONG_ROWS_FROM, RATIO, LatencyProfile, read_lengths
from stoker.manager.policies.arlo.dispatch import DECAY, PEEKED, THRESHOLD

WIDTH = 120
_CODE, _KEPT = re.compile("`[^`]*`"), "\0"
"""What stands between backquotes is not broken: its spaces are this character meanwhile."""
OVERHEAD_MS = 1000 * settings.OVERHEAD_S
_GRID = ", ".join(f"{each:g}" for each in settings.LARGE_MS)
_LOADS = ", ".join(f"{each:.0%}" for each in settings.UTILIZATIONS)


def head() -> str:
    return f"""# Arlo §5, in a simulator

The paper is Xin Tan, Jiamin Li, Yitao Yang, Jingzong Li and Hong Xu, *Arlo: Serving Transformer-based Language Models
with Dynamic Input Lengths* (ICPP '24); its sections, tables and figures are meant where this page names one. The
lengths of requests are those of tweets in a file that is not in this repository
(`benchmarks/papers/arlo/workload.py`), so that neither this page nor the tests of its numbers can be made without it.

`make reproduce` writes this page anew, and so does `python -m benchmarks.papers.arlo --table all`, from `arlo.json`
beside it.
`--table 6a` runs what one figure or table needs: {", ".join(f"`{name}`" for name in tables.TABLES)}. A run is repeated
only where an earlier release has made it.

What is under test is `allocate` of `manager/policies/arlo` (equations 1 to 7) and `RuntimeQueues` (Algorithm 1), called
by a model of instances that answer one by one (`benchmarks/papers/arlo/queues.py`), which is quick enough for hundreds
of devices. In one table the manager, the pilots and the policy of a session take part (`--table deployed`).
"""


SUMMARY = """## The bars, and which are met

A number of ours is an interval from the least to the greatest, over seeds, over the latencies of Bert-Large, and over
the readings of DT and INFaaS; where the paper's number is inside, the readings that have it in their own interval are
named. A wide interval says little: the tables below have latencies and readings apart. A bar that says *in each run* is
met only if no run breaks it. The two readings of Arlo's allocation are told apart: see the settings.
"""


def readings() -> str:
    most, burst = settings.REPLACED_AT_ONCE, settings.BURST_S * settings.BURST_RATE
    st_case, one_ms = tables.figure_6b()[0], LatencyProfile("large", 1.0).mean_s(tables.lengths_of_trace(), 8)
    st_ms = 1000 * st_case.devices / st_case.workload.rate
    arlo_ms = [devices / rate / one_ms for devices, (rate, _, _) in tables.TRACES_4.items()]
    calm = (settings.BURST_S + settings.CALM_S - burst) / settings.CALM_S
    return f"""## Settings

Fixed on {settings.FIXED_ON}, before any run with a seed that this page shows (`benchmarks/papers/arlo/settings.py`);
seed 101
was for trying the model, and the load of Figure 8 and the pause between two devices that Arlo adds were chosen with it.
Runs with seeds 1 to 3 missed bars of Figures 6b and 11 and of Table 4, and two things changed
after them: the second reading of the allocation was added (below), and the load of Table 3 and Figure 11, which the
paper does not give, became an interval. To make room for them, the traces of Figures 6b, 10b and 11 and of Tables 3 and
4 became shorter. What this page shows is of other seeds.

- *Latency*: Bert-Base takes {settings.BASE_MS} ms at 512 tokens and {RATIO["base"]} times less at 64, Bert-Large
  {RATIO["large"]} times less (§2.1, §2.2). Between them latency rises in equal steps of 64 tokens. The paper gives no
  absolute latency for Bert-Large: {_GRID} ms at 512 tokens are run, and each interval covers them. Figure 6b's load
  overloads ST from {st_ms:.1f} ms on, and Table 4's loads keep
  the ideal runtimes of all requests busy all the time from {min(arlo_ms):.1f} to {max(arlo_ms):.1f} ms on.
- *Dynamic compilation* takes {INFLATION[0]} to {INFLATION[1]} times as long (§2.2), and at which lengths is not said.
  `dt, flat` always takes {INFLATION[0]} times, `dt, rising` goes from the least at one token to the most at 512, and
  `dt, falling` the other way round.
- *INFaaS* spreads its devices evenly over the runtimes, as its allocation does not know the lengths. `infaas` packs
  literally: of all runtimes that are long enough, the busiest instance that can still answer in time. That fills queues
  up to the objective. `infaas, short queues` takes the shortest runtime with an instance at which at most one request
  is, and the busiest of those instances.
- *Arlo* is `allocate` over the lengths of the last {settings.PERIOD_S:.0f} s, every {settings.PERIOD_S:.0f} s, and
  Algorithm 1 with the paper's {THRESHOLD}, {DECAY} and {PEEKED}. A run begins with the allocation for the
  {settings.PERIOD_S:.0f} s before
  it, and one that is shorter than two periods is reallocated in its middle. Where equation 3 asks for more devices
  than there are, the same mix with fewer requests is allocated.
- *Two readings of the allocation*. `arlo` is the equations as they stand. They let the longest runtime have more
  requests than it can answer: equation 3 rounds down, equation 5 demotes to it without a limit, and equation 1 prices
  what is too much as if the queue ended with the period. The words under equation 3 say that "the number of requests
  handled by each instance should not exceed its maximum capacity". `arlo, within capacity` is the same
  `allocate` with a
  table of latencies in which each request above the capacity costs {settings.OVERLOAD_S:.0f} s of mean latency.
- *Replacement*: the least busy instance of a runtime that has too many takes no more requests, answers those that it
  has, and is out of service for {settings.REPLACEMENT_S:.0f} s more; at most {most:.0%} of the devices at once, at
  least one; no more of them than the allocation differs by.
- *Overhead*: {OVERHEAD_MS:.1f} ms are added to each latency (§5.2.1), and no device is busy for them.
- *Lengths*: WordPiece lengths of {sum(map(len, read_lengths())):,} tweets, times 512/125 and cut
  at 512. The file's first {LONG_ROWS_FROM:,} rows are
  shorter than the rest, and within each part there is no drift. So a request is of the second part with a share that
  swings by {settings.LONG_SWING:.2f} around {settings.LONG_SHARE:.2f} in a wave of
  {settings.DRIFT_PERIOD_S:.0f} s, and by
  up to {settings.SECOND_SWING:.0%} from second to second (Figures 1 and 12).
- *Arrivals*: Poisson (Stable), or a Markov-modulated Poisson process (Bursty) of bursts with {settings.BURST_RATE:.0f}
  times the mean rate, {settings.BURST_S} s in the mean, and of {calm:.2f} times the rate for {settings.CALM_S} s. The
  paper gives no parameters; bursts are shorter than a second as its trace has the rate of each second.
- *Seeds*: {", ".join(map(str, settings.SEEDS))}, or fewer where a section says so. All systems answer the same
  requests.
"""


def workload_text(cases: Sequence[Case]) -> str:
    """What the runs of a figure have in common, in words."""
    rates = sorted({case.workload.rate for case in cases})
    rate = f"{rates[0]:,.0f}" if len(rates) == 1 else f"{rates[0]:,.0f} to {rates[-1]:,.0f}"
    patterns = {"stable": "Twitter-Stable", "bursty": "Twitter-Bursty"}
    seeds = sorted({case.workload.seed for case in cases})
    lasts = sorted({case.workload.for_s for case in cases})
    return (
        f"{patterns[cases[0].workload.pattern]}, {rate} requests/s for {lasts[0]:.0f} s, {cases[0].devices:,} GPUs, "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}."
    )


def filled(text: str) -> str:
    """A text with its paragraphs and points in lines of the page's width; headings and tables stay as they are."""
    return "\n\n".join(map(_filled_block, text.split("\n\n")))


def _filled_block(block: str) -> str:
    head = block.partition("\n")[0]
    if head.startswith(("#", "|")):
        return block
    points = block.split("\n- ") if head.startswith("- ") else [block]
    lines = []
    for point in points:
        is_point = head.startswith("- ")
        words = _CODE.sub(lambda code: code[0].replace(" ", _KEPT), " ".join(point.removeprefix("- ").split()))
        lines += wrap(
            words, WIDTH, initial_indent="- " * is_point, subsequent_indent="  " * is_point,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines).replace(_KEPT, " ") + "\n" * block.endswith("\n")


def command(table: str) -> str:
    """How a table is run."""
    return f"`python -m benchmarks.papers.arlo --table {table}`"


def figure(name: str, cases: Sequence[Case]) -> str:
    model = {"base": "Bert-Base", "large": "Bert-Large"}[cases[0].profile.model]
    objective_ms = 1000 * cases[0].profile.slo_s
    return f"""## Figure {name}: {model} with a fixed number of devices

{workload_text(cases)} Late: above the objective of {objective_ms:.0f} ms. {command(name)}
"""


def figure_7(cases: Sequence[Case]) -> str:
    return f"""## Figure 7: the mean latency by the load, Bert-Base

{workload_text(cases)} Paper: below 1,000 requests/s all systems are alike, and ST is the first whose queues grow.
{command("7")}
"""


def figure_8(cases: Sequence[Case]) -> str:
    low, high = settings.LARGE_MS[0], settings.LARGE_MS[-1]
    return f"""## Figure 8: devices with scaling, Bert-Large

{workload_text(cases)} The paper gives no load: here ST has in the mean the work of the {settings.FIRST_DEVICES} devices
that all systems begin with, and the load swings by {settings.LOAD_SWING:.0%} in {settings.LOAD_PERIOD_S:.0f}
s. Arlo adds
a device where the 98th percentile of the last {settings.RECENT_S:.0f} s reaches {settings.SCALE_UP_AT:.0%} of the
objective, at most one in that time, and releases one where that of a minute is below {settings.SCALE_DOWN_AT:.0%}. The
others have devices for {settings.HEADROOM} times the work of the last {settings.HEADROOM_OVER_S:.0f} s, and release one
after {settings.HEADROOM_STAYS_S:.0f} s with too many. Intervals are over {low:g} and {high:g} ms; the two
columns differ
in whether a system may release devices that it began with. {command("8")}
"""


def figure_11(cases: Sequence[Case]) -> str:
    return f"""## Figure 11: numbers of runtimes, Bert-Large

{workload_text(cases)} The paper gives no load: {_LOADS} of the devices are busy where each request is in its ideal one
of 8 runtimes, with {settings.LARGE_MS[-1]:g} ms at 512 tokens. At first the load was {settings.UTILIZATIONS[-1]:.0%}
alone; the lower ones were added when more requests were late at it than in the paper. {command("11")}
"""


def table_3(cases: Sequence[Case]) -> str:
    return f"""## Table 3: allocations, Bert-Large

{workload_text(cases)} The loads are those of Figure 11. `arlo, even` has as many devices for each runtime,
`arlo, global`
what `allocate` says for the lengths of the whole run, and neither changes. {command("3")}
"""


def table_4() -> str:
    lines = [
        f"- {devices:,} GPUs: {rate:,.0f} requests/s for {for_s:.0f} s, seeds {', '.join(map(str, seeds))}"
        for devices, (rate, for_s, seeds) in tables.TRACES_4.items()
    ]
    return f"""## Table 4: dispatching, Bert-Large

Twitter-Bursty, with Arlo's allocation. ILB: the shortest runtime, its least busy instance. IG: the instance with the
fewest requests, of all that are long enough. {command("4")}

{chr(10).join(lines)}
"""


FIGURE_4 = """## Figure 4: the example of dispatching

The paper says that giving five of the first eight requests to GPU2 makes none late
(`benchmarks/papers/arlo/experiments.py` has
the example). Algorithm 1 with the paper's settings does not do that: it demotes before the shorter runtime is full.
"""

TABLE_2 = f"""## Table 2: seconds of an allocation

{REPEATS} problems of each size, with loads from {LOADS[0]:.0%} to {LOADS[1]:.0%} of the devices; processor time of one
core, in Python, on the machine that wrote the records. {command("measured")}
"""

FIGURE_9 = f"""## Figure 9: milliseconds to dispatch a burst

Two requests for each instance at once, {LEVELS} runtimes, {FULL:.0%} of all capacity taken before. `RuntimeQueues` in
Python, processor time of one core, the median of {BURSTS} bursts. {command("measured")}
"""


def deployed() -> str:
    rates = " and ".join(f"{rate:,.0f} requests/s for {for_s:.0f} s" for rate, for_s in ENDS_S.items())
    return f"""## A session under policy `arlo`

Manager, pilots and policy in Stoker's simulator on the requests of Bert-Base ({DEVICES} devices, {rates}; those of the
first {BEGINS_S:.0f} s do not count), beside the model (`arlo, within capacity`, as the policy allocates). Where nobody
waits the two agree. With the higher rate they differ where instances are congested: the model begins the time that
counts with an allocation by the requests before it and with empty queues, while the session begins with no allocation,
and what it has not answered by then is still to be answered. Which part of a difference is the policy's is not told
apart here. {command("deployed")}
"""


def open_points() -> str:
    return f"""## What is not here

- A testbed: §5.1 is simulated like §5.2.
- Figure 12 and curves of the latency: the records have mean, median and 98th percentile.
- The paper's trace. Its lengths per minute are closer to each other than ours (Figure 1a); what that changes is in the
  section on the drift.
- Long traces of large clusters: {settings.PERIOD_S:.0f} s do not pass in Figure 10 and Table 4, so that only one
  reallocation, in the middle, is part of them.
"""


EXPLAINED = """## What explains the misses

- *ST with Bert-Base* (Figures 6a and 10a). ST has devices enough, so that no queue grows, and Arlo's advantage is that
  of padding alone. The paper's reduction is more than its own latencies and its own overhead allow then, whatever the
  lengths: see the first table below.
- *ST with Bert-Large* (Figures 6b and 10b). In Figure 6b the paper's reduction is that of a Bert-Large a little faster
  than the fastest one of the grid. In Figure 10b it is that of the slowest one, with which ST is at the edge of what it
  can do, and its mean grows with the trace. The second table has both.
- *The order of DT, INFaaS and ST* (Figures 6 and 10) depends on the reading. A literal packing fills queues up to the
  objective and makes INFaaS the slowest system where ST is not overloaded; inflation that falls with the length makes
  DT as slow as ST. With `dt, flat` and `infaas, short queues` the order is the paper's in every run of Figures 6a, 10a
  and 10b.
- *DT below Arlo* (Figure 6b). With ten devices and a slow Bert-Large, Arlo's one instance of the longest runtime
  answers all requests that are longer than the common ones, padded to the longest, and is nearly always busy; `dt,
  flat` spreads them over all devices. The allocation leaves no headroom: by equation 3 an instance that is busy all the
  time is within its capacity. The second reading lessens the worst of it, and the drift of lengths is not the cause
  (third table). With many devices (Figure 10b) Arlo is below each other system in every run.
- *Figure 8*. With the right to release the first devices, Arlo needs more of them than INFaaS and than two of the three
  readings of DT: it adds a device by the tail and for the longest runtime, and releases one a minute at most, while the
  headroom follows the work in both directions. Where no system may go below its first devices, Arlo's number is close
  to theirs.
- *Table 3 and Figure 11*. The paper's load is not given. With about half of the devices busy (last table but one)
  `arlo, even` and `arlo` are near the paper's latencies, and the ratio between them is near the paper's. The loads of
  the interval are higher, and with them the queues of `arlo, even` grow for as long as the trace lasts.
- *Table 4* is not explained. Algorithm 1 is not worse than ILB in the mean, and much better with few devices and a slow
  Bert-Large; it is not better than IG there. A request is demoted only when the queues of its runtime have come near to
  what is answered within the objective, and IG goes to the emptiest instance at once. In the paper IG overloads the
  longer runtimes; here that is seen in the tail with more devices alone. Without bursts and without drift (last table)
  the two are alike with the faster of two latencies, and IG is better with the slower one.
- *Figure 9*: a dispatch in Python takes microseconds, and the paper's is written in C++.
"""

PADDING = """### How far below ST's mean Arlo's can be where no request waits

What padding costs ST, by the latencies and the overhead alone. The
last column is what no lengths could exceed. With a load that ST can serve, a larger reduction needs requests that wait
for ST.
"""


def against_st() -> str:
    return f"""### ST with a faster Bert-Large, and with longer traces

Where the load is less than ST can do, its mean depends on how near it is; where it is more, on the length of the trace.
Seed {settings.SEEDS[0]}. {command("experiments")}
"""


def still() -> str:
    return f"""### What the drift of lengths changes

The share of the second part stays at {settings.LONG_SHARE:.2f} but for its swing from second to second. Seed
{settings.SEEDS[0]}. {command("experiments")}
"""


def overhead() -> str:
    return f"""### What it changes if a device is busy for the overhead

The {OVERHEAD_MS:.1f} ms are part of what an instance does. Seed {settings.SEEDS[0]}. {command("experiments")}
"""


def lower_loads(cases: Sequence[Case]) -> str:
    said = "; ".join(f"`{name}` {mean:,.1f}; {p98:,.1f}" for name, (mean, _, p98) in TABLE_3.items())
    said = f"Paper, mean and 98th percentile in milliseconds: {said}."
    return f"""### Table 3 with lower loads

{workload_text(cases)} Where each runtime has as many devices, those for the shorter lengths, which most requests want,
are full long before all devices are busy, and then the queues grow for as long as the trace lasts. {said}
{command("experiments")}
"""


def table_4_apart() -> str:
    return f"""### Table 4 without bursts and without drift

The trace for 25 GPUs, seed {settings.SEEDS[0]}, with the allocation within capacity. {command("experiments")}
"""
