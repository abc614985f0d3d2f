"""Prompt for Fact (Pervasive Context Management §4.1): which prompt makes a model the best checker of claims?

claims.py      labelled claims from a file
prompts.py     prompt templates and the words that answer them
functions.py   the decorated functions: what stays hot, and what is called. Begin here
statistics.py  answers, intervals, confusion matrices, paired comparison
results.py     the rows of the final file, and the figures of the report made from them
report.py      the report as text
run.py         one run from options to report
cli.py         `stoker run fact_verification`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""Its name, for `stoker run`: that of its folder."""
