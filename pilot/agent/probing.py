"""Probes devices: when the pilot starts, and every few minutes (`--probe-every`) those on which nothing is loaded.

A probe is a process of its own for a moment (`stoker.pilot.devices.probe`, or what `--probe` names), so that a driver
that hangs or crashes takes nothing along. `stoker.pilot.core.health` judges its answers; the manager is told of a
fault, and loads nothing more there. A pilot says hello when it knows of each of its devices. What the driver reports by
itself through the device's monitor (memory errors, Xid events, that the GPU is lost) needs no second look, and a driver
that does not answer is a fault while that lasts.

CPU devices are probed only with a probe that was named. A GPU that takes one process at a time is probed at the start
alone: a later probe could be the process that keeps a library out.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from stoker.manager.protocol.to_manager import DeviceFault
from stoker.pilot.agent.agent import Agent
from stoker.pilot.core.health import Answer, DeviceHealth
from stoker.pilot.devices import Device, visible
from stoker.pilot.devices.monitor import Monitor

log = logging.getLogger("stoker.pilot")

_AGAIN_S = 2.0
_TICK_S = 0.02
_LIMIT_S = 60.0
NEVER = "never"
_OWN = ("-P", "-m", "stoker.pilot.devices.probe")


class _Turn:
    """When a device is probed, and what that has come to."""

    def __init__(self) -> None:
        self.health = DeviceHealth()
        self.due_at = 0.0
        self.under_way = False


class Probing:
    """The probes of one pilot. Looked at by the agent's loop, now and then."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        named = agent.options.probe
        self._command = () if named == NEVER else tuple(shlex.split(named)) or (sys.executable, *_OWN)
        self._turns = {
            device.facts.device: _Turn()
            for device in agent.devices.values()
            if self._command and (named or device.uuid) and not device.facts.fault
        }

    def look(self, now: float) -> None:
        """Hear what the driver reports, and begin the probes that are due."""
        agent = self._agent
        for device in agent.devices.values():
            monitor = agent.monitors.get(device.uuid)
            if monitor is not None:
                self._heed(device, monitor, now)
        if agent.leaving:
            return
        busy = {device for library in agent.libraries.values() for device in library.state.devices}
        for name, turn in self._turns.items():
            if self._command and now >= turn.due_at and not turn.under_way and name not in busy:
                turn.under_way = True
                device = agent.devices[name]
                threading.Thread(target=self._probe, args=(device,), name=f"probe-{name}", daemon=True).start()

    def settle(self, *, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Wait until there is a first answer for each device, so that nothing is loaded on one that is bad."""
        until = time.monotonic() + limit_s
        while not all(turn.health.known for turn in self._turns.values()):
            now = time.monotonic()
            if now > until or interrupted():
                return
            self.look(now)
            time.sleep(_TICK_S)
            self._agent.take_done()

    def _heed(self, device: Device, monitor: Monitor, now: float) -> None:
        """Take in what the driver reports of a GPU."""
        name = device.facts.device
        reported, hangs = monitor.take_fault(), monitor.hangs(now)
        turn = self._turns.get(name)
        if turn is None:
            if not (reported or hangs):
                return
            turn = self._turns[name] = _Turn()
            turn.due_at = math.inf  # it is watched, not probed
        changed = turn.health.silent(f"{name}: {hangs}" if hangs else "")
        if reported:
            changed |= turn.health.reported(f"{name}: {reported}")
        if changed:
            self._tell(device, turn.health.fault)

    def _probe(self, device: Device) -> None:
        """In a thread of its own."""
        answer, said = run(self._command, device)
        self._agent.later(lambda: self._probed(device, answer, said))

    def _probed(self, device: Device, answer: Answer, said: str) -> None:
        turn = self._turns[device.facts.device]
        if said:
            log.warning("%s", said)
        if turn.health.heard(answer, said):
            self._tell(device, turn.health.fault)
        turn.under_way = False
        pause_s = self._agent.options.probe_every_s or math.inf
        if turn.health.suspected:
            pause_s = _AGAIN_S
        elif device.facts.processes == 1 and not turn.health.fault:
            pause_s = math.inf
        turn.due_at = time.monotonic() + pause_s

    def _tell(self, device: Device, fault: str) -> None:
        log.error("%s", fault or f"{device.facts.device} is well again")
        if fault:
            self._agent.faults[device.facts.device] = fault
        else:
            self._agent.faults.pop(device.facts.device, None)
        self._agent.link.post(DeviceFault(device=device.facts.device, reason=fault))


def run(command: tuple[str, ...], device: Device) -> tuple[Answer, str]:
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
        return Answer.UNKNOWN, f"the probe of {name} could not be started: {error}"
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # and it is not waited for: a driver that hangs may not let it go
        return Answer.FAILED, f"{name} failed: its probe did not end within {_LIMIT_S:g} s"
    said = output.decode(errors="replace").strip().splitlines()
    code = process.returncode
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return Answer.UNKNOWN, f"the probe of {name} was ended by somebody"
    if code in [answer.value for answer in Answer]:
        answer = Answer(code)
        return answer, "" if answer is Answer.SOUND else said[-1] if said else f"{name} failed its probe"
    how = f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Answer.FAILED, f"{name} failed: its probe ended with {how}" + (f": {said[-1]}" if said else "")
