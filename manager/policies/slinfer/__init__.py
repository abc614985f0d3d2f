"""SLINFER (arXiv:2507.00507): many language models share devices; each request is in time or refused early.

Other contexts, and models on several devices (§X), get the default policies. The pilot's part is in
`stoker.pilot.core`: turns by headroom and shadow validation (`turns`), the order of resizes (`memory`).
"""

from __future__ import annotations

from stoker.manager.core.seams import Policies, Provisioning
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.slinfer.dispatch import OfferByHeadroom, ResizeLate
from stoker.manager.policies.slinfer.placement import CacheSizes, InstancePlaces
from stoker.manager.policies.slinfer.validation import ComputeOutlook


def slinfer(
    *,
    provisioning: Provisioning | None = None,
    keep_alive_s: float = 1.0,
    watermark: float = 0.25,
    cpus: bool = True,
    sharing: bool = True,
    consolidation: bool = True,
    drops: bool = True,
) -> Policies:
    """Let calls with a time to first token and a time per output token share devices a token at a time.

    Args:
        provisioning: replaces the default provisioning.
        keep_alive_s: seconds for which an unused instance stays.
        watermark: share of cache reserved beyond the required cache.
        cpus: CPUs serve too, before GPUs.
        sharing: instances share devices.
        consolidation: calls go to large batches first, and smaller neighbours make room for them (§VIII).
        drops: drop a call that has waited longer than its time to first token.
    """
    sizes, compute = CacheSizes(watermark=watermark), ComputeOutlook()
    placement = InstancePlaces(sizes, compute, shares=sharing, uses_cpus=cpus)
    dispatch = OfferByHeadroom(
        sizes, placement, keep_alive_s=keep_alive_s, consolidates=consolidation, drops=drops
    )  # fmt: skip
    asked = provisioning or KeepBlocks()
    residency = ResizeLate(sizes, placement, resizes=sharing, provisioning=asked)
    return Policies(dispatch, residency, asked)


__all__ = ["slinfer"]
