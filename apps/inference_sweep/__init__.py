"""Models x prompts x generation parameters over the rows of a data file.

functions.py the decorated function: what is called on a pilot. Begin here
plan.py      the options and the sweep file, and the combinations that it comes to
run.py       one sweep from its file to its results
cli.py       `stoker run inference_sweep`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""Its name, for `stoker run`: that of its folder."""
