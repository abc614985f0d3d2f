"""Arlo (ICPP '24): serve an encoder that is compiled for several input lengths, and divide devices among the versions.

Contexts that are in no family (`stoker.family`, `stoker.encoder_family`) use the default policies.
"""

from __future__ import annotations

from stoker.manager.core.seams import Policies, Provisioning
from stoker.manager.policies.arlo.allocation import ArrivalCounts, RuntimeTimes
from stoker.manager.policies.arlo.dispatch import DECAY, PEEKED, THRESHOLD, MultiLevelQueue
from stoker.manager.policies.arlo.provisioning import ScaleBlocksByLatency
from stoker.manager.policies.arlo.residency import AllocateRuntimes
from stoker.manager.policies.provisioning import KeepBlocks


def arlo(
    *, provisioning: Provisioning | None = None, latency_s: float = 1.0, period_s: float = 120.0,
    out_of_service: float = 0.1, threshold: float = THRESHOLD, decay: float = DECAY, peeked: int = PEEKED,
    tracks: bool = True,
) -> Policies:  # fmt: skip
    """Run each call of a family in the shortest runtime that is long enough, or demote the call to a longer runtime.

    Args:
        provisioning: replaces the default provisioning policy.
        latency_s: default latency objective, in seconds.
        period_s: seconds between two allocations.
        out_of_service: share of devices that may be out of service during replacements.
        threshold: lambda of Algorithm 1.
        decay: alpha of Algorithm 1.
        peeked: L of Algorithm 1.
        tracks: request and release blocks by the tail latency.
    """
    times, arrivals = RuntimeTimes(latency_s=latency_s), ArrivalCounts(over_s=period_s)
    base = provisioning or KeepBlocks()
    asked = ScaleBlocksByLatency(base) if tracks else base
    residency = AllocateRuntimes(times, arrivals, period_s=period_s, out_of_service=out_of_service, provisioning=asked)
    dispatch = MultiLevelQueue(times, arrivals, threshold=threshold, decay=decay, peeked=peeked)
    return Policies(dispatch, residency, asked)


__all__ = ["arlo"]
