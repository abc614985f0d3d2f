"""Embed the texts of a data file: exactly one vector per row, even if processes are killed.

The decorated function in `functions.py` runs on a pilot. Read `functions.py` first.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
