"""Variants of the policy `slinfer` for `gateway_objectives` and `make gpu`."""

from __future__ import annotations

from stoker.manager.core.nouns import Call, Library
from stoker.manager.core.seams import Policies, Send
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.slinfer import slinfer
from stoker.manager.policies.slinfer.dispatch import OfferByHeadroom, ResizeLate
from stoker.manager.policies.slinfer.placement import CacheSizes, InstancePlaces
from stoker.manager.policies.slinfer.validation import ComputeOutlook


def patient() -> Policies:
    """Return `slinfer` that keeps its instances, for `make gpu`."""
    return slinfer(keep_alive_s=3600.0)


class SendAtOnce(OfferByHeadroom):
    """Sends calls without an offer. It needs libraries that are loaded with memory for all of them."""

    def _offer(self, call: Call, library: Library, reserve_bytes: int, *preempted: Library) -> Send:  # noqa: ARG002
        return Send(call.id, library.id)


def accepting() -> Policies:
    """Return `slinfer` whose pilots accept every call they are sent, for the replays of `gateway_objectives`."""
    sizes, provisioning = CacheSizes(watermark=0.25), KeepBlocks()
    places = InstancePlaces(sizes, ComputeOutlook(), shares=True, uses_cpus=True)
    dispatch = SendAtOnce(sizes, places, keep_alive_s=1.0, consolidates=False, drops=False)
    return Policies(dispatch, ResizeLate(sizes, places, resizes=False, provisioning=provisioning), provisioning)
