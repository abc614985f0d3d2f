"""Choose the devices of a context that needs several devices.

All devices of a set are in one pilot and of one kind. Devices of one *island* (`DeviceFacts.island`) have a fast
connection, so sets within an island come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from stoker.manager.core.nouns import Device
from stoker.protocol.to_manager import DeviceFacts


def device_sets(devices: Iterable[Device], count: int) -> Iterator[tuple[Device, ...]]:
    """Yield disjoint sets of `count` devices, those within an island first, in order of the last device of each set."""
    if count == 1:
        for device in devices:
            yield (device,)
        return
    ranked = list(devices)
    rank = {device: number for number, device in enumerate(ranked)}
    near = list(_group_devices(ranked, count, within_island=True))
    used = {device for some in near for device in some}
    far = list(_group_devices([device for device in ranked if device not in used], count, within_island=False))
    for sets in (near, far):
        yield from sorted(sets, key=lambda some: max(rank[device] for device in some))


def _group_devices(devices: Iterable[Device], count: int, *, within_island: bool) -> Iterator[tuple[Device, ...]]:
    groups: dict[tuple[str, str, int], list[Device]] = {}
    for device in devices:
        facts = device.facts
        group = groups.setdefault((device.pilot.id, facts.kind, facts.island if within_island else 0), [])
        group.append(device)
        if len(group) == count:
            yield tuple(group)
            group.clear()


def count_device_sets(devices: Iterable[DeviceFacts], count: int) -> int:
    """Return how many sets of `count` devices of one kind these devices of a pilot form."""
    return sum(number // count for number in Counter(facts.kind for facts in devices).values())
