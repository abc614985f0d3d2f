"""What policies of gangs share that plan in rounds: replicas on whole devices, loaded only when they are ordered, and
how long a call still takes on so many of them.

Dispatch plans and orders; residency (`ByOrder`) only knows where a replica could be, and says so when a context can be
nowhere. A replica is one library: it has its devices to itself, one or several of one pilot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stoker.manager.core.nouns import Call, Context, Device, Gang, Library, LibraryState
from stoker.manager.core.per_context import LEAST_S, work_of
from stoker.manager.core.seams import (
    Action,
    Dispatch,
    FailWaiting,
    Load,
    Policies,
    Provisioning,
    Send,
    SendGang,
    Timer,
    View,
)
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.provisioning import KeepBlocks
from stoker.manager.policies.residency import UNKNOWN_LOAD_S, WholeDevice
from stoker.protocol.ids import DeviceId, LibraryId, PilotId, RecipeKey

UNKNOWN_RUN_S = 30.0
"""How long a call is taken to run before one has."""
_ANY_MOMENT = 0.01
"""What is taken to be left of a call that should be done by now."""

Place = tuple[PilotId, tuple[DeviceId, ...]]
"""Where a replica is, or is to be."""


class InRounds(Quiet):
    """Dispatch that gives out nothing between its rounds."""

    asks_every_call = False
    honours = frozenset({"deadline"})

    def __init__(self, *, period_s: float) -> None:
        self.period_s = period_s

    def place(self, view: View, call: Call) -> LibraryId | Action | None:  # noqa: ARG002
        """Nowhere: it waits for the next round."""
        return None

    def pull(self, view: View, library: Library) -> int | Sequence[Action]:  # noqa: ARG002
        """Nothing: the next round gives it what it is to have."""
        return 0

    def dry(self, view: View, library: Library) -> Sequence[Action]:  # noqa: ARG002
        """Nothing."""
        return ()

    def window(self, view: View, library: Library) -> int:  # noqa: ARG002
        """One call at a time: it has the devices to itself."""
        return 1


class ByOrder(WholeDevice):
    """Residency that loads nothing by itself, but says of a context that can be nowhere why."""

    honours = frozenset()
    """No limits: dispatch orders its loads."""

    def wanted(self, view: View, context: Context) -> Sequence[Action]:
        """Nothing, or a word that it, or a gang, can never be."""
        hopeless = self.hopeless_gangs(view, context)
        if hopeless:
            return (*hopeless, Timer(view.now + self.ask_again_s, context.recipe.key))
        if any(library.usable for library in context.libraries.values()) or self.places(view, context):
            return (Timer(view.now + self.ask_again_s, context.recipe.key),)
        return [action for action in super().wanted(view, context) if isinstance(action, Timer | FailWaiting)]

    def places(self, view: View, context: Context) -> list[tuple[Device, ...]]:
        """Where a replica could be loaded now: devices that hold nothing. Those beside others that are taken come
        first, so that whole nodes stay free for those that need several devices."""
        alive = any(library.usable for library in context.libraries.values())
        return list(self.open_places(view, context, desperate=not alive))

    def preference(self, context: Context, device: Device) -> tuple[float, ...]:  # noqa: ARG002
        """The fewest free devices on its pilot."""
        return (sum(not other.libraries for other in device.pilot.devices.values()),)


def policies_by_order(make_dispatch: Callable[[ByOrder], Dispatch], provisioning: Provisioning | None) -> Policies:
    """Policies in which dispatch orders what residency is to load."""
    asked = provisioning or KeepBlocks()
    residency = ByOrder(provisioning=asked)
    return Policies(make_dispatch(residency), residency, asked)


def load(context: Context, devices: tuple[Device, ...]) -> Load:
    """The order for a replica there."""
    memory = min(device.facts.memory_bytes for device in devices)
    return Load(RecipeKey(context.recipe.key), devices[0].pilot.id, tuple(d.id for d in devices), memory)


def place_of(devices: Sequence[Device]) -> Place:
    """Where these devices are."""
    return devices[0].pilot.id, tuple(device.id for device in devices)


def library_at(view: View, context: Context, place: Place) -> Library | None:
    """The replica that is there, or on its way to be."""
    pilot = view.pilots.get(place[0])
    device = pilot.devices.get(place[1][0]) if pilot is not None else None
    for library in device.libraries.values() if device is not None else ():
        if library.context is context and library.usable:
            return library
    return None


def is_free(library: Library) -> bool:
    """Whether it could begin a call now."""
    return library.state is LibraryState.READY and not library.held and not library.zombies


def send(call: Call, libraries: Sequence[Library]) -> Action:
    """Start it there."""
    if call.group.options.gang[1] == 1:
        return Send(call.id, libraries[0].id)
    return SendGang(call.id, tuple(library.id for library in libraries))


def waiting(view: View) -> Iterator[Call]:
    """Calls that wait, a context after the other, each in the order of its queue."""
    for context in view.hungry.values():
        yield from context.queue


def load_s(context: Context) -> float:
    """What a start of a replica takes, as far as anybody knows."""
    return context.load_s or UNKNOWN_LOAD_S


def starts_in_s(call: Call, *, size: int, fresh: bool = True) -> float:
    """What passes on hot replicas before the first item: the ranks meet; what it does once, if it has not (`fresh`)."""
    features = call.spec.features
    before_s = features.before_items_s(size) if features is not None and fresh else 0.0
    return before_s + (call.group.context.paces.meet_s if size > 1 else 0.0)


def item_times_s(call: Call) -> dict[int, float] | None:
    """How long all its items take at most, by the replicas that it may have, without what passes before the first; more
    than zero, also for a call without items. None while nothing was measured that could tell."""
    smallest, largest = call.group.options.gang
    paces, work = call.group.context.paces, work_of(call.spec.features)
    times: dict[int, float] = {}
    for size in range(max(1, smallest), largest + 1):
        seconds = paces.bound_s(size, work) if largest > 1 else call.group.cost.run_s or None
        if seconds is None:
            return None
        times[size] = max(LEAST_S, seconds - (paces.meet_s if largest > 1 and size > 1 else 0.0))
    return times


def left_of(view: View, call: Call, *, learn: bool) -> float:
    """The part of its items that it has still to do at most, by what it said last, and how long that is ago. `learn`:
    by what such calls did before, too."""
    said = view.reports.get(call.id)
    features = call.spec.features
    items = float(features.items) if features is not None else 1.0
    total = said.total if said is not None and said.total > 0 else max(1.0, items)
    done = said.done if said is not None else 0.0
    if call.holder is not None:
        gang = call.holder if isinstance(call.holder, Gang) else None
        size = len(gang.members) if gang is not None else 1
        fresh = not call.spec.progress
        began_at = call.sent_at + starts_in_s(call, size=size, fresh=fresh)
        at = gang.report[0] if gang is not None and gang.report is not None else began_at
        times = item_times_s(call)
        if times and times.get(size):
            done += max(0.0, view.now - at) / times[size] * total
    return max(_ANY_MOMENT, call.group.context.paces.share_left(features, done / total, learn=learn))
