"""What an agent measures and tells its core: libraries every quarter of a second, devices every second, memory with
each heartbeat."""

from __future__ import annotations

import re
import time

from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.process import LibraryProcess
from stoker.pilot.agent.usage import cpu_seconds, resident_bytes, tail
from stoker.pilot.core import limits
from stoker.pilot.core.events import DevicesMeasured, Observation, Observed, UsageMeasured
from stoker.pilot.core.presence import FIRST_LINE_S
from stoker.pilot.core.state import PilotLibrary, Stage
from stoker.pilot.devices import PilotDevice, memory
from stoker.pilot.devices.monitor import Reading
from stoker.pilot.zygote.processes import tree
from stoker.protocol.ids import DeviceId, LibraryId

_END_BYTES = 4096
_LONGEST = 160
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def observe_all(agent: Agent) -> None:
    """Look at every library once."""
    if agent.processes:
        agent.handle(Observed([_seen(agent, process) for process in agent.processes.values()]))


def observe(agent: Agent, number: LibraryId) -> None:
    """Look at a library."""
    process = agent.processes.get(number)
    if process is not None:
        agent.handle(Observed([_seen(agent, process)]))


def _seen(agent: Agent, process: LibraryProcess) -> Observation:
    library = agent.state.libraries.get(process.library)
    if library is None:
        return Observation(process.library)
    running: list[tuple[int, float]] = []
    if library.has_limits or library.stopping or library.stuck:
        running = process.surely_running()  # type: ignore[assignment]
    elif library.held:
        running = process.running()  # type: ignore[assignment]
    return Observation(process.library, running, _over_limit_bytes(agent, library, process))  # type: ignore[arg-type]


def _over_limit_bytes(agent: Agent, library: PilotLibrary, process: LibraryProcess) -> int:
    limit = limits.memory_limit(agent.state, library) if process.pid and not library.told_to_end else 0
    return process.memory.excess(process.pid, limit, now=time.monotonic()) if limit else 0


def measure(agent: Agent) -> None:
    """Measure what a heartbeat tells."""
    now, state = time.monotonic(), agent.state
    alive = [process for process in agent.processes.values() if process.pid]
    lines = {}
    for process in alive:
        library = state.libraries.get(process.library)
        if library is not None and library.stage is Stage.LOADING and now - library.started_at >= FIRST_LINE_S:
            lines[process.library] = last_line(process.log)
    agent.handle(
        UsageMeasured(
            resident_bytes={process.library: resident_bytes(process.pid) for process in alive},
            cpu_s={process.library: cpu_seconds(process.pid) for process in alive},
            cache_bytes=agent.cache.used_bytes(),
            refused_frames=agent.link.refused_frames,
            lines=lines,
        )
    )


def last_line(log: str) -> str:
    """The last line that says something in a library's log, without terminal control; empty if there is none."""
    text = _ESCAPES.sub("", tail(log, most_bytes=_END_BYTES))
    for line in reversed(re.split(r"[\r\n]+", text)):
        shown = " ".join("".join(each for each in line if each.isprintable()).split())
        if shown:
            return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
    return ""


def measure_devices(agent: Agent) -> None:
    """Tell what the monitors of GPUs have measured."""
    used: dict[LibraryId, dict[DeviceId, int]] = {}
    taken: dict[DeviceId, int] = {}
    at: dict[DeviceId, float] = {}
    for device in agent.devices.values():
        monitor = agent.monitors.get(device.uuid)
        reading = monitor.reading if monitor is not None else None
        if reading is None:
            continue
        name = device.facts.device
        taken[name], at[name] = reading.taken_bytes, reading.at
        for number, size in _used_on(agent, device, reading).items():
            used.setdefault(number, {})[name] = size
    if taken:
        agent.handle(DevicesMeasured(used, taken, at))


def _used_on(agent: Agent, device: PilotDevice, reading: Reading) -> dict[LibraryId, int]:
    """The bytes of a device that each library uses; without the libraries that the driver does not report."""
    name = device.facts.device
    here = [number for number, library in agent.state.libraries.items() if name in library.devices]
    if not here and reading.taken_bytes >= 0:
        agent.bare_bytes[name] = reading.taken_bytes
    pids = {number: agent.processes[number].pid for number in here if number in agent.processes}
    processes = {number: frozenset(tree(pid)) for number, pid in pids.items() if pid}
    found = memory.divide(
        reading.by_process,
        processes,
        taken_bytes=reading.taken_bytes if len(processes) == len(here) else -1,
        bare_bytes=agent.bare_bytes.get(name, -1),
        trusted=agent.sees_all_processes,
    )
    return {LibraryId(number): size for number, size in found.items() if size}
