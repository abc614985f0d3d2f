"""The cold pool: devices that hold nothing, found when somebody needs them, and each given away once a round.

A library that loads nothing (of calls that want no context) takes no room that counts, and leaves its device cold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from stoker.manager.core.nouns import Context, Device, Library, LibraryState
from stoker.manager.core.seams import View
from stoker.manager.policies.where_to_load import failures, is_probed, may_load, ranks

Replica = tuple[Device, ...]
"""Devices of one pilot that a replica is to be loaded on."""

_Fits = Callable[[Context, Device], bool]


def cold_devices(view: View) -> list[Device]:
    """Those that hold nothing."""
    return [device for device in view.devices() if not any(map(makes_warm, device.libraries.values()))]


class ColdDevices:
    """What is cold in a round. `fits`: whether a context has room on a device."""

    def __init__(self, view: View, cold: list[Device], *, fits: _Fits) -> None:
        self._view = view
        self._fits = fits
        self._cold = cold
        self._gone: set[Device] = set()
        self._found: dict[str, tuple[list[Replica], Iterator[Replica]]] = {}
        self.taken: dict[int, list[Replica]] = {}
        """By job."""

    def count(self, model: str, *, most: int) -> int:
        """How many replicas of a model could be warmed; not counted further than `most`. None while loads of it fail:
        these are probed one at a time."""
        return 0 if is_probed(self._view.contexts[model]) else len(self.find(model, most=most))

    def take(self, model: str, count: int, *, job: int) -> None:
        """So many are warmed for a job."""
        self.taken.setdefault(job, []).extend(self.pick(model, count))

    def find(self, model: str, *, most: int) -> list[Replica]:
        """At most `most` replicas that could be warmed now."""
        if most <= 0:
            return []
        if model not in self._found:
            self._found[model] = [], self._replicas(self._view.contexts[model])
        found, more = self._found[model]
        if self._gone:
            found[:] = [devices for devices in found if not self._gone.intersection(devices)]
        found += islice(more, max(0, most - len(found)))
        return found[:most]

    def pick(self, model: str, count: int) -> list[Replica]:
        """So many are warmed, fewer if there are no more."""
        picked = self.find(model, most=count)
        self.give(picked)
        return picked

    def give(self, replicas: list[Replica]) -> None:
        """These devices are given away."""
        for devices in replicas:
            self._gone.update(devices)

    def has_given(self, devices: Replica) -> bool:
        """Whether one of these was given away in this round."""
        return not self._gone.isdisjoint(devices)

    def _replicas(self, context: Context) -> Iterator[Replica]:
        """Devices that would do, where it has failed least first."""
        wants = context.recipe.needs.devices
        for rank in ranks(context):
            together: dict[str, list[Device]] = {}
            for device in self._cold:
                pilot = device.pilot
                if device in self._gone or failures(context, pilot) != rank:
                    continue
                if not self._would_do(context, device):
                    continue
                if wants == 1:
                    yield (device,)
                    continue
                some = together[pilot.id] = [x for x in together.get(pilot.id, ()) if x not in self._gone]
                some.append(device)
                if len(some) == wants:
                    yield tuple(together.pop(pilot.id))

    def _would_do(self, context: Context, device: Device) -> bool:
        return self._fits(context, device) and may_load(self._view, context, device, desperate=True)

    def coming(self, context: Context) -> int:
        """Replicas for which devices become cold any moment."""
        devices = 0
        for device in self._view.devices():
            there = [library for library in device.libraries.values() if makes_warm(library)]
            devices += bool(there) and all(library.state is LibraryState.STOPPING for library in there)
        return devices // context.recipe.needs.devices


def makes_warm(library: Library) -> bool:
    """Whether a library makes its device warm."""
    return bool(library.context.recipe.loader)
