"""Models x prompts x generation parameters over the rows of a data file.

plan.py      the sweep file, and the combinations that it comes to
functions.py the decorated functions: what stays hot, and what is called. Begin here
options.py   what a run can be told
results.py   from what calls bring back to the rows of the final file
run.py       one sweep from its file to its results
cli.py       `stoker run inference_sweep`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""Its name, for `stoker run`: that of its folder."""
