"""Which instance is offered a call, and where a new one is loaded (SLINFER §V, §VIII-B).

CPUs come first, since GPUs are scarce; of instances on devices of one sort the one with the largest batch, so that
small ones run empty and go (bin packing). A new instance goes where it fits with the least to spare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stoker.manager.core.nouns import Call, Context, Device, Library, LibraryState
from stoker.manager.core.seams import Action, Load, Unload, View
from stoker.manager.policies.sizes import suits
from stoker.manager.policies.slinfer.compute import ComputeOutlook, first_token_left_s, staying
from stoker.manager.policies.slinfer.memory import CacheSizes
from stoker.manager.policies.where_to_load import may_load
from stoker.protocol.ids import RecipeKey


def shares_by_token(context: Context) -> bool:
    """True for a language model that takes one device, whose cache grows with what it serves. Others, and models that
    take several devices (§X), are served as by default."""
    needs = context.recipe.needs
    return needs.token_bytes > 0 and needs.devices == 1


def instances(context: Context) -> list[Library]:
    """The ready instances of a context in the order in which they are offered a call."""
    ready = [x for x in context.libraries.values() if x.state is LibraryState.READY and x.usable]
    ready.sort(key=lambda x: (not x.devices[0].facts.on_host, -len(x.held), x.id))
    return ready


def loading(context: Context) -> list[Library]:
    """The instances of a context that are on their way."""
    return [x for x in context.libraries.values() if x.state is LibraryState.LOADING and x.usable]


class InstancePlaces:
    """Where there is room for a new instance. `shares`: instances of several models share a device; else each has one
    for itself. `uses_cpus`: CPUs serve as well."""

    def __init__(self, sizes: CacheSizes, compute: ComputeOutlook, *, shares: bool, uses_cpus: bool) -> None:
        self._sizes = sizes
        self._compute = compute
        self._shares = shares
        self._uses_cpus = uses_cpus

    def new_instance(self, view: View, call: Call) -> list[Action]:
        """Actions that load an instance for a call: instances that do nothing leave for it. Empty where there is no
        room."""
        best: tuple[tuple[bool, int, int, str], list[Action]] | None = None
        for device, size, idle in self.places(view, call):
            room, gone = device.budget_bytes, list[Library]()
            for library in idle:
                if room >= size:
                    break
                gone.append(library)
                room += library.promised_bytes
            rank = (not device.facts.on_host, len(gone), room - size, f"{device.pilot.id}/{device.id}")
            if best is not None and best[0] <= rank:
                continue
            required = self._sizes.required(call.group.context, device, (call,))
            promised = min(room, self._sizes.recommended(call.group.context, device, required))
            load = Load(RecipeKey(call.group.context.recipe.key), device.pilot.id, (device.id,), promised)
            why = f"{call.group.context.recipe.name} needs the room, and nothing runs here"
            best = rank, [*(Unload(library.id, why) for library in gone), load]
        return best[1] if best is not None else []

    def size(self, device: Device, call: Call) -> int:
        """Bytes without which an instance for a call is not loaded on a device."""
        if not self._shares:
            return device.facts.memory_bytes
        return self._sizes.required(call.group.context, device, (call,))

    def places(
        self, view: View, call: Call, *, leaving: frozenset[int] = frozenset(), ends_idle: bool = True
    ) -> Iterator[tuple[Device, int, list[Library]]]:
        """Devices where a new instance would serve a call in time, with the bytes that it needs there and the instances
        that do nothing, the one that was used longest ago first. There is room for it, with `ends_idle` once those have
        left. `leaving`: libraries that end anyway."""
        context, left_s = call.group.context, first_token_left_s(view, call)
        for device in view.devices():  # what is cheap to see comes first: a call that waits is looked at often
            if (device.facts.on_host and not self._uses_cpus) or not suits(context, device, unnamed_spares=True):
                continue
            if self._compute.is_too_slow(device, call, left_s=left_s):
                continue
            here = [library for library in staying(device) if library.id not in leaving]
            if any(library.context is context for library in here):
                continue
            idle = [x for x in here if x.state is LibraryState.READY and not x.load]
            size, room = self.size(device, call), device.budget_bytes
            if room + (sum(library.promised_bytes for library in idle) if ends_idle else 0) < size:
                continue
            gone = leaving.union(library.id for library in idle)
            if self._compute.is_too_full(device, call, left_s=left_s, leaving=gone):
                continue
            if not may_load(view, context, device):
                continue
            idle.sort(key=lambda library: (library.used_at, library.id))
            yield device, size, idle

    def fits_elsewhere(self, view: View, calls: Iterable[Call], *, but: Library) -> bool:
        """True if each of these calls of an instance would find room without it: in another instance, or a new one."""
        for call in calls:
            others = [x for x in instances(call.group.context) if x is not but]
            if any(self._sizes.admit(other, call) is not None for other in others):
                continue
            elsewhere = self.places(view, call, leaving=frozenset((but.id,)), ends_idle=False)
            beside = (device for device, _, _ in elsewhere if device not in but.devices)
            if next(beside, None) is None:
                return False
        return True
