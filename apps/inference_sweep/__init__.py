"""Generate texts for the rows of a data file, with every combination of models, prompts and generation parameters.

The decorated function in `functions.py` runs on a pilot. Read `functions.py` first.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
