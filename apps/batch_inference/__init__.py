"""OpenAI batch files, answered by models of your own: a request a line in, an answer or an error a line out.

functions.py    the decorated functions: what stays hot, and what is called. Begin here
request_file.py the lines of a request file, checked before anything runs
output.py       the lines of the two files, in OpenAI's form
models.py       which model answers a request: `--model`
pacing.py       calls that begin as a gateway allows
results.py      from what calls bring back to the two files at the end
options.py      what a run can be told
run.py          one batch, from its file to its answers
cli.py          `stoker batch`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""Its name, for `stoker run`: that of its folder."""
