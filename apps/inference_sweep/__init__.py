"""Models x prompts x generation parameters over the rows of a data file.

`functions.py` has the decorated function that runs on a pilot; start there.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
