"""React to advice: quarantine nodes and devices on which calls fail; separate calls that slow each other down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from stoker.manager.core.events import OfFailure, OfPace, PaceAdvice, VerdictAdvice
from stoker.manager.core.nouns import Call, Context, Device, Library, LibraryState, Pilot, PilotState, RecordedVerdict
from stoker.manager.core.seams import Action, Evict, Quarantine, Unload, View
from stoker.manager.core.state import forget_oldest
from stoker.manager.policies.where_to_load import can_use_device, make_load

INFRASTRUCTURE = "infrastructure"
LEAST_CERTAINTY = 0.75
FAILURES_UNTIL_QUARANTINE = 2  # Failed calls or loads that lead to a quarantine
FAILURE_WINDOW_S = 600.0
QUARANTINE_S = 600.0
DEVICE_COMPONENTS = frozenset({"gpu", "nvlink"})  # A fault in another component affects the whole node


def quarantine_after_failures(view: View, about: OfFailure, verdict: VerdictAdvice) -> Iterable[Action]:
    """Quarantine a pilot or device on which several calls failed recently, if other pilots can run these calls.

    If such calls fail on most pilots, quarantine nothing, because no single node is the cause.
    """
    pilot = view.pilots.get(about.pilot)
    if pilot is None or not _blames_infrastructure(verdict):
        return
    alike = _similar_verdicts(pilot, verdict, view.now)
    on_device = verdict.component in DEVICE_COMPONENTS and len(about.devices) == 1
    if on_device:
        alike = [each for each in alike if each.devices == about.devices]
    if len({(each.call, each.at if each.call < 0 else 0.0) for each in alike}) < FAILURES_UNTIL_QUARANTINE:
        return
    library = view.libraries.get(about.library)
    context = library.context if library is not None else None
    others = [
        each
        for each in view.pilots.values()
        if each is not pilot
        and each.state is PilotState.HERE
        and any(not d.fault if context is None else can_use_device(context, d) for d in each.devices.values())
    ]
    well = [each for each in others if not _similar_verdicts(each, verdict, view.now)]
    reason = f"{len(alike)} failures within {FAILURE_WINDOW_S / 60:g} min: {verdict.means}"
    if on_device:
        device = pilot.devices.get(about.devices[0])
        elsewhere = well or any(not d.fault and d.id not in about.devices for d in pilot.devices.values())
        if elsewhere and device is not None and not device.fault:
            yield Quarantine(pilot.id, device.id, reason, QUARANTINE_S)
    elif 2 * len(well) >= len(others) + 1 and any(not d.fault for d in pilot.devices.values()):
        yield Quarantine(pilot.id, None, reason, QUARANTINE_S)


def _blames_infrastructure(verdict: VerdictAdvice) -> bool:
    return verdict.kind == INFRASTRUCTURE and verdict.sure >= LEAST_CERTAINTY


def _similar_verdicts(pilot: Pilot, verdict: VerdictAdvice, now: float) -> list[RecordedVerdict]:
    recent = (
        each for each in pilot.verdicts if now - each.at <= FAILURE_WINDOW_S and _blames_infrastructure(each.verdict)
    )
    return [each for each in recent if each.verdict.component == verdict.component]


SLOWDOWN_LIMIT = 0.35  # Share of throughput that a call may lose to a neighbour before it moves (SchedMate §4.1)
MOST_REMEMBERED_MOVES = 10_000

FindPlaces = Callable[[View, Context], Iterator[tuple[Device, ...]]]
ComputeReservation = Callable[[Context, tuple[Device, ...]], int]


class CallSeparator:
    """Separates calls that share a device and slow each other down (SchedMate §4.1).

    If the throughput of a call falls by more than `SLOWDOWN_LIMIT`, the call that last started on its device is blamed.
    The paper evicts this newcomer. Stoker moves it once, to an unused device, and only if it saves its progress.
    """

    def __init__(self) -> None:
        self._moved: dict[int, None] = {}

    def plan(
        self, view: View, about: OfPace, pace: PaceAdvice, *, places: FindPlaces, reservation: ComputeReservation
    ) -> Iterable[Action]:
        slowed = view.libraries.get(about.library)
        if slowed is None or pace.slowed <= SLOWDOWN_LIMIT:
            return
        newcomer = _last_started_neighbour(slowed, about.call, since=view.now - pace.best_ago_s)
        if newcomer is None:
            return
        library, call = newcomer
        if call.id in self._moved or not call.spec.progress:
            return
        place = next((each for each in places(view, library.context) if not any(map(_is_busy, each))), None)
        if place is None:
            return
        self._moved[call.id] = None
        forget_oldest(self._moved, max_records=MOST_REMEMBERED_MOVES)
        yield make_load(library.context, place, reservation(library.context, place))
        yield Evict(call.id)
        share = f"{pace.slowed:.0%}"
        yield Unload(library.id, f"it slows lib-{slowed.id} on the same device by {share}; its call runs elsewhere")


def _last_started_neighbour(slowed: Library, call: int, *, since: float) -> tuple[Library, Call] | None:
    if call not in slowed.held:
        return None
    others = {
        library.id: library
        for device in slowed.devices
        for library in device.libraries.values()
        if library is not slowed and library.state is LibraryState.READY and len(library.held) == 1
    }
    running = [(library, next(iter(library.held.values()))) for library in others.values() if library.slots == 1]
    later = [(library, call) for library, call in running if call.sent_at > since and call.holder is library]
    return max(later, key=lambda pair: pair[1].sent_at, default=None)


def _is_busy(device: Device) -> bool:
    return any(library.held or library.state is LibraryState.LOADING for library in device.libraries.values())
