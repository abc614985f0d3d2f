"""Prompt for Fact (Pervasive Context Management §4.1): which prompt makes a model the best checker of claims?

functions.py   the decorated function: what is called on a pilot. Begin here
options.py     the options of a run; claims from a file; prompt templates and the words that answer them
run.py         one run from options to report
results.py     answers, rows and figures with their statistics; the report as text
cli.py         `stoker run fact_verification`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""Its name, for `stoker run`: that of its folder."""
