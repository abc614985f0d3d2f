"""Embed the texts of a data file: exactly one vector per row, even if processes are killed.

`functions.py` has the decorated function that runs on a pilot; start there.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
