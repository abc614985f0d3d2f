"""SchedMate's scheduling (its §4.3 and §5.3) on jobs of Philly: shortest first, with predictions that are wrong.

settings.py     windows, loads, errors and seeds, fixed before any result was seen
trace.py        the jobs of a file that this repository does not ship, its windows, and the GPUs that they imply
errors.py       how wrong predictions are: not at all, as ours, as the paper's, as Lucid's, without any information
our_errors.py   the errors of our estimates, taken from benchmarks/papers/schedmate/estimates.py
our_errors.json what it found
systems.py      the policies that are compared, and with which errors
simulate.py     one window under one policy: the manager's core and its pilots, in virtual time
records.py      results that are kept, in docs/reproduction/schedmate.json
intervals.py    means and ratios over windows, with a paired bootstrap
report.py       the page of them, docs/reproduction/schedmate.md: texts.py has its words, drawing.py its figure

The policies are benchmarks/baselines/shortest_first.py and benchmarks/baselines/tiresias.py.

`python -m benchmarks.papers.schedmate.scheduling` runs what this release has not run, and writes the
page.
"""
