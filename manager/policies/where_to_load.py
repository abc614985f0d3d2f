"""Decide which devices suit a context, how much memory it needs, and where a failed load is tried again.

After a failed load a context is *probed*: the policy loads one library at a time, on the pilots with the fewest
failures, until a load succeeds or the core stops trying. A context on several devices gets devices of one kind in one
pilot. Devices of one *island* (`DeviceFacts.island`) are preferred, because their connection is fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from stoker.manager.core.blame import pilot_unfit_reason
from stoker.manager.core.deadlines import has_time_for_load
from stoker.manager.core.nouns import Context, Device, Library, LibraryState, Pilot
from stoker.manager.core.seams import Load, View
from stoker.pilot.core.memory import declared_bytes, is_limited_to_one_process
from stoker.protocol.ids import RecipeKey
from stoker.protocol.to_manager import DeviceFacts

BARE_BYTES = 256_000_000  # Assumed memory of a library without a loader


def required_bytes_if_known(context: Context, facts: DeviceFacts) -> int:
    """Return the bytes that a context needs on a device: declared, or measured plus 10 %, or 0 if unknown."""
    declared = declared_bytes(context.recipe.needs, facts)
    if declared:
        return declared
    if is_limited_to_one_process(facts):
        return facts.memory_bytes
    if not context.recipe.loader:
        return bare_bytes(facts)
    advice = context.advice.get(facts.kind) or context.advice.get("")
    if advice is not None and (advice.peak_bytes or advice.resident_bytes):
        return int(max(advice.peak_bytes, advice.resident_bytes) * 1.1)
    return 0


def bare_bytes(facts: DeviceFacts) -> int:
    if is_limited_to_one_process(facts):
        return facts.memory_bytes
    return min(BARE_BYTES, facts.memory_bytes // 8)


def accepts_device_kind(context: Context, facts: DeviceFacts, *, unnamed_spares: bool = False) -> bool:
    """Return True if `kinds` names this kind or its first word. `unnamed_spares`: accept spares if `kinds` is empty."""
    kinds = context.recipe.needs.kinds
    if not kinds:
        return not facts.spare or unnamed_spares
    return facts.kind in kinds or facts.kind.partition(" ")[0] in kinds


def requests_cpu_kind(context: Context) -> bool:
    return any(kind.partition(" ")[0] == "cpu" for kind in context.recipe.needs.kinds)


def spare_rank(context: Context, facts: DeviceFacts) -> int:
    """Rank spare cores: -1 (first) if the context's first kind names them, else 1 (last). Other devices have rank 0."""
    if not facts.spare:
        return 0
    kinds = context.recipe.needs.kinds
    return -1 if kinds and kinds[0].partition(" ")[0] == facts.kind.partition(" ")[0] else 1


def can_use_device_after_quarantine(context: Context, device: Device) -> bool:
    return not device.reported and accepts_device_kind(context, device.facts)


def can_use_device(context: Context, device: Device, *, unnamed_spares: bool = False) -> bool:
    return not device.fault and accepts_device_kind(context, device.facts, unnamed_spares=unnamed_spares)


GIVE_UP_ON_PILOT = 2  # Failed loads after which a pilot is avoided while other pilots could load the context


def may_load(view: View, context: Context, device: Device, *, desperate: bool = False) -> bool:
    """Return False if loads must avoid the device's pilot now. `desperate`: ignore failed loads of the pilot."""
    pilot = device.pilot
    if not desperate and failures(context, pilot) >= GIVE_UP_ON_PILOT:
        return False
    return has_time_for_load(view, context, device) and not pilot_unfit_reason(pilot, context.recipe.key, view.now)


def failures(context: Context, pilot: Pilot) -> int:
    return context.failed_on.get(pilot.id, 0)


def ranks(context: Context) -> list[int]:
    return sorted({0, *context.failed_on.values()})


def has_failed_loads(context: Context) -> bool:
    return context.load_failures > 0


def probes(alive: Iterable[Library]) -> int:
    return 0 if any(library.state is LibraryState.LOADING for library in alive) else 1


def load_on(context: Context, devices: tuple[Device, ...], memory_bytes: int) -> Load:
    ids = tuple(device.id for device in devices)
    return Load(RecipeKey(context.recipe.key), devices[0].pilot.id, ids, memory_bytes)


def device_sets(devices: Iterable[Device], count: int) -> Iterator[tuple[Device, ...]]:
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
