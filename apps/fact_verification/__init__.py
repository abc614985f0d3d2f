"""Prompt for Fact (Pervasive Context Management §4.1): find the prompt template with which a model checks claims best.

The decorated function in `functions.py` runs on a pilot. Read `functions.py` first.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
