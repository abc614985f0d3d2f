"""Two ranks of torch.distributed over Gloo: this process, and one that it starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

PEER = """
import datetime, sys, time, torch, torch.distributed as dist
place, how = sys.argv[1:]
limit = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", init_method="file://" + place, rank=1, world_size=2, timeout=limit)
x = torch.ones(1 << 20)
dist.all_reduce(x)
if how == "stays away":
    time.sleep(60)
if how == "raises":
    raise KeyError("a mistake of the program's own")
WORK
dist.destroy_process_group()
"""


def _all_reduce(dist: Any, x: Any) -> None:
    dist.all_reduce(x)


def _broadcast(dist: Any, x: Any) -> None:
    dist.broadcast(x, src=1)


def _recv(dist: Any, x: Any) -> None:
    dist.recv(x, src=1)


def _barrier(dist: Any, _x: Any) -> None:
    dist.barrier()


OPERATIONS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "all_reduce": (_all_reduce, "dist.all_reduce(x)"),
    "broadcast": (_broadcast, "dist.broadcast(x, src=1)"),
    "recv": (_recv, "dist.send(x, dst=0)"),
    "barrier": (_barrier, "dist.barrier()"),
}


def meet(place: str, operation: str, *, peer: str) -> float:
    """Reduce with a peer, then do something else with it. `peer`: it `stays`, `is killed` before that, or `raises`."""
    import datetime

    import torch
    import torch.distributed as dist

    here, theirs = OPERATIONS[operation]
    how = {"is killed": "stays away"}.get(peer, peer)
    other = subprocess.Popen(
        [sys.executable, "-c", PEER.replace("WORK", theirs), place, how], stderr=subprocess.DEVNULL
    )
    try:
        limit = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=2, timeout=limit)
        x = torch.ones(1 << 20)
        dist.all_reduce(x)
        if peer == "is killed":
            other.kill()
            other.wait()
        elif peer == "raises":
            other.wait()
        here(dist, x)
        return float(x[0])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if other.poll() is None and peer != "stays":
            other.kill()
        other.wait()
