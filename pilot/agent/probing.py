"""Probes devices: when the pilot starts, and every few minutes (`--probe-every`) those on which nothing is loaded.

A probe is a process of its own for a moment (`stoker.pilot.devices.probe`, or what `--probe` names), so that a driver
that hangs or crashes takes nobody along. What its answers add up to is `stoker.pilot.core.health`'s business; of a
fault the manager is told, and loads nothing more there. A pilot says hello when it knows of each of its devices. What
the driver reports by itself, memory errors and Xid events, needs no second look.

CPU devices are probed only with a probe that was named.
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
from stoker.pilot.devices.gpu import health_of

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
            if self._command and (named or device.uuid)
        }
        gpus = tuple(device for device in agent.devices.values() if device.uuid)
        self._health = health_of(gpus) if gpus and self._command else None

    def look(self, now: float) -> None:
        """Hear what the driver reports, and begin the probes that are due."""
        agent = self._agent
        reported = self._health.faults() if self._health is not None else {}
        for device in agent.devices.values():
            if device.uuid in reported:
                turn = self._turns.setdefault(device.facts.device, _Turn())
                if turn.health.reported(f"{device.facts.device}: {reported[device.uuid]}"):
                    self._tell(device, turn.health.fault)
        if agent.leaving:
            return
        busy = {device for library in agent.libraries.values() for device in library.state.devices}
        for name, turn in self._turns.items():
            if now >= turn.due_at and not turn.under_way and name not in busy:
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
        pause_s = _AGAIN_S if turn.health.suspected else self._agent.options.probe_every_s or math.inf
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
