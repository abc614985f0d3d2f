"""Probes devices, when the core wants it.

A probe is a process of its own for a moment (`stoker.pilot.devices.probe`, or what `--probe` names), so that a driver
that hangs or crashes takes nothing along. `core.probes` decides when, `core.health` judges the answers.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable

from stoker.pilot.agent.agent import Agent, PilotOptions
from stoker.pilot.core import probes
from stoker.pilot.core.events import DriverSaid, Probed, ProbeVerdict, Tick
from stoker.pilot.devices import PilotDevice, visible
from stoker.protocol.ids import DeviceId

_TICK_S = 0.02
_LIMIT_S = 60.0
NEVER = "never"
_OWN = ("-P", "-m", "stoker.pilot.devices.probe")


def command_of(options: PilotOptions) -> tuple[str, ...]:
    """The command that probes a device; empty where none is to be probed."""
    return () if options.probe == NEVER else tuple(shlex.split(options.probe)) or (sys.executable, *_OWN)


def probed_devices(options: PilotOptions, devices: Iterable[PilotDevice]) -> frozenset[DeviceId]:
    """The devices that are probed. CPU devices are only with a probe that was named."""
    if not command_of(options):
        return frozenset()
    return frozenset(
        device.facts.device for device in devices if (options.probe or device.uuid) and not device.facts.fault
    )


def command_beside(options: PilotOptions, devices: Iterable[PilotDevice]) -> tuple[str, ...]:
    """The command by which a library on these devices may have one probed beside itself; empty: it may not."""
    devices = tuple(devices)
    may = len(probed_devices(options, devices)) == len(devices) and all(x.facts.processes != 1 for x in devices)
    return command_of(options) if may else ()


def begin(agent: Agent, name: DeviceId) -> None:
    """Probe a device, in a thread."""
    device = agent.devices[name]

    def probe() -> None:
        answer, said = run(command_of(agent.options), device)
        agent.later(lambda: agent.handle(Probed(name, answer, said)))

    threading.Thread(target=probe, name=f"probe-{name}", daemon=True).start()


def settle(agent: Agent, *, limit_s: float, interrupted: Callable[[], bool]) -> None:
    """Wait until there is a first answer for each device, so that nothing is loaded on one that is bad."""
    until = time.monotonic() + limit_s
    while not probes.are_known(agent.state):
        if time.monotonic() > until or interrupted():
            return
        heed_drivers(agent)
        agent.handle(Tick())
        time.sleep(_TICK_S)
        agent.take_done()


def heed_drivers(agent: Agent) -> None:
    """Tell what the drivers of GPUs report by themselves."""
    now = time.monotonic()
    for device in agent.devices.values():
        monitor = agent.monitors.get(device.uuid)
        if monitor is not None:
            agent.handle(DriverSaid(device.facts.device, monitor.take_fault() or "", monitor.hangs(now) or ""))


def run(command: tuple[str, ...], device: PilotDevice) -> tuple[ProbeVerdict, str]:
    """Probe a device: what the probe answered, and its words. Takes up to a minute."""
    name = device.facts.device
    try:
        process = subprocess.Popen(
            [*command, name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **visible((device,)), "STOKER_DEVICE": name},
            start_new_session=True,
        )
    except OSError as error:
        return ProbeVerdict.UNKNOWN, f"the probe of {name} could not be started: {error}"
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # and it is not waited for: a driver that hangs may not let it go
        return ProbeVerdict.FAILED, f"{name} failed: its probe did not end within {_LIMIT_S:g} s"
    said = output.decode(errors="replace").strip().splitlines()
    code = process.returncode
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return ProbeVerdict.UNKNOWN, f"the probe of {name} was ended by somebody"
    if code in [answer.value for answer in ProbeVerdict]:
        answer = ProbeVerdict(code)
        return answer, "" if answer is ProbeVerdict.SOUND else said[-1] if said else f"{name} failed its probe"
    how = f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return ProbeVerdict.FAILED, f"{name} failed: its probe ended with {how}" + (f": {said[-1]}" if said else "")
