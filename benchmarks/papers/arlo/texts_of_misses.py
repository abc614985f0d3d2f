"""The words of the last part of `docs/reproduction/arlo.md`: what explains misses, and the experiments on them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.cases import Case
from benchmarks.papers.arlo.paper import TABLE_3
from benchmarks.papers.arlo.texts import OVERHEAD_MS, command, workload_text

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
