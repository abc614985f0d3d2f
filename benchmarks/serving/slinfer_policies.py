"""Variants of the policy `slinfer` for `gateway_objectives` and `make gpu`."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.manager.core.nouns import Call
from stoker.manager.core.seams import Action, Policies, Send, View
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.slinfer import slinfer
from stoker.manager.policies.slinfer.dispatch import DelayedResize, OfferByHeadroom
from stoker.manager.policies.slinfer.placement import CacheSizes, InstancePlacement, list_ready_instances
from stoker.manager.policies.slinfer.validation import ComputeOutlook, ttft_objective_s


def patient() -> Policies:
    """Return `slinfer` that keeps its instances, for `make gpu`."""
    return slinfer(keep_alive_s=3600.0)


class ForceSomeCalls(OfferByHeadroom):
    """Sends a forced call to the largest instance with free slots and memory. No pilot is asked whether the call is in
    time.

    A call is forced if its objective for the first token is an odd number of milliseconds.
    """

    def _plan(self, view: View, call: Call) -> Iterator[Action]:
        if round(1000 * ttft_objective_s(call)) % 2:
            for library in list_ready_instances(call.group.context, largest_first=True):
                grows = self._sizes.admit(library, call) if library.load < library.slots else None
                if grows is not None and library.admits(call):
                    yield Send(call.id, library.id, reserve_bytes=grows)
                    return
        yield from super()._plan(view, call)


def forcing() -> Policies:
    """Return `slinfer` with forced calls, for the replays of `gateway_objectives`."""
    sizes, provisioning = CacheSizes(watermark=0.25), KeepBlocks()
    places = InstancePlacement(sizes, ComputeOutlook(), shares=True, uses_cpus=True)
    dispatch = ForceSomeCalls(sizes, places, keep_alive_s=1.0, consolidates=True, drops=True)
    return Policies(dispatch, DelayedResize(sizes, places, resizes=True, provisioning=provisioning), provisioning)
