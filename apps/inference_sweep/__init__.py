"""Run models x prompts x generation parameters over the rows of a data file.

The decorated function in `functions.py` runs on a pilot. Read `functions.py` first.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
