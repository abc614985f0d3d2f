"""Arlo (ICPP '24): encoders in several static lengths, and each length with the devices that it deserves.

families.py        the runtimes of a model, how fast each is, how many calls come for it
allocation.py      how many devices each runtime gets (§3.3, equations 1 to 7)
residency.py       the allocation of the last 120 s, carried out a few replacements at a time (§4)
dispatch.py        Algorithm 1 over the libraries of a session
provisioning.py    target tracking on the 98th percentile (§4)

Contexts of no family (`stoker.family`, `stoker.encoder_family`) are served as by default.
"""

from __future__ import annotations

from stoker.manager.core.seams import Policies, Provisioning
from stoker.manager.policies.arlo.dispatch import DECAY, PEEKED, THRESHOLD, MultiLevelQueue
from stoker.manager.policies.arlo.families import ArrivalCounts, RuntimeTimes
from stoker.manager.policies.arlo.provisioning import TrackLatency
from stoker.manager.policies.arlo.residency import AllocateRuntimes
from stoker.manager.policies.provisioning import KeepBlocks


def arlo(
    *,
    provisioning: Provisioning | None = None,
    latency_s: float = 1.0,
    period_s: float = 120.0,
    out_of_service: float = 0.1,
    threshold: float = THRESHOLD,
    decay: float = DECAY,
    peeked: int = PEEKED,
    tracks: bool = True,
) -> Policies:
    """Calls to a family go to the shortest runtime that is long enough, or are demoted to a longer one.

    `latency_s`: how long a call may take that does not say so. `period_s`: how often devices are given to runtimes
    anew. `out_of_service`: the share of devices that replacements may take out of service at once. `threshold`, `decay`
    and `peeked`: lambda, alpha and L of Algorithm 1. `tracks`: blocks come and go by the tail latency; else by the
    rules of the site alone.
    """
    times, arrivals = RuntimeTimes(latency_s=latency_s), ArrivalCounts(over_s=period_s)
    base = provisioning or KeepBlocks()
    asked = TrackLatency(base) if tracks else base
    residency = AllocateRuntimes(
        times, arrivals, period_s=period_s, out_of_service=out_of_service, provisioning=asked
    )  # fmt: skip
    dispatch = MultiLevelQueue(times, arrivals, threshold=threshold, decay=decay, peeked=peeked)
    return Policies(dispatch, residency, asked)


__all__ = ["arlo"]
