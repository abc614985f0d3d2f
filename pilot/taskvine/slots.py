"""The slots of a pool as devices, as the manager knows them."""

from __future__ import annotations

from stoker.manager.protocol.ids import DeviceId
from stoker.manager.protocol.to_manager import DeviceFacts
from stoker.pilot.taskvine.engine import Worker
from stoker.pilot.taskvine.plan import Plan


def slots_of(worker: Worker, plan: Plan, *, workers: int = 0) -> tuple[DeviceFacts, ...]:
    """One device a library that so many workers like this one can hold at once (0: as many workers as there may be).

    On GPUs where the plan wants them (or `auto` finds some), else on cores. Memory is shared out evenly; TaskVine
    does not say which kind of GPU it is, so the kind is `gpu`.
    """
    wanted, _, count = plan.devices.partition(":")
    on_gpu = wanted != "cpu" and worker.gpus > 0
    each = worker.gpus if on_gpu else min(int(count or worker.cores), worker.cores)
    each = max(1, each)
    kind, name = ("gpu (TaskVine)", "cuda") if on_gpu else ("cpu (TaskVine)", "cpu")
    return tuple(
        DeviceFacts(
            device=DeviceId(f"{name}:{number}"),
            kind=kind,
            memory_bytes=worker.memory_bytes // each,
            cores=max(1, worker.cores // each),
        )
        for number in range(each * (workers or plan.most_workers))
    )
