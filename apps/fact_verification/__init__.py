"""Prompt for Fact (Pervasive Context Management §4.1): which prompt makes a model check claims best?

`functions.py` has the decorated function that runs on a pilot; start there.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
