"""The unknowns: what the paper does not say and a run depends on, each with the bounds of what is physically possible.

Three of them need a word.

*How long a load takes.* The model takes 3.7 GB of disk and 7.4 GB when it is loaded (§4.1): 1.7 billion parameters of
32 bits. A task reads that file and the libraries of a 10.5 GB environment, widens the numbers, and moves them to the
GPU. A worker has 10 GB of memory (§4.1), less than model and environment together, so that what one task has read need
not be in memory for the next one; and workers of one node share its disk. Neither disks nor GPUs a node are in the
text. So a load is anything from imports that are in memory to a spinning disk that several workers read at once, and
the newer GPU may well be the one that loads slower.

*How much slower the older GPU is.* Text that is made a token at a time is bound by the host that launches small
kernels (no difference), by memory bandwidth (1.25 times), or, with long prompts, by arithmetic (2.8 times in 32 bits,
6 and more where tensor cores are used).

*`warm_items`.* The first inferences of a fresh process are slower (kernels are loaded when they are first used, memory
pools grow); a task of 100 pays for a hundred of these, a task of 1 for one.
"""

from __future__ import annotations

import msgspec


class Parameters(msgspec.Struct, frozen=True):
    item_a10_s: float
    item_titan_s: float
    load_a10_s: float
    load_titan_s: float
    call_s: float
    shared_node_bytes_per_s: float
    network_bytes_per_s: float
    warm_items: float
    warm_item_s: float
    boot_s: float


class Bound(msgspec.Struct, frozen=True):
    low: float
    high: float
    why: str


_LOAD = "imports that are in memory and a fast disk; up to 3.7 GB at 20 MB/s, a spinning disk that workers share"
BOUNDS = {
    "item_a10_s": Bound(0.05, 1.5, "7.4 GB at 600 GB/s are 12 ms a token: from four tokens to a hundred"),
    "item_titan_s": Bound(0.05, 3.0, "7.4 GB at 480 GB/s are 15 ms a token; 1 to 6 times as long as on an A10"),
    "load_a10_s": Bound(5.0, 180.0, _LOAD),
    "load_titan_s": Bound(5.0, 180.0, _LOAD),
    "call_s": Bound(0.005, 0.5, "what a task costs between manager and worker, beyond its function"),
    "shared_node_bytes_per_s": Bound(50e6, 1.25e9, "from 20 small files at a time to a full link of 10 Gb/s"),
    "network_bytes_per_s": Bound(0.125e9, 1.25e9, "between two nodes: links of 1 to 10 Gb/s"),
    "warm_items": Bound(1.0, 300.0, "no more than until every kernel and length was met once"),
    "warm_item_s": Bound(0.0, 0.5, "from nothing to about an inference itself"),
    "boot_s": Bound(5.0, 60.0, "from the start of a batch job to a connected worker"),
}
MOST_SLOWER = 6.0
"""An inference on a TITAN X takes at least as long as on an A10, and at most this many times as long."""


def possible(parameters: Parameters) -> bool:
    inside = all(bound.low <= getattr(parameters, name) <= bound.high for name, bound in BOUNDS.items())
    return inside and 1.0 <= parameters.item_titan_s / parameters.item_a10_s <= MOST_SLOWER
