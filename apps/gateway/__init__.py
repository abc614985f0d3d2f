"""`stoker serve`: one OpenAI-compatible address in front of a session, which outlives the jobs that answer.

Pure:
    limits.py       what one key may ask in a minute
    wishes.py       what of a body is the gateway's own business: how many choices, and whether in pieces
    batch_bodies.py what the body of a request for a batch asks
    chunks.py       the events of an answer that is streamed
    failures.py     errors of calls as OpenAI words them, without their causes
    failure_log.py  the causes, in the log
    first_tokens.py when a request may have its first token
    meters.py       what was asked of a model, and how fast it answered
The session:
    functions.py    the decorated functions that answer on a pilot
    calls.py        calls of one request, whose pieces come together
    served.py       models by name, each with its context
    watch.py        what the session says of itself, asked at most once a second; models that stay warm
HTTP:
    guard.py        keys: who asks, and whether the limits allow it
    key_file.py     keys on disk, hashed
    wire.py         bodies that are read with a bound, answers in OpenAI's form, events until the client goes
    admission.py    who is refused because the answer would be late
    answering.py    the three endpoints that a model answers
    http.py         all addresses
    uploads.py      files of clients: what batches read and write
    batches.py      batches, each of which is a `stoker batch`
    batch_following.py
                    the process of an open batch, and what is tried again because there was no room
    batch_pace.py   the limits of a key, for its batches
    batch_answers.py
                    output files of a batch that was cut short
    batch_routes.py the addresses of files and batches
    pages.py        the page, its figures, metrics
    metrics.py      the figures for Prometheus
    place.py        where the gateway listens, and that it is there again
    run.py          one gateway, from its options to its end
    cli.py          `stoker serve`
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
"""Its name: that of its folder."""
