"""Decide which devices suit a context, how much memory it needs, and where a failed load is tried again.

After a failed load a context is *probed*: the policy loads one library at a time, on the pilots with the fewest
failures, until a load succeeds or the core stops trying. A context on several devices gets devices of one kind in one
pilot. Devices of one *island* (`DeviceFacts.island`) are preferred, because their connection is fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from stoker.manager.core.blame import why_pilot_is_unfit
from stoker.manager.core.deadlines import has_time_for_load
from stoker.manager.core.nouns import Context, Device, Library, LibraryState, Pilot
from stoker.manager.core.seams import Load, View
from stoker.pilot.core.memory import declared_bytes, is_limited_to_one_process
from stoker.protocol.ids import RecipeKey
from stoker.protocol.to_manager import DeviceFacts

ASSUMED_BYTES_WITHOUT_LOADER = 256_000_000  # Memory of a library that loads no model


def required_bytes_if_known(context: Context, facts: DeviceFacts) -> int:
    """Return the bytes that a context needs on a device: declared, or measured plus 10 %, or 0 if unknown."""
    declared = declared_bytes(context.recipe.needs, facts)
    if declared:
        return declared
    if is_limited_to_one_process(facts):
        return facts.memory_bytes
    if not context.recipe.loader:
        return assumed_bytes_without_loader(facts)
    advice = context.advice.get(facts.kind) or context.advice.get("")
    if advice is not None and (advice.peak_bytes or advice.resident_bytes):
        return int(max(advice.peak_bytes, advice.resident_bytes) * 1.1)
    return 0


def assumed_bytes_without_loader(facts: DeviceFacts) -> int:
    if is_limited_to_one_process(facts):
        return facts.memory_bytes
    return min(ASSUMED_BYTES_WITHOUT_LOADER, facts.memory_bytes // 8)


def accepts_device_kind(context: Context, facts: DeviceFacts, *, allows_spare_cores: bool = False) -> bool:
    """Return True if `kinds` names this kind or its first word, or is empty.

    `allows_spare_cores`: empty `kinds` accept spare CPU cores too."""
    kinds = context.recipe.needs.kinds
    if not kinds:
        return not facts.spare or allows_spare_cores
    return facts.kind in kinds or facts.kind.partition(" ")[0] in kinds


def requests_cpu_kind(context: Context) -> bool:
    return any(kind.partition(" ")[0] == "cpu" for kind in context.recipe.needs.kinds)


def rank_spare_cores(context: Context, facts: DeviceFacts) -> int:
    """Return the rank of a device: spare cores -1 (first) if the first of `kinds` names them, else 1; others 0."""
    if not facts.spare:
        return 0
    kinds = context.recipe.needs.kinds
    return -1 if kinds and kinds[0].partition(" ")[0] == facts.kind.partition(" ")[0] else 1


def can_use_device_after_quarantine(context: Context, device: Device) -> bool:
    return not device.reported and accepts_device_kind(context, device.facts)


def can_use_device(context: Context, device: Device, *, allows_spare_cores: bool = False) -> bool:
    return not device.fault and accepts_device_kind(context, device.facts, allows_spare_cores=allows_spare_cores)


MOST_FAILED_LOADS_PER_PILOT = 2  # After this many failed loads of a context, other pilots load it if they can


def may_load(view: View, context: Context, device: Device, *, ignores_failed_loads: bool = False) -> bool:
    """Return False if loads of the context must avoid the device's pilot now."""
    pilot = device.pilot
    if not ignores_failed_loads and count_failed_loads(context, pilot) >= MOST_FAILED_LOADS_PER_PILOT:
        return False
    return has_time_for_load(view, context, device) and not why_pilot_is_unfit(pilot, context.recipe.key, view.now)


def count_failed_loads(context: Context, pilot: Pilot) -> int:
    return context.failed_loads_by_pilot.get(pilot.id, 0)


def distinct_failure_counts(context: Context) -> list[int]:
    return sorted({0, *context.failed_loads_by_pilot.values()})


def has_failed_loads(context: Context) -> bool:
    return context.load_failures > 0


def probe_load_count(alive: Iterable[Library]) -> int:
    return 0 if any(library.state is LibraryState.LOADING for library in alive) else 1


def make_load(context: Context, devices: tuple[Device, ...], memory_bytes: int) -> Load:
    ids = tuple(device.id for device in devices)
    return Load(RecipeKey(context.recipe.key), devices[0].pilot.id, ids, memory_bytes)


def iter_device_sets(devices: Iterable[Device], count: int) -> Iterator[tuple[Device, ...]]:
    """Yield disjoint sets of `count` devices: first sets within one `island`, in the order of their last devices."""
    if count == 1:
        yield from zip(devices)
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
    return sum(number // count for number in Counter(facts.kind for facts in devices).values())


def count_fitting_libraries(context: Context, devices: Iterable[DeviceFacts]) -> int:
    able = (
        x for x in devices if accepts_device_kind(context, x) and required_bytes_if_known(context, x) <= x.memory_bytes
    )
    return count_device_sets(able, context.recipe.needs.devices)
