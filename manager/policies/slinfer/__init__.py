"""SLINFER (arXiv:2507.00507): many language models share devices; each request meets its SLO or is refused early.

Other contexts, and models on several devices (§X), use the default policies. In `stoker.pilot.core`, the pilot
schedules by headroom, with shadow validation (`turns`), and starts resizes (`memory`).
"""

from __future__ import annotations

from stoker.manager.core.seams import Policies, Provisioning
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.slinfer.dispatch import DelayedResize, OfferByHeadroom
from stoker.manager.policies.slinfer.placement import CacheSizes, InstancePlacement
from stoker.manager.policies.slinfer.validation import ComputeOutlook


def slinfer(
    *, provisioning: Provisioning | None = None, keep_alive_s: float = 1.0, watermark: float = 0.25, cpus: bool = True,
    sharing: bool = True, consolidation: bool = True, drops: bool = True,
) -> Policies:  # fmt: skip
    """Let language models share devices one token at a time, for calls with a TTFT and a TPOT objective.

    Args:
        provisioning: replaces the default provisioning policy.
        keep_alive_s: seconds for which an unused instance stays loaded.
        watermark: share of cache reserved beyond the required cache.
        cpus: use CPUs too, before GPUs.
        sharing: instances share devices.
        consolidation: offer calls to large batches first, and preempt smaller neighbours (§VIII).
        drops: drop a call that has waited longer than its time to first token.
    """
    sizes, compute = CacheSizes(watermark=watermark), ComputeOutlook()
    placement = InstancePlacement(sizes, compute, shares=sharing, uses_cpus=cpus)
    dispatch = OfferByHeadroom(sizes, placement, keep_alive_s=keep_alive_s, consolidates=consolidation, drops=drops)
    asked = provisioning or KeepBlocks()
    residency = DelayedResize(sizes, placement, resizes=sharing, provisioning=asked)
    return Policies(dispatch, residency, asked)


__all__ = ["slinfer"]
