"""The slots of a pool: which devices they are to the manager, and which library has which."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.pilot.taskvine.engine import VineWorker
from stoker.pilot.taskvine.plan import VinePlan
from stoker.pilot.taskvine.pool_library import PoolLibrary
from stoker.protocol.ids import DeviceId
from stoker.protocol.to_manager import DeviceFacts


class Slots:
    """Which library has which slots, and which wait for theirs, in the order in which they came."""

    def __init__(self) -> None:
        self._holders: dict[DeviceId, PoolLibrary] = {}
        self._waiting: list[PoolLibrary] = []

    def want(self, library: PoolLibrary) -> None:
        """A library waits for its slots."""
        self._waiting.append(library)

    def waiting(self) -> Iterator[PoolLibrary]:
        """Libraries that wait, also while they are given theirs."""
        for library in tuple(self._waiting):
            if library in self._waiting:
                yield library

    def holders(self, library: PoolLibrary) -> list[PoolLibrary]:
        """The libraries that have the slots of one that waits."""
        found = {self._holders[device] for device in library.devices if device in self._holders}
        return sorted(found, key=lambda holder: holder.number)

    def take(self, library: PoolLibrary) -> None:
        """A library that waited has its slots from now on."""
        self._waiting.remove(library)
        self._holders.update(dict.fromkeys(library.devices, library))

    def release(self, library: PoolLibrary) -> None:
        """A library has ended: its slots are free, and it waits for none."""
        if library in self._waiting:
            self._waiting.remove(library)
        for device in library.devices:
            if self._holders.get(device) is library:
                del self._holders[device]


def slots_of(worker: VineWorker, plan: VinePlan, *, workers: int = 0) -> tuple[DeviceFacts, ...]:
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
