"""SLINFER (arXiv:2507.00507): many language models on shared devices, each request in time or refused early.

compute.py     what the engines on a device compute (§VI)
memory.py      how much of a device an instance reserves (§VII)
placement.py   which instance is offered a call, where a new one is loaded (§V, §VIII-B)
dispatch.py    offers, preemption, drops, keep-alive (§VIII-A)
residency.py   caches that shrink

Contexts that are no language models, and models that take several devices (§X), are served as by default.

Its other parts are on the pilot: turns by headroom (`stoker.pilot.core.turns`), shadow validation
(`stoker.pilot.core.turns`) and the order of resizes (`stoker.pilot.core.memory`).
"""

from __future__ import annotations

from stoker.manager.core.seams import Policies, Provisioning
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.slinfer.dispatch import OfferByHeadroom, ShrinkLate
from stoker.manager.policies.slinfer.placement import CacheSizes, ComputeOutlook, InstancePlaces


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
    """Calls with a time to first token and a time per output token share devices a token at a time.

    `keep_alive_s`: how long an instance stays that nobody uses. `watermark`: how much more cache than it needs an
    instance reserves. `cpus`: CPUs serve as well, before GPUs. `sharing`: instances share devices. `consolidation`:
    neighbours with smaller batches make room for larger ones. `drops`: a call that has waited for longer than its time
    to first token is dropped.
    """
    sizes, compute = CacheSizes(watermark=watermark), ComputeOutlook()
    placement = InstancePlaces(sizes, compute, shares=sharing, uses_cpus=cpus)
    dispatch = OfferByHeadroom(
        sizes, placement, keep_alive_s=keep_alive_s, consolidates=consolidation, drops=drops
    )  # fmt: skip
    asked = provisioning or KeepBlocks()
    residency = ShrinkLate(sizes, resizes=sharing, provisioning=asked)
    return Policies(dispatch, residency, asked)


__all__ = ["slinfer"]
