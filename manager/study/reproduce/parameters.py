"""The unknowns: what the paper does not say and a run depends on, each with the bounds of what is physically possible.

Constant times a kind of GPU alone explain Figure 6 in many ways; Figure 7 is what narrows them down. Two unknowns
need a word. `shared_node`: an agnostic task copies model and environment (14.2 GB, most of it small files of 308
packages) from the shared file system; what one node gets of such a copy is unknown, and far under its link.
`warm_items`: the first inferences of a fresh process are slower (kernels are loaded lazily, memory pools grow); a
task of 100 pays for a hundred of these, a task of 1 for one, and without it no set of bounded parameters explains
both at once where A10s load faster.
"""

from __future__ import annotations

import msgspec


class Parameters(msgspec.Struct, frozen=True):
    """Seconds, bytes a second, items."""

    item_a10_s: float
    item_titan_s: float
    load_a10_s: float
    load_titan_s: float
    call_s: float
    shared_node_bytes_per_s: float
    warm_items: float
    warm_item_s: float
    boot_s: float


class Bound(msgspec.Struct, frozen=True):
    """Between what, and why."""

    low: float
    high: float
    why: str


BOUNDS = {
    "item_a10_s": Bound(
        0.05, 1.0, "1.7 billion parameters in 16 bits are 3.4 GB; at 600 GB/s a token takes 6 ms or more"
    ),
    "item_titan_s": Bound(
        0.1, 3.0, "480 GB/s, and no fast 16-bit arithmetic: not faster than an A10, up to six times slower"
    ),
    "load_a10_s": Bound(
        5.0, 60.0, "importing torch and transformers, reading 3.7 GB from a local disk, 7.4 GB to the GPU"
    ),
    "load_titan_s": Bound(5.0, 60.0, "the same on hosts of 2016; not necessarily slower: fewer GPUs share a disk"),
    "call_s": Bound(0.005, 0.5, "what a task costs between manager and worker, beyond its function"),
    "shared_node_bytes_per_s": Bound(50e6, 1.25e9, "from 20 small files at a time to a full link of 10 Gb/s"),
    "warm_items": Bound(1.0, 300.0, "no more than until every kernel and length was met once"),
    "warm_item_s": Bound(0.0, 0.5, "no more than an inference itself"),
    "boot_s": Bound(5.0, 60.0, "from the start of a batch job to a connected worker"),
}
MOST_SLOWER = 6.0
"""A TITAN X takes at most so many times as long as an A10, and never less."""


def possible(parameters: Parameters) -> bool:
    """Whether all bounds hold, also the one between the two kinds of GPU."""
    inside = all(bound.low <= getattr(parameters, name) <= bound.high for name, bound in BOUNDS.items())
    return inside and 1.0 <= parameters.item_titan_s / parameters.item_a10_s <= MOST_SLOWER
