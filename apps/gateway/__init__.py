"""`stoker serve`: one OpenAI-compatible address in front of a session, which outlives the jobs that answer.

cli.py, options.py  `stoker serve`
run.py              one gateway, from its options to its end; where it listens
http.py, wire.py    all addresses; bodies with a bound, answers in OpenAI's form, events until the client leaves
keys.py             who asks, by the keys on disk, and whether their limits allow it
answering.py        the three endpoints that a model answers: read, admit, call, answer
functions.py        the decorated functions that answer on a pilot
streaming.py        calls of one request, and the events of an answer that is streamed
served.py           models by name, each with its context and its figures; the session's status
failures.py         errors of calls as OpenAI words them, their causes in the log
figures.py          the figures for Prometheus, for the page and for `stoker status`
batch_files.py      what requests for files and batches ask, and files on disk
batches.py          batches, each of which is a `stoker batch`
batch_process.py    the process of an open batch, its retries, and the limits of its key
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""Its name: that of its folder."""
