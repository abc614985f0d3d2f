"""Decides when to probe devices: at the start, every few minutes while a device is idle, and after a failed call.

A GPU in exclusive mode is probed only at the start, because a later probe could block a library.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.pilot.core.commands import Probe, Severity
from stoker.pilot.core.events import DriverReported, Probed
from stoker.pilot.core.state import NEVER, CoreState, DeviceProbing
from stoker.protocol.ids import DeviceId
from stoker.protocol.to_manager import DeviceFault

AGAIN_S = 2.0  # seconds until a device is probed again after its first failure


def start_due_probes(state: CoreState) -> None:
    if state.leaving or not state.turns:
        return
    busy = {device for library in state.libraries.values() for device in library.devices}
    for device, turn in state.turns.items():
        is_free = device not in busy or (turn.is_urgent and state.devices[device].processes != 1)
        if state.now >= turn.due_at and not turn.is_under_way and is_free:
            turn.is_under_way = True
            state.out.append(Probe(device))


def suspect(state: CoreState, devices: Iterable[DeviceId]) -> None:
    """Probe devices immediately after a failed call, even if libraries use the devices."""
    for device in devices:
        turn = state.turns.get(device)
        if turn is not None and device in state.facts.probed:
            turn.is_urgent, turn.due_at = True, state.now


def is_every_device_examined(state: CoreState) -> bool:
    return all(turn.health.known for turn in state.turns.values())


def probed(state: CoreState, event: Probed) -> None:
    device, turn = event.device, state.turns[event.device]
    if event.said:
        state.log(event.said, Severity.WARNING)
    if turn.health.heard(event.answer, event.said):
        _tell(state, device, turn.health.fault)
    turn.is_under_way = False
    turn.is_urgent = turn.health.suspected
    pause_s = state.facts.probe_every_s or NEVER
    if turn.health.suspected:
        pause_s = AGAIN_S
    elif state.devices[device].processes == 1 and not turn.health.fault:
        pause_s = NEVER
    turn.due_at = state.now + pause_s


def record_device_absence(state: CoreState, device: DeviceId, reason: str) -> None:
    """Record that a device is absent or present. `reason`: why the device is absent; empty if it is present."""
    if _watched(state, device).health.silent(reason):
        _set_fault(state, device, reason)


def record_driver_report(state: CoreState, event: DriverReported) -> None:
    device = event.device
    if device not in state.turns and not (event.fault or event.hangs):
        return
    turn = _watched(state, device)
    changed = turn.health.silent(f"{device}: {event.hangs}" if event.hangs else "")
    if event.fault:
        changed |= turn.health.reported(f"{device}: {event.fault}")
    if changed:
        _tell(state, device, turn.health.fault)


def _watched(state: CoreState, device: DeviceId) -> DeviceProbing:
    return state.turns.setdefault(device, DeviceProbing(due_at=NEVER))


def _tell(state: CoreState, device: DeviceId, fault: str) -> None:
    state.log(fault or f"{device} works again", Severity.ERROR)
    _set_fault(state, device, fault)


def _set_fault(state: CoreState, device: DeviceId, fault: str) -> None:
    if fault:
        state.faults[device] = fault
    else:
        state.faults.pop(device, None)
    state.tell(DeviceFault(device=device, reason=fault))
