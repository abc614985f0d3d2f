"""Answer OpenAI batch files with your own models: one output line (an answer or an error) per input line.

The decorated functions in `functions.py` run on a pilot. Read `functions.py` first.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
