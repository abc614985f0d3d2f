"""Decides when to test devices: at the start, every few minutes while a device is idle, and after a failed call.

A GPU in exclusive mode is probed only at the start, because a later probe could block a library.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.pilot.core.commands import ProbeDevice, Severity
from stoker.pilot.core.events import DeviceProbed, DriverReported
from stoker.pilot.core.state import NEVER, CoreState, DeviceProbing
from stoker.protocol.ids import DeviceId
from stoker.protocol.to_manager import DeviceFault

SECOND_PROBE_S = 2.0  # seconds until a device is probed again after its first failure


def start_due_probes(state: CoreState) -> None:
    if state.leaving or not state.device_probings:
        return
    busy = {device for library in state.libraries.values() for device in library.devices}
    for device, turn in state.device_probings.items():
        is_free = device not in busy or (turn.is_urgent and state.devices[device].processes != 1)
        if state.now >= turn.due_at and not turn.is_under_way and is_free:
            turn.is_under_way = True
            state.commands.append(ProbeDevice(device))


def request_urgent_probes(state: CoreState, devices: Iterable[DeviceId]) -> None:
    """Probe devices immediately after a failed call, even if libraries use the devices."""
    for device in devices:
        turn = state.device_probings.get(device)
        if turn is not None and device in state.facts.probed:
            turn.is_urgent, turn.due_at = True, state.now


def is_every_device_examined(state: CoreState) -> bool:
    return all(turn.health.is_known for turn in state.device_probings.values())


def record_probe_verdict(state: CoreState, event: DeviceProbed) -> None:
    device, turn = event.device, state.device_probings[event.device]
    if event.said:
        state.write_log(event.said, Severity.WARNING)
    if turn.health.record_verdict(event.answer, event.said):
        _report_fault_change(state, device, turn.health.fault)
    turn.is_under_way = False
    turn.is_urgent = turn.health.is_suspected
    pause_s = state.facts.probe_every_s or NEVER
    if turn.health.is_suspected:
        pause_s = SECOND_PROBE_S
    elif state.devices[device].processes == 1 and not turn.health.fault:
        pause_s = NEVER
    turn.due_at = state.now + pause_s


def record_device_absence(state: CoreState, device: DeviceId, reason: str) -> None:
    """Record that a device is absent or present. `reason`: why the device is absent; empty if it is present."""
    if _get_or_add_probing(state, device).health.record_silence(reason):
        _set_fault(state, device, reason)


def record_driver_report(state: CoreState, event: DriverReported) -> None:
    device = event.device
    if device not in state.device_probings and not (event.fault or event.hangs):
        return
    turn = _get_or_add_probing(state, device)
    changed = turn.health.record_silence(f"{device}: {event.hangs}" if event.hangs else "")
    if event.fault:
        changed |= turn.health.record_driver_fault(f"{device}: {event.fault}")
    if changed:
        _report_fault_change(state, device, turn.health.fault)


def _get_or_add_probing(state: CoreState, device: DeviceId) -> DeviceProbing:
    return state.device_probings.setdefault(device, DeviceProbing(due_at=NEVER))


def _report_fault_change(state: CoreState, device: DeviceId, fault: str) -> None:
    state.write_log(fault or f"{device} works again", Severity.ERROR)
    _set_fault(state, device, fault)


def _set_fault(state: CoreState, device: DeviceId, fault: str) -> None:
    if fault:
        state.faults[device] = fault
    else:
        state.faults.pop(device, None)
    state.tell_manager(DeviceFault(device=device, reason=fault))
