"""Arlo's evaluation (ICPP '24, §5): its systems, its workloads, and a fast model of instances that answer one by one.

settings.py     grids, seeds and settings, fixed before any result was seen
profile.py      the latency of a runtime by its length, from the paper's numbers
workload.py     lengths and arrivals of requests; the lengths are data that this repository does not ship
dispatch.py     which instance takes a request, for INFaaS and for the greedy strategy of Table 4
demand.py       devices of each runtime: Arlo's allocation, and an even one
fleet.py        instances, what each has to do, and their replacement
scaling.py      reallocation every 120 s, and the two ways to add and release devices
queues.py       the event loop: arrivals, ends, and what is measured
cases.py        one run: a system, a workload, devices; overheads.py: Table 2 and Figure 9, measured
figure_4.py     the paper's example of dispatching
tables.py       tables and figures as cases; records.py: results that are kept, in docs/reproduction/arlo.json
report.py       the page of them, docs/reproduction/arlo.md: summary.py has the bars, experiments.py what explains
                misses, cells.py and intervals.py numbers as text, paper.py the paper's numbers, texts*.py words

`python -m benchmarks.papers.arlo --table 6a`, `python -m benchmarks.papers.arlo --table all`
"""
