"""Probes devices: when the pilot starts, and every few minutes those on which nothing is loaded.

A probe is a process of its own for a moment (`stoker.pilot.devices.probe`, or what `--probe` names), so that a driver
that hangs or crashes takes nobody along. A device that fails is probed again at once; twice in a row is a fault, and
the manager is told: it loads nothing more there. A pilot says hello when it knows of each of its devices. A device that
had refused something (memory that somebody else has taken) is well again after two good probes; one that computed
something wrong never is. What the driver reports by itself, memory errors and Xid events, needs no second look.

CPU devices are probed only with a probe that was named.
"""

from __future__ import annotations

import logging
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
from stoker.pilot.devices import Device, visible
from stoker.pilot.devices.gpu import health_of
from stoker.pilot.devices.probe import Answer

log = logging.getLogger("stoker.pilot")

EVERY_S = 300.0
_AGAIN_S = 2.0
_TICK_S = 0.02
_LIMIT_S = 60.0
OFF = "off"
_OWN = ("-P", "-m", "stoker.pilot.devices.probe")


class _State:
    """What is known of one device."""

    def __init__(self) -> None:
        self.due_at = 0.0
        self.under_way = False
        self.known = False
        self.failed = 0
        self.sound = 0
        self.fault = ""
        self.lasting = False


class Probing:
    """The probes of one pilot. Looked at by the agent's loop, now and then."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        named = agent.options.probe
        self._command = () if named == OFF else tuple(shlex.split(named)) or (sys.executable, *_OWN)
        self._states = {
            device.facts.device: _State()
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
                self._fault(device, f"{device.facts.device}: {reported[device.uuid]}", lasting=True)
        if agent.leaving:
            return
        busy = {device for library in agent.libraries.values() for device in library.state.devices}
        for name, state in self._states.items():
            if now >= state.due_at and not state.under_way and name not in busy:
                state.under_way = True
                device = agent.devices[name]
                threading.Thread(target=self._probe, args=(device,), name=f"probe-{name}", daemon=True).start()

    def settle(self, *, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Wait until there is a first answer for each device, so that nothing is loaded on one that is bad."""
        until = time.monotonic() + limit_s
        while not all(state.known for state in self._states.values()):
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
        state = self._states[device.facts.device]
        state.under_way = False
        state.due_at = time.monotonic() + EVERY_S
        state.known = answer in (Answer.SOUND, Answer.UNKNOWN) or state.failed > 0
        if answer is Answer.UNKNOWN:
            log.info("%s", said)
            return
        if answer is Answer.SOUND:
            state.failed = 0
            state.sound += 1
            if state.fault and not state.lasting and state.sound >= 2:
                state.fault = ""
                log.warning("%s is well again", device.facts.device)
                self._agent.link.post(DeviceFault(device=device.facts.device, reason=""))
            return
        state.sound = 0
        state.failed += 1
        log.warning("%s", said)
        if state.failed >= 2:
            self._fault(device, f"{said}, twice", lasting=answer is Answer.WRONG)
        else:
            state.due_at = time.monotonic() + _AGAIN_S

    def _fault(self, device: Device, reason: str, *, lasting: bool) -> None:
        state = self._states.setdefault(device.facts.device, _State())
        state.lasting |= lasting
        if not state.fault:
            state.fault = reason
            log.error("%s", reason)
            self._agent.link.post(DeviceFault(device=device.facts.device, reason=reason))


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
