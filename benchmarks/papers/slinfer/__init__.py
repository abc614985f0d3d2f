"""SLINFER's evaluation in the simulator: its systems, its workloads, and the step times that its authors measured.

data.py         the authors' files, which are not ours to ship: workloads, and the profile as tables of step times
worlds.py       the nodes of §IX-A, and models as contexts
sllm.py         ServerlessLLM and its extensions, the baselines
cases.py        one run: a system, its models, its nodes, its workload
measures.py     what is measured, from a run's log; sampling.py: memory and batches, from samples of a run
tables.py       tables and figures as cases; table_ii.py: the one that needs no run
records.py      results that are kept, in docs/reproduction/slinfer.json
report.py       the page of them, docs/reproduction/slinfer.md; paper.py: the paper's numbers, texts.py: the words

`python -m benchmarks.papers.slinfer --table III`, `python -m benchmarks.papers.slinfer --system sllm --models 32`
"""
