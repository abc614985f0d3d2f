"""Arlo: length-aware serving of encoders (ICPP '24). So far only what it computes; no policy of that name exists yet.

`allocation` says how many devices each runtime of a model gets (§3.3), `runtime_queues` which instance takes a request
(§3.4).
"""
