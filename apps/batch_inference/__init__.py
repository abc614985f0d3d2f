"""Answer OpenAI batch files with your own models: one request per input line, one answer or error per output line.

`functions.py` has the decorated functions that run on a pilot; start there.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
