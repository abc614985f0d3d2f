"""What texts of each length take on an encoder, and the lengths that are worth a runtime of their own.

functions.py the decorated function: what is called on a pilot. Begin here
options.py   the options of a profile
run.py       one profile, from its options to its report
cli.py       `stoker run encoder_lengths`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""Its name, for `stoker run`: that of its folder."""
