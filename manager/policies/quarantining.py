"""When a pilot, or one of its devices, gets nothing new for a while: verdicts that its node keeps failing calls.

A node that fails each call within a second is free again at once, and would take a whole queue. One failure may be an
accident; when several calls have failed for it within `WITHIN_S`, and other pilots are left that can run them, it
is quarantined. What fails on most pilots alike is no single node's fault: a file server, or what is installed.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.manager.core.events import OfFailure, VerdictAdvice
from stoker.manager.core.nouns import Context, Judged, Pilot, PilotState
from stoker.manager.core.seams import Action, Quarantine, View
from stoker.manager.policies.sizes import suits

INFRASTRUCTURE = "infrastructure"
SURE = 0.75
CALLS = 2
"""So many different calls, or loads, have failed for it."""
WITHIN_S = 600.0
FOR_S = 600.0
OF_DEVICES = frozenset({"gpu", "nvlink"})
"""Components that belong to a device; all others belong to the node."""


def quarantines(view: View, about: OfFailure, verdict: VerdictAdvice) -> Iterable[Action]:
    """The devices that are quarantined after this verdict."""
    pilot = view.pilots.get(about.pilot)
    if pilot is None or not _blames(verdict):
        return
    alike = _alike(pilot, verdict, view.now)
    on_device = verdict.component in OF_DEVICES and len(about.devices) == 1
    if on_device:
        alike = [each for each in alike if each.devices == about.devices]
    if len({(each.call, each.at if each.call < 0 else 0.0) for each in alike}) < CALLS:
        return
    library = view.libraries.get(about.library)
    context = library.context if library is not None else None
    others = [
        each
        for each in view.pilots.values()
        if each is not pilot and each.state is PilotState.HERE and _could_run(context, each)
    ]
    well = [each for each in others if not _alike(each, verdict, view.now)]
    if on_device:
        if any(not d.fault and d.id not in about.devices for d in pilot.devices.values()) or well:
            device = pilot.devices.get(about.devices[0])
            if device is not None and not device.fault:
                yield Quarantine(pilot.id, device.id, _reason(alike, verdict), FOR_S)
        return
    if 2 * len(well) >= len(others) + 1 and any(not d.fault for d in pilot.devices.values()):
        yield Quarantine(pilot.id, None, _reason(alike, verdict), FOR_S)


def _could_run(context: Context | None, pilot: Pilot) -> bool:
    """Whether a pilot has a device for the context that has failed elsewhere (None: it is gone)."""
    devices = pilot.devices.values()
    return any(not d.fault for d in devices) if context is None else any(suits(context, d) for d in devices)


def _blames(verdict: VerdictAdvice) -> bool:
    return verdict.kind == INFRASTRUCTURE and verdict.sure >= SURE


def _alike(pilot: Pilot, verdict: VerdictAdvice, now: float) -> list[Judged]:
    """The verdicts of late that blame the same component of a pilot's node."""
    return [
        each
        for each in pilot.verdicts
        if now - each.at <= WITHIN_S and _blames(each.verdict) and each.verdict.component == verdict.component
    ]


def _reason(alike: list[Judged], verdict: VerdictAdvice) -> str:
    return f"{len(alike)} failures within {WITHIN_S / 60:g} min: {verdict.means}"
