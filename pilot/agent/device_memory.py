"""The memory of GPUs: what each library uses of it by NVML, and what it is promised of it.

A library is promised what it declares and what CUDA takes for its process; where it declares nothing, what was measured
once it was loaded. What a library uses beyond its promise, other libraries can no longer get: the promise grows by that
within what is free, here and, through `LibraryResized`, in the manager's books. A library is ended for its memory only
if it takes far more than it declares *and* others can no longer get what they were promised: workspaces of NCCL and
cuBLAS, which no user declares, harm nobody on a device with room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from stoker.manager.protocol.ids import DeviceId
from stoker.manager.protocol.to_manager import LibraryResized
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.library import Library
from stoker.pilot.core.library import State
from stoker.pilot.devices import Device, memory
from stoker.pilot.devices.monitor import Reading
from stoker.pilot.zygote.processes import tree

log = logging.getLogger("stoker.pilot")

TooLarge = Callable[[Library, str, int, int], None]
"""Ends a library: which, the memory that is meant, what it took and what it declares."""

_MARGIN = 1.1
"""A library that declares nothing is promised what was measured, and a tenth more."""
_NEWS = 0.02
"""A promise grows in steps of at least this part of it: the manager need not hear of each megabyte."""
_WORKSPACES_BYTES = 2_000_000_000
"""What NCCL, cuBLAS and cuDNN may take beyond what a user declares before that counts as too much."""


def look(agent: Agent, *, too_large: TooLarge) -> None:
    """Read what the monitors have measured, and settle what each library is promised."""
    used: dict[Library, dict[DeviceId, int]] = {}
    readings: dict[DeviceId, Reading] = {}
    for device in agent.devices.values():
        monitor = agent.monitors.get(device.uuid)
        reading = monitor.reading if monitor is not None else None
        if reading is None:
            continue
        readings[device.facts.device] = reading
        for library, size in _on(agent, device, reading).items():
            used.setdefault(library, {})[device.facts.device] = size
    for library, sizes in used.items():
        library.device_bytes = max(sizes.values())
        if library.told_to_end:
            continue
        if agent.devices[library.state.devices[0]].facts.processes != 1:
            _settle(agent, library, at=max(readings[device].at for device in sizes))
        over = _harms(agent, library, sizes, readings)
        if over is not None:
            too_large(library, f"memory of {over}", sizes[over], library.state.recipe.needs.device_memory_bytes)


def _on(agent: Agent, device: Device, reading: Reading) -> dict[Library, int]:
    """What each library on a device uses of it, of those of which the driver tells."""
    name = device.facts.device
    here = {library.state.library: library for library in agent.libraries.values() if name in library.state.devices}
    if not here and reading.taken_bytes >= 0:
        agent.bare_bytes[name] = reading.taken_bytes
    processes = {number: frozenset(tree(library.pid)) for number, library in here.items() if library.pid}
    found = memory.divide(
        reading.by_process,
        processes,
        taken_bytes=reading.taken_bytes if len(processes) == len(here) else -1,
        bare_bytes=agent.bare_bytes.get(name, -1),
        trusted=agent.sees_all_processes,
    )
    return {here[number]: size for number, size in found.items() if size}


def _settle(agent: Agent, library: Library, *, at: float) -> None:
    """Promise a library what it uses: less where the promise was a guess, more where it has grown."""
    number, ledger = library.state.library, agent.ledger
    uses, held = library.device_bytes, ledger.held(number)
    wanted = held
    recipe = library.state.recipe
    is_guess = bool(recipe.loader) and not recipe.needs.device_memory_bytes and not library.is_settled
    if is_guess and library.state.state is State.READY and at > library.ready_at:
        library.is_settled = True
        wanted = min(held, int(uses * _MARGIN))
    if uses > wanted:
        room = min(ledger.free(device) for device in library.state.devices)
        wanted = min(int(uses * (1 + _NEWS)), held + room)
        if wanted <= held and not library.is_over:
            library.is_over = True
            log.warning("lib-%d uses more of its device than is left for it to be promised", number)
    if wanted != held:
        ledger.resize(number, memory_bytes=wanted)
        agent.link.post(LibraryResized(number, wanted, measured=True))


def _harms(
    agent: Agent, library: Library, sizes: Mapping[DeviceId, int], readings: Mapping[DeviceId, Reading]
) -> DeviceId | None:
    """The device on which a library takes far more than it declares from others; None if there is none."""
    declared = library.state.recipe.needs.device_memory_bytes
    if not declared:
        return None
    for name, size in sizes.items():
        facts, taken = agent.devices[name].facts, readings[name].taken_bytes
        allowed = declared + facts.process_bytes + max(_WORKSPACES_BYTES, declared // 4)
        if size <= allowed or taken < 0:
            continue
        others = [other for other in agent.libraries.values() if other is not library and name in other.state.devices]
        owed = sum(max(0, agent.ledger.held(other.state.library) - other.device_bytes) for other in others)
        if owed > facts.memory_bytes - taken:
            return name
    return None
