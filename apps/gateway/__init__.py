"""`stoker serve`: one OpenAI-compatible address in front of a session. `stoker dashboard`: the page of any session.

cli.py, options.py  `stoker serve`; cli_usage.py: `stoker serve usage`
run.py              one gateway, from its options to its end; its address
dashboard*.py       `stoker dashboard`: the page and metrics of a session without a gateway
listening.py        sockets, and the server on them
workers.py          the processes that answer with `--workers`; worker.py: one of them; peers.py: calls between them
http.py, wire.py    routes; bounded bodies, answers in OpenAI's form, server-sent events
keys.py             clients by their keys, groups, and limits
usage.py            usage per key, model and day
answering.py        the three model endpoints: read, admit, call, answer
responses.py        `/v1/responses`: its requests as chat requests, its answers and events
tokenizing.py       `/tokenize` and `/detokenize`
functions.py        the decorated functions that answer on a pilot
streaming.py        calls of one request, and the events of a streamed answer
served.py           models by name with their contexts and figures; the session's status
failures.py         errors of calls in OpenAI's words, their causes in the log
figures.py          figures of requests and models for Prometheus, the page and `stoker status`
session_figures.py  a session's figures for the page
session_metrics.py  a session's figures for Prometheus
page.py             the page's events and history
batch_files.py      files, and requests for files and batches
batches.py          batches, each run by a `stoker batch`
batch_process.py    the process of an open batch, its retries, and the limits of its key
batch_usage.py      the usage of a batch, from its answers
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""The name of the application: the folder's name."""
