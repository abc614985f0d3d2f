"""Devices that are kept free: because their pilot says that they have failed, or because a policy has said so.

A pilot probes its devices and tells which of them fail (`reported`): what runs there is lost, so its calls run again
elsewhere at once. A policy may also quarantine a device, or all of a pilot, for a while, because of verdicts on what
has failed there (`begin`): what runs there runs to its end, and nothing new comes. Both have one effect on placing:
`Device.fault`, which only this file writes.
"""

from __future__ import annotations

from stoker.manager.core import holding, libraries, pilot_states
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Device, Pilot
from stoker.protocol.ids import PilotId
from stoker.units import show_seconds

TIMER = "quarantine"


def reported(manager: Manager, device: Device, reason: str) -> None:
    """A device failed its probe, or is well again (no reason): what holds it or loads on it ends there, and its calls
    run again."""
    pilot, id = device.pilot, device.id
    if device.reported == reason:  # its hello has told it
        return
    device.reported = reason
    _settle(device)
    if not reason:
        pilot.note(manager.state.now, f"{id} is well again")
        pilot_states.supply_changed(manager, pilot)
        return
    pilot.note(manager.state.now, f"{id} quarantined: {reason}")
    for library in tuple(device.libraries.values()):
        for call in tuple(library.held.values()):
            holding.withdraw(manager, call, running=True)
            holding.requeue(manager, (call,), why=f"{id} of {pilot.id} is quarantined ({reason}), not counted as a try")
        libraries.stop(manager, library, reason=f"{id} is quarantined: {reason}")
    pilot_states.supply_changed(manager, pilot)


def begin(manager: Manager, pilot: Pilot, devices: list[Device], *, reason: str, until: float) -> None:
    """Keep devices of a pilot free until then: their libraries end after what they run."""
    now = manager.state.now
    for device in devices:
        device.quarantine = (until, reason)
        _settle(device)
    which = ", ".join(device.id for device in devices)
    pilot.note(now, f"{which} quarantined for {show_seconds(until - now)}: {reason}")
    for library in {library.id: library for device in devices for library in device.libraries.values()}.values():
        libraries.stop(manager, library, reason=f"quarantined: {reason}")
    _set_timer(manager, pilot)
    pilot_states.supply_changed(manager, pilot)


def due(manager: Manager, id: str) -> None:
    """A quarantine of a pilot's devices may be over. A pilot that is gone may come back."""
    state, now = manager.state, manager.state.now
    pilot = state.pilots.get(PilotId(id)) or state.gone_pilots.get(PilotId(id))
    if pilot is None:
        return
    over = [device for device in pilot.devices.values() if device.quarantine and device.quarantine[0] <= now]
    for device in over:
        device.quarantine = None
        _settle(device)
    if over:
        pilot.note(now, f"{', '.join(device.id for device in over)} may be used again")
        if pilot.id in state.pilots:
            pilot_states.supply_changed(manager, pilot)
    _set_timer(manager, pilot)


def _set_timer(manager: Manager, pilot: Pilot) -> None:
    ends = [device.quarantine[0] for device in pilot.devices.values() if device.quarantine]
    if ends:
        manager.set_timer(f"{TIMER}/{pilot.id}", min(ends))


def _settle(device: Device) -> None:
    device.fault = device.reported or (device.quarantine[1] if device.quarantine else "")
