"""Measure an encoder's time per text length, and choose the lengths of runtimes.

The decorated function in `functions.py` runs on a pilot. Read `functions.py` first.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
