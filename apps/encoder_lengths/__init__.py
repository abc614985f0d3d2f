"""Measure how long an encoder takes per text length, and choose the input lengths of its runtimes.

The decorated function in `functions.py` runs on a pilot. Read `functions.py` first.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
