"""Prompt for Fact (Pervasive Context Management §4.1): which prompt makes a model check claims best?

functions.py   the decorated function that runs on a pilot; start here
options.py     the options of a run; claims; prompt templates and their answer words
run.py         one run, from its options to its report
results.py     answers, rows and figures with their statistics; the report
cli.py         `stoker run fact_verification`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""The name for `stoker run`: the folder's name."""
