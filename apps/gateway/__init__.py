"""`stoker serve`: one OpenAI-compatible address in front of a session, which outlives the jobs that answer.

cli.py, options.py  `stoker serve`
run.py              one gateway, from its options to its end; its address
http.py, wire.py    routes; bounded bodies, answers in OpenAI's form, server-sent events
keys.py             clients by their keys, and the limits of keys
answering.py        the three model endpoints: read, admit, call, answer
functions.py        the decorated functions that answer on a pilot
streaming.py        calls of one request, and the events of a streamed answer
served.py           models by name with their contexts and figures; the session's status
failures.py         errors of calls in OpenAI's words, their causes in the log
figures.py          figures for Prometheus, the page and `stoker status`
batch_files.py      files, and requests for files and batches
batches.py          batches, each of which is a `stoker batch`
batch_process.py    the process of an open batch, its retries, and the limits of its key
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""The name of the application: the folder's name."""
