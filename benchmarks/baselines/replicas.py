"""Shared parts of gang policies: replicas on whole devices, and call durations.

seams.Dispatch plans in rounds and requests loads; residency (`ByOrder`) selects devices. A replica is one library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stoker.manager.core import seams
from stoker.manager.core.nouns import Call, Context, Device, Gang, Library, LibraryState
from stoker.manager.core.per_context import SHORTEST_MEASUREMENT_S, amount_of_work
from stoker.manager.core.seams import Action, Load, Policies, Provisioning, Timer, View
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.residency import UNKNOWN_LOAD_S, WholeDevice
from stoker.protocol.ids import DeviceId, LibraryId, PilotId, RecipeKey

UNKNOWN_RUN_S = 30.0
"""Assumed seconds of a call before the first measurement."""
_ANY_MOMENT = 0.01
"""Assumed remaining seconds of an overdue call."""

Place = tuple[PilotId, tuple[DeviceId, ...]]


class InRounds(Quiet):
    asks_every_call = False
    honours = frozenset({"deadline"})

    def place(self, view: View, call: Call) -> LibraryId | Action | None:  # noqa: ARG002
        return None

    def pull(self, view: View, library: Library) -> int | Sequence[Action]:  # noqa: ARG002
        return 0

    def on_out_of_calls(self, view: View, library: Library) -> Sequence[Action]:  # noqa: ARG002
        return ()

    def window(self, view: View, library: Library) -> int:  # noqa: ARG002
        return 1


class ByOrder(WholeDevice):
    """Residency that starts no loads, and fails calls whose context fits on no device."""

    honours = frozenset()

    def on_waiting_calls(self, view: View, context: Context) -> Sequence[Action]:
        hopeless = self.hopeless_gangs(view, context)
        if hopeless:
            return (*hopeless, Timer(view.now + self.ask_again_s, context.recipe.key))
        if any(library.is_usable for library in context.libraries.values()) or self.places(view, context):
            return (Timer(view.now + self.ask_again_s, context.recipe.key),)
        return [
            action
            for action in super().on_waiting_calls(view, context)
            if isinstance(action, Timer | seams.FailWaiting)
        ]

    def places(self, view: View, context: Context) -> list[tuple[Device, ...]]:
        """Return devices where a replica can load, on the fullest nodes first, to keep whole nodes free."""
        alive = any(library.is_usable for library in context.libraries.values())
        return list(self.open_places(view, context, ignores_failed_loads=not alive))

    def preference(self, context: Context, device: Device) -> tuple[float, ...]:  # noqa: ARG002
        return (sum(not other.libraries for other in device.pilot.devices.values()),)


def policies_by_order(
    make_dispatch: Callable[[ByOrder], seams.Dispatch], provisioning: Provisioning | None
) -> Policies:
    asked = provisioning or KeepBlocks()
    residency = ByOrder(provisioning=asked)
    return Policies(make_dispatch(residency), residency, asked)


def load(context: Context, devices: tuple[Device, ...]) -> Load:
    memory = min(device.facts.memory_bytes for device in devices)
    return Load(RecipeKey(context.recipe.key), devices[0].pilot.id, tuple(d.id for d in devices), memory)


def place_of(devices: Sequence[Device]) -> Place:
    return devices[0].pilot.id, tuple(device.id for device in devices)


def library_at(view: View, context: Context, place: Place) -> Library | None:
    pilot = view.pilots.get(place[0])
    device = pilot.devices.get(place[1][0]) if pilot is not None else None
    for library in device.libraries.values() if device is not None else ():
        if library.context is context and library.is_usable:
            return library
    return None


def is_free(library: Library) -> bool:
    return library.state is LibraryState.READY and not library.held and not library.withdrawn_calls


def send(call: Call, libraries: Sequence[Library]) -> Action:
    if call.group.options.gang[1] == 1:
        return seams.Send(call.id, libraries[0].id)
    return seams.SendGang(call.id, tuple(library.id for library in libraries))


def load_s(context: Context) -> float:
    return context.load_s or UNKNOWN_LOAD_S


def starts_in_s(call: Call, *, size: int) -> float:
    """Return the seconds before the first item on loaded replicas: to connect a gang and to start a call."""
    features = call.spec.features
    before_s = features.seconds_before_first_item(size) if features is not None and not call.spec.progress else 0.0
    return before_s + (call.group.context.paces.meet_s if size > 1 else 0.0)


def item_times_s(call: Call) -> dict[int, float] | None:
    """Return the seconds of all items by number of replicas; None before the first measurement."""
    smallest, largest = call.group.options.gang
    paces, work = call.group.context.paces, amount_of_work(call.spec.features)
    times: dict[int, float] = {}
    for size in range(max(1, smallest), largest + 1):
        seconds = paces.max_seconds(size, work) if largest > 1 else call.group.cost.run_s or None
        if seconds is None:
            return None
        times[size] = max(SHORTEST_MEASUREMENT_S, seconds - (paces.meet_s if largest > 1 and size > 1 else 0.0))
    return times


def share_left(view: View, call: Call) -> float:
    said, features = view.reports.get(call.id), call.spec.features
    items = float(features.items) if features is not None else 1.0
    total = said.total if said is not None and said.total > 0 else max(1.0, items)
    done = said.done if said is not None else 0.0
    if call.holder is not None:
        gang = call.holder if isinstance(call.holder, Gang) else None
        size = len(gang.members) if gang is not None else 1
        began_at = call.sent_at + starts_in_s(call, size=size)
        at = gang.report[0] if gang is not None and gang.report is not None else began_at
        times = item_times_s(call)
        if times and times.get(size):
            done += max(0.0, view.now - at) / times[size] * total
    return max(_ANY_MOMENT, call.group.context.paces.max_share_left(features, done / total, uses_ended_calls=False))
