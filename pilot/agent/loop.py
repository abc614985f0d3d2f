"""The agent's one loop.

A turn: wait until something comes or is due; read everything that has come, from the manager, the libraries, the
zygotes and other threads; do it; then send one frame to the manager and one to each library. Nothing is delayed to
form a batch: batches form by themselves while a turn is under way.
"""

from __future__ import annotations

import logging
import select
import signal
import time
from types import FrameType

from stoker.manager.protocol.blocks import LossReason
from stoker.manager.protocol.to_manager import PilotLeaving
from stoker.manager.protocol.to_pilot import Ack
from stoker.pilot.agent import ending, last_lines, objects, orders, standing, talk, walltime, watch
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.logs import LogWatch
from stoker.pilot.agent.probing import Probing
from stoker.pilot.zygote.client import Zygote

log = logging.getLogger("stoker.pilot")

_WELCOME_S = 5.0
_FAREWELL_S = 1.0
_LEAVING_LOOK_S = 0.1
_ECHO_S = 1.0
"""A signal that comes again within this is the same one: srun and Slurm both send it."""
_FIRST_CONTACT_S = 60.0
_PROBE_S = 15.0


class Loop:
    """Runs an agent until it leaves."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._logs = LogWatch(agent)
        self._probing = Probing(agent)
        self._signalled = ""
        self._signalled_at = 0.0
        self._heeded = False
        self._next_look = 0.0
        self._next_device_look = 0.0
        self._next_search = 0.0
        self._next_probe_look = 0.0
        self._greeted_at = 0.0
        for number in (*agent.link.dealer.filenos(), agent.wake_read):
            agent.wires.register(number)

    def run(self) -> int:
        """Work until the pilot ends; returns the exit code."""
        self._take_signals()
        agent, link = self.agent, self.agent.link
        walltime.start(agent)
        try:
            self._probing.settle(limit_s=_PROBE_S, interrupted=lambda: bool(self._signalled))
            while not self._over():
                self._wait()
                if link.dealer.came_back():
                    self._greet()
                for message in link.receive():
                    orders.handle(agent, message)
                if link.hello_is_due:  # one answers all that asked for it
                    self._greet()
                if self._signalled and not self._heeded:
                    self._heeded = True
                    grace_s = agent.options.grace_s
                    orders.drain_all(agent, self._signalled, within_s=grace_s, loss=LossReason.SIGNALLED)
                self._timers(time.monotonic())
                agent.wires.send_all()
                link.flush()
            self._say_farewell()
        finally:
            self._close()
        return agent.exit_code

    # ---- one turn

    def _wait(self) -> None:
        agent = self.agent
        timeout = 0.0 if agent.link.dealer.readable() else max(0.0, self._next_due() - time.monotonic())
        for source, what in agent.wires.wait(timeout):
            if source is None:
                continue
            if isinstance(source, Zygote):
                talk.from_zygote(agent, source)
                continue
            if what & select.EPOLLOUT:
                source.push()
                agent.wires.watch(source)
            if what & ~select.EPOLLOUT:
                talk.from_library(agent, source)
        agent.take_done()

    def _next_due(self) -> float:
        due = min(self.agent.heartbeat_at, self.agent.leave_by, self.agent.drain_at)
        if self.agent.leaving:
            due = min(due, time.monotonic() + _LEAVING_LOOK_S)
        return min(due, self._next_look) if self.agent.libraries or not self.agent.link.dealer.connected else due

    def _over(self) -> bool:
        agent = self.agent
        if not agent.leaving:
            return False
        idle = not agent.libraries and not agent.handing_in and not agent.objects.hands_on(time.monotonic())
        return idle or time.monotonic() > agent.leave_by + 1.0

    def _timers(self, now: float) -> None:
        agent, link = self.agent, self.agent.link
        walltime.look(agent, now)
        if now >= self._next_probe_look:
            self._next_probe_look = now + 1.0
            standing.look(agent)
            self._probing.look(now)
        if now >= self._next_look:
            self._next_look = now + watch.EVERY_S
            watch.look(agent)
            if now >= self._next_device_look:
                self._next_device_look = now + 1.0
                watch.look_at_devices(agent)
            if not link.dealer.connected:
                self._manager_away(now)
            elif link.awaits_welcome and self._greeted_at < now - _WELCOME_S:
                self._greet()  # it was not heard: a manager that was just starting
        if now >= agent.heartbeat_at:
            agent.heartbeat_at = now + agent.heartbeat_s
            link.say(agent.heartbeat())
            self._logs.look(now)
            objects.look(agent)
            last_lines.tell(agent)
            for zygote in agent.zygotes.idle():
                agent.wires.unwatch(zygote)
                agent.zygotes.forget(zygote)
        if agent.leaving and now >= agent.leave_by:
            for library in list(agent.libraries.values()):
                ending.kill(agent, library)

    def _manager_away(self, now: float) -> None:
        agent, link = self.agent, self.agent.link
        lease_s = agent.lease_s if agent.welcomed_at else max(agent.lease_s, _FIRST_CONTACT_S)
        if link.dealer.failed_handshakes >= 10 and not agent.welcomed_at:
            agent.leave("the manager does not accept this pilot's key", within_s=0.0, code=2)
        elif now - link.dealer.lost_at > lease_s:
            moved = ", or has moved, which a pilot without shared files cannot see" if agent.objects.carried else ""
            agent.leave(f"the manager was away for {lease_s:g} s{moved}", within_s=0.0, code=2)
        elif now >= self._next_search:
            self._next_search = now + 1.0
            if why := link.session_over():  # its manager ended before this pilot had joined, or while it was cut off
                agent.leave(f"the session is over: {why}", within_s=0.0)
            else:
                link.look_again()

    def _greet(self) -> None:
        self.agent.link.flush()
        self._greeted_at = time.monotonic()
        self.agent.link.greet(self.agent.hello())

    # ---- the end

    def _take_signals(self) -> None:
        signal.set_wakeup_fd(self.agent.wake_write, warn_on_full_buffer=False)
        for how in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(how) is not signal.SIG_IGN:  # nohup, or a shell's background job
                signal.signal(how, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signalled and now - self._signalled_at > _ECHO_S:
            self.agent.leave_by = 0.0  # a second one: at once
        self._signalled_at = now
        self._signalled = f"it got {signal.Signals(number).name}"

    def _say_farewell(self) -> None:
        """Tell the manager, and give it a moment to take the last frames."""
        agent, link = self.agent, self.agent.link
        for library in list(agent.libraries.values()):
            library.told_to_end = True
            ending.finish(agent, library)
        if not agent.farewell or not link.dealer.connected:
            return
        link.post(PilotLeaving(reason=agent.leaving, loss=agent.loss))
        link.flush()
        until = time.monotonic() + _FAREWELL_S
        while link.dealer.connected and not link.all_acked and time.monotonic() < until:
            if not link.dealer.readable():
                agent.wires.wait(0.02)
            link.dealer.came_back()
            for message in link.receive():
                if isinstance(message, Ack):
                    orders.handle(agent, message)

    def _close(self) -> None:
        agent = self.agent
        for monitor in agent.monitors.values():
            monitor.close()
        agent.objects.close()
        agent.zygotes.close()
        agent.scratch.remove()
        agent.wires.close()
        agent.link.dealer.close(linger_s=0.3)
        signal.set_wakeup_fd(-1)
        log.info("the pilot has ended: %s", agent.leaving)
