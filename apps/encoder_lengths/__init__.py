"""Measure an encoder's time per text length, and choose the lengths worth a runtime.

`functions.py` has the decorated function that runs on a pilot; start there.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
