"""Measure an encoder's time per text length, and choose the lengths worth a runtime.

functions.py the decorated function that runs on a pilot; start here
options.py   the options of a profile
run.py       one profile, from its options to its report
cli.py       `stoker run encoder_lengths`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""The name for `stoker run`: the folder's name."""
