"""Embeddings of the texts of a data file: one vector a row, once, whatever is killed meanwhile.

functions.py the decorated function: what is called on a pilot. Begin here
options.py   the options of a run
run.py       one run from its file to its results
cli.py       `stoker run embed`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""Its name, for `stoker run`: that of its folder."""
