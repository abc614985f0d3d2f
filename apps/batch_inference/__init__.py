"""OpenAI batch files, answered by models of your own: a request a line in, an answer or an error a line out.

functions.py    the decorated functions: what is called on a pilot. Begin here
request_file.py the lines of a request file, checked before anything runs
options.py      the options of a batch, and which model answers a request
run.py          one batch, from its file to its answers; calls that begin as a gateway allows
results.py      from what calls return to the two files at the end
cli.py          `stoker batch`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""Its name, for `stoker run`: that of its folder."""
