"""Answer OpenAI batch files with your own models: one request per input line, one answer or error per output line.

functions.py    the decorated functions that run on a pilot; start here
request_file.py the lines of a request file, checked before anything runs
options.py      the options of a batch, and which model answers a request
run.py          one batch, from its file to its answers; calls that a gateway paces
results.py      the two output files
cli.py          `stoker batch`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""The name for `stoker run`: the folder's name."""
