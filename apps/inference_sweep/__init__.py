"""Models x prompts x generation parameters over the rows of a data file.

functions.py the decorated function that runs on a pilot; start here
plan.py      the options, the sweep file, and its combinations
run.py       one sweep, from its file to its results
cli.py       `stoker run inference_sweep`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""The name for `stoker run`: the folder's name."""
