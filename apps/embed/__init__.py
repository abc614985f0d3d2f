"""Embed the texts of a data file: exactly one vector per row, even if processes are killed.

functions.py the decorated function that runs on a pilot; start here
options.py   the options of a run
run.py       one run, from its file to its results
cli.py       `stoker run embed`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""The name for `stoker run`: the folder's name."""
