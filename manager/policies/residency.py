"""Residency, as in Pervasive Context Management (§3): a context is loaded where it is wanted and kept until room is needed.

A context with waiting calls is loaded on one more device as long as its calls would wait longer behind the libraries that
are hot or on their way than the load takes, and no more libraries than calls. While no run was measured the wait counts as
endless: idle devices cost nothing. Several contexts share a device while their memory fits: what a context takes is what it
declares, else what was measured, else (the first time) everything that is free on the device, given back once measured.

Where nothing fits, idle libraries are evicted, least recently used first, just enough on one device. Where nothing is idle
either, a context that has no library at all and has waited for `patience_s` gets a device from the context that holds most of
them: without this a long queue of one context would starve all others, a case on which the paper is silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.manager.core.seams import Action, FailWaiting, Load, Provisioning, Timer, Unload, View
from stoker.manager.core.state import Context, Device, Library, LibraryState, PilotState
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.provisioning import TakeWhatComes
from stoker.manager.protocol.calls import Failure, FailureKind
from stoker.units import show_bytes

BARE_BYTES = 256_000_000
"""What a library that loads nothing is taken to need."""

UNKNOWN_LOAD_S = 10.0
"""How long a load is taken to last before one was measured."""


class LoadWhereWanted(Quiet):
    """The default residency policy."""

    def __init__(
        self, *, patience_s: float = 10.0, ask_again_s: float = 1.0, provisioning: Provisioning | None = None
    ) -> None:
        self.patience_s = patience_s
        self.ask_again_s = ask_again_s
        self.provisioning: Provisioning = provisioning or TakeWhatComes()

    def wanted(self, view: View, context: Context) -> Sequence[Action]:
        """Loads that pay, evictions that make room for one, or a word that it can never be."""
        plan: list[Action] = []
        more = self._worth_loading(context)
        if more <= 0:
            return self._again(view, context, plan)
        taken: dict[str, int] = {}
        for devices in self._places(view, context):
            memory = self._reservation(context, devices[0])
            plan.append(Load(context.recipe.key, devices[0].pilot.id, tuple(d.id for d in devices), memory))  # type: ignore[arg-type]
            taken[devices[0].pilot.id] = taken.get(devices[0].pilot.id, 0) + 1
            more -= 1
            if not more:
                return self._again(view, context, plan)
        if plan or any(x.state is not LibraryState.STOPPING for x in context.libraries.values()):
            if not plan:
                plan += self._evict_idle(view, context)
            return self._again(view, context, plan)
        impossible = self._impossible(view, context)
        if impossible is not None:
            return (FailWaiting(context.recipe.key, impossible),)  # type: ignore[arg-type]
        plan += self._evict_idle(view, context) or self._share(view, context)
        return self._again(view, context, plan)

    def timer(self, view: View, key: str) -> Sequence[Action]:
        """Look again at a context whose calls still wait."""
        context = view.contexts.get(key)
        return self.wanted(view, context) if context is not None and context.queue.count else ()

    def measured(self, view: View, library: Library) -> int:  # noqa: ARG002
        """What it declares, else what it was measured to take and a tenth more."""
        needs = library.context.recipe.needs
        declared = _declared(needs.memory_bytes, needs.device_memory_bytes, library.devices[0])
        if declared:
            return declared
        took = library.device_bytes or library.memory_bytes
        return min(library.promised_bytes, int(took * 1.1)) if took else library.promised_bytes

    # ---- how many

    def _worth_loading(self, context: Context) -> int:
        """How many more libraries pay."""
        alive = [x for x in context.libraries.values() if x.state in (LibraryState.LOADING, LibraryState.READY)]
        slots = context.recipe.slots
        waiting = context.queue.count
        # A library that is still loading has room for `slots` of the waiting calls.
        uncovered = waiting - sum(slots for x in alive if x.state is LibraryState.LOADING)
        most = -(-max(0, uncovered) // slots)
        if not alive:
            most = max(1, most)
        if not context.runs and not context.run_s:
            return most
        load_s = context.load_s or UNKNOWN_LOAD_S
        more, ready = 0, len(alive) * slots
        while more < most and (not ready or waiting * context.run_s / ready > load_s):
            more += 1
            ready += slots
        return more

    # ---- where

    def _places(self, view: View, context: Context) -> Iterator[tuple[Device, ...]]:
        """Device sets with room for the context and without it, the least busy first."""
        needs = context.recipe.needs
        open_devices = [d for d in view.devices() if self._fits(context, d) and not _holds(d, context)]
        open_devices.sort(
            key=lambda d: (context.failed_on.get(d.pilot.id, 0), _busy(d), -d.free_bytes, d.pilot.id, d.id)
        )
        if needs.devices == 1:
            for device in open_devices:
                yield (device,)
            return
        by_pilot: dict[str, list[Device]] = {}
        for device in open_devices:
            together = by_pilot.setdefault(device.pilot.id, [])
            together.append(device)
            if len(together) == needs.devices:
                yield tuple(by_pilot.pop(device.pilot.id))

    def _fits(self, context: Context, device: Device) -> bool:
        return self._suits(context, device) and device.free_bytes >= self._minimum(context, device) > 0

    def _suits(self, context: Context, device: Device) -> bool:
        kinds = context.recipe.needs.kinds
        return not kinds or device.facts.kind in kinds or device.facts.kind.partition(" ")[0] in kinds

    def _reservation(self, context: Context, device: Device) -> int:
        """What to promise while it loads."""
        return max(self._minimum(context, device), 0) if self._known(context, device) else device.free_bytes

    def _known(self, context: Context, device: Device) -> int:
        """What the context takes of such a device in bytes, 0 if nobody knows."""
        needs = context.recipe.needs
        declared = _declared(needs.memory_bytes, needs.device_memory_bytes, device)
        if declared:
            return declared
        if not context.recipe.loader:
            return min(BARE_BYTES, device.facts.memory_bytes // 8)
        advice = context.advice.get(device.facts.kind) or context.advice.get("")
        if advice is not None and (advice.peak_bytes or advice.resident_bytes):
            return int(max(advice.peak_bytes, advice.resident_bytes) * 1.1)
        return 0

    def _minimum(self, context: Context, device: Device) -> int:
        """Free bytes without which it is not tried. An unknown context wants a third of the device, at least."""
        return self._known(context, device) or device.facts.memory_bytes // 3

    # ---- making room

    def _evict_idle(self, view: View, context: Context) -> list[Action]:
        """Evict just enough idle libraries on one device, those that were used longest ago."""
        if any(x.state is LibraryState.LOADING for x in context.libraries.values()):
            return []
        best: tuple[float, list[Library]] | None = None
        for device in view.devices():
            if not self._suits(context, device) or _holds(device, context):
                continue
            short = self._minimum(context, device) - device.free_bytes
            short -= sum(x.promised_bytes for x in device.libraries.values() if x.state is LibraryState.STOPPING)
            if short <= 0:
                return []  # room is on its way
            idle = sorted((x for x in device.libraries.values() if _evictable(x)), key=lambda x: x.used_at)
            chosen: list[Library] = []
            while short > 0 and idle:
                chosen.append(idle.pop(0))
                short -= chosen[-1].promised_bytes
            if short <= 0 and (best is None or chosen[-1].used_at < best[0]):
                best = chosen[-1].used_at, chosen
        if best is None:
            return []
        return [Unload(x.id, f"idle, and room is needed for {context.recipe.name}") for x in best[1]]

    def _share(self, view: View, context: Context) -> list[Action]:
        """A context that has waited long without any library gets a device from whoever holds most of them."""
        if context.starved_since is None or view.now - context.starved_since < self.patience_s:
            return []
        best: tuple[tuple[int, float], Library] | None = None
        for device in view.devices():
            if not self._suits(context, device):
                continue
            if any(x.state is LibraryState.STOPPING for x in device.libraries.values()):
                return []  # somebody already makes room
            short = self._minimum(context, device) - device.free_bytes
            for library in device.libraries.values():
                age = view.now - library.started_at
                if library.state is LibraryState.READY and library.promised_bytes >= short and age > self.patience_s:
                    rank = (len(library.context.libraries), age)
                    if best is None or rank > best[0]:
                        best = rank, library
        if best is None:
            return []
        waited = view.now - context.starved_since
        return [Unload(best[1].id, f"{context.recipe.name} has waited {waited:.0f} s without a device")]

    def _impossible(self, view: View, context: Context) -> Failure | None:
        """Why no device of this site can ever hold the context, if that is so."""
        pilots = [p for p in view.pilots.values() if p.state is PilotState.HERE]
        needs = context.recipe.needs
        if not pilots or self.provisioning.may_bring(view, needs):
            return None
        for pilot in pilots:
            able = [
                d for d in pilot.devices.values()
                if self._suits(context, d) and self._minimum(context, d) <= d.facts.memory_bytes
            ]  # fmt: skip
            if len(able) >= needs.devices:
                return None
        seen: dict[str, int] = {}
        for pilot in pilots:
            for device in pilot.devices.values():
                what = f"{device.facts.kind} {show_bytes(device.facts.memory_bytes)}"
                seen[what] = seen.get(what, 0) + 1
        wants = [f"{needs.devices} devices on one pilot"] if needs.devices > 1 else []
        if needs.kinds:
            wants.append("kind " + " or ".join(needs.kinds))
        memory = max(self._known(context, d) for p in pilots for d in p.devices.values())
        if memory:
            wants.append(f"{show_bytes(memory)} of memory")
        return Failure(
            FailureKind.NO_DEVICE,
            f"context {context.recipe.name} can be loaded nowhere: it needs {', '.join(wants) or 'a device'}; devices seen: "
            + ", ".join(f"{what} x {count}" for what, count in seen.items()),
        )

    def _again(self, view: View, context: Context, plan: list[Action]) -> list[Action]:
        plan.append(Timer(view.now + self.ask_again_s, context.recipe.key))
        return plan


def _declared(memory_bytes: int, device_memory_bytes: int, device: Device) -> int:
    """On a CPU device host memory is the device's memory; on a GPU only device memory counts."""
    return max(memory_bytes, device_memory_bytes) if device.facts.kind.startswith("cpu") else device_memory_bytes


def _holds(device: Device, context: Context) -> bool:
    return any(x.context is context for x in device.libraries.values())


def _busy(device: Device) -> int:
    return sum(bool(x.held) or x.state is LibraryState.LOADING for x in device.libraries.values())


def _evictable(library: Library) -> bool:
    return library.state is LibraryState.READY and not library.held and not library.zombies
