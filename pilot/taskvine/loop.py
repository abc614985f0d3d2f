"""The one loop of a pilot that has a TaskVine pool behind it.

A turn: hear the manager, let TaskVine work, tell the manager what is finished. The pilot says hello when the first
worker has come, because only then is it known what the workers have. It says then how many slots there may be in all;
those for which there is no worker are told as faulty, with that as the reason, so that nothing is planned for them.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import socket
import time
from types import FrameType

import msgspec

from stoker.manager.protocol.blocks import LossReason
from stoker.manager.protocol.ids import DeviceId
from stoker.manager.protocol.to_manager import DeviceFacts, DeviceFault, Heartbeat, PilotHello, PilotLeaving
from stoker.manager.protocol.to_pilot import Ack, Exit, HelloAgain, PilotRefused, PilotWelcome
from stoker.manager.protocol.wire import VERSION
from stoker.pilot.agent.link import ManagerLink
from stoker.pilot.core.presence import told_recipes
from stoker.pilot.taskvine.engine import Engine, Worker
from stoker.pilot.taskvine.factory import Factory
from stoker.pilot.taskvine.plan import Plan
from stoker.pilot.taskvine.pool import Pool
from stoker.pilot.taskvine.slots import slots_of

log = logging.getLogger("stoker.pilot")

_LOOK_S = 0.5
"""How often workers are counted, and an idle pool is looked at."""
_SHORT_S, _LONG_S = 0.0005, 0.05
"""While calls run the pool is looked at ever more seldom, from the one to the other."""
_WELCOME_S = 5.0
_FIRST_CONTACT_S = 60.0
_FAREWELL_S = 1.0
_GRACE_S = 2.0
_HANGS_S = 900.0
"""A turn that lasts so long will not end: in one, TaskVine may send a whole model to a worker."""


class Name(msgspec.Struct, frozen=True):
    """What the manager is told of a pilot besides its devices."""

    pilot: str
    block: str
    folder: str


class Loop:
    """Runs a pool until it leaves."""

    def __init__(
        self, link: ManagerLink, pool: Pool, engine: Engine, factory: Factory, *, plan: Plan, name: Name
    ) -> None:
        self._link = link
        self._pool = pool
        self._engine = engine
        self._factory = factory
        self._plan = plan
        self._name = name
        self._poll = select.poll()
        for number in link.dealer.filenos():
            self._poll.register(number, select.POLLIN)
        self._devices: tuple[DeviceFacts, ...] = ()
        self._workers: dict[str, Worker] = {}
        self._usable = 0
        """Slots for which there is a worker."""
        self._wanted = plan.least_workers
        self._busy_at = 0.0
        self._connected = False
        self._greeted_at = 0.0
        self._welcomed_at = 0.0
        self._heartbeat_s, self._lease_s = 5.0, 60.0
        self._heartbeat_at = self._look_at = self._search_at = 0.0
        self._pause_s = _SHORT_S
        self._leaving = ""
        self._loss: LossReason | None = None
        """Why the manager is to count it as lost, if it leaves for that."""
        self._leave_by = float("inf")
        self._exit_code = 0

    def run(self) -> int:
        """Work until the pool ends; returns the exit code."""
        for how in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(how) is not signal.SIG_IGN:
                signal.signal(how, self._on_signal)
        try:
            while not self._over():
                heard = self._hear()
                self._timers(time.monotonic())
                done = self._engine.turn(block=self._is_full())
                for finished in done:
                    self._pool.finished(finished)
                self._link.flush()
                self._wait(busy=bool(heard or done))
            self._say_farewell()
        finally:
            self._close()
        return self._exit_code

    # ---- one turn

    def _hear(self) -> int:
        if self._link.dealer.came_back():
            self._connected = True
            self._greet()
        heard = 0
        for message in self._link.receive():
            heard += 1
            match message:
                case Ack(sequence=sequence):
                    self._link.acked(sequence)
                case PilotWelcome(heartbeat_s=heartbeat_s, lease_s=lease_s):
                    self._heartbeat_s, self._lease_s = max(0.1, heartbeat_s), lease_s
                    self._welcomed_at = time.monotonic()
                    self._heartbeat_at = 0.0
                case HelloAgain(acknowledged=acknowledged):
                    self._link.acked(acknowledged)
                    self._link.hello_is_due = True
                case PilotRefused(reason=reason):
                    self._leave(f"the manager refused this pilot: {reason}", within_s=0.0, code=3)
                case Exit(reason=reason, drain=drain):
                    self._leave(reason, within_s=float("inf") if drain else 0.0)
                case _:
                    self._pool.handle(message)
        if self._link.hello_is_due:
            self._greet()
        return heard

    def _is_full(self) -> bool:
        """Whether TaskVine can start nothing more just now, so that only an end is worth waiting for."""
        return self._usable > 0 and self._engine.open >= self._usable and not self._leaving

    def _wait(self, *, busy: bool) -> None:
        if busy or self._link.dealer.readable():
            self._pause_s = _SHORT_S
            return
        if self._is_full():
            return
        self._pause_s = min(_LONG_S, 2 * self._pause_s) if self._engine.open else _LOOK_S
        self._poll.poll(self._pause_s * 1000)

    def _timers(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            # TaskVine holds the interpreter's lock: if it hangs, nothing of ours runs any more. Another pool can.
            faulthandler.dump_traceback_later(_HANGS_S, exit=True)
            self._count_workers()
            self._scale(now)
            self._pool.look(now)
            if why := self._factory.ended():
                self._leave(why, within_s=_GRACE_S, code=1)
        if not self._link.dealer.connected:
            self._manager_away(now)
        elif self._devices and self._link.awaits_welcome and self._greeted_at < now - _WELCOME_S:
            self._greet()  # it was not heard: a manager that was just starting
        if now >= self._heartbeat_at and self._welcomed_at:
            self._heartbeat_at = now + self._heartbeat_s
            self._link.say(Heartbeat(libraries=self._pool.books.uses(), refused_frames=self._link.refused_frames))

    def _manager_away(self, now: float) -> None:
        lease_s = self._lease_s if self._welcomed_at else max(self._lease_s, _FIRST_CONTACT_S)
        if self._link.dealer.failed_handshakes >= 10 and not self._welcomed_at:
            self._leave("the manager does not accept this pilot's key", within_s=0.0, code=2)
        elif now - self._link.dealer.lost_at > lease_s:
            self._leave(f"the manager was away for {lease_s:g} s", within_s=0.0, code=2)
        elif now >= self._search_at:
            self._search_at = now + 1.0
            self._link.look_again()

    # ---- workers

    def _count_workers(self) -> None:
        here = {worker.name: worker for worker in self._engine.workers()}
        for name in here.keys() - self._workers.keys():
            worker = here[name]
            log.info("worker %s has come: %d cores, %d GPUs", name, worker.cores, worker.gpus)
        for name in self._workers.keys() - here.keys():
            log.warning("worker %s is gone; what it ran, TaskVine runs elsewhere", name)
        self._workers = here
        if not self._devices and here:
            self._devices = slots_of(next(iter(here.values())), self._plan)
            self._usable = len(self._devices)
            self._pool.slot_cores = self._devices[0].cores
            if self._connected:
                self._greet()
        if self._devices:
            self._say_usable(sum(len(slots_of(worker, self._plan, workers=1)) for worker in here.values()))

    def _say_usable(self, count: int) -> None:
        """Tell the manager for which slots there is a worker. While there is none at all, work waits in TaskVine."""
        usable = min(len(self._devices), max(1, count))
        for place in range(min(usable, self._usable), max(usable, self._usable)):
            reason = self._no_worker() if usable < self._usable else ""
            self._link.post(DeviceFault(DeviceId(self._devices[place].device), reason))
        self._usable = usable

    def _no_worker(self) -> str:
        return f"TaskVine has no worker for it: {len(self._workers)} of {self._plan.most_workers} are here"

    def _faults(self) -> dict[DeviceId, str]:
        return {facts.device: self._no_worker() for facts in self._devices[self._usable :]}

    def _scale(self, now: float) -> None:
        """While every slot is taken, want twice as many workers; what is idle for long need not be replaced.

        TaskVine's factory would count the calls that wait, but those wait at our manager, which sends no more than
        there are slots.
        """
        if self._engine.open:
            self._busy_at = now
        if self._is_full():
            self._wanted = min(self._plan.most_workers, max(self._wanted, 2 * len(self._workers)))
        elif now - self._busy_at > self._plan.idle_s:
            self._wanted = self._plan.least_workers
        self._factory.want(self._wanted)

    def _greet(self) -> None:
        if not self._devices:
            return  # no worker yet: there is nothing to say
        self._link.flush()
        self._greeted_at = time.monotonic()
        self._link.greet(
            PilotHello(
                protocol=VERSION,
                session=self._link.session.session,
                host=socket.gethostname(),
                pid=os.getpid(),
                devices=self._devices,
                block=self._name.block,
                libraries=self._pool.books.facts(self._link.before()),
                folder=self._name.folder,
                acknowledged=self._link.acknowledged,
                recipes=told_recipes(library.recipe for library in self._pool.books.libraries.values()),
                last_library=self._pool.books.last_library,
                faults=self._faults(),
            )
        )

    # ---- the end

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._loss = self._loss if self._leaving else LossReason.SIGNALLED
        self._leave(f"it got {signal.Signals(number).name}", within_s=0.0 if self._leaving else _GRACE_S)

    def _leave(self, reason: str, *, within_s: float, code: int = 0) -> None:
        """Begin to end. Called again it can only make it sooner."""
        if not self._leaving:
            log.info("leaving: %s", reason)
            self._leaving, self._exit_code = reason, code
            self._pool.drain(reason)
        self._leave_by = min(self._leave_by, time.monotonic() + within_s)

    def _over(self) -> bool:
        return bool(self._leaving) and (not self._pool.books.libraries or time.monotonic() > self._leave_by)

    def _say_farewell(self) -> None:
        """Tell the manager, and give it a moment to take the last frames."""
        if not self._link.dealer.connected or self._exit_code == 3:
            return
        self._link.post(PilotLeaving(reason=self._leaving, loss=self._loss))
        self._link.flush()
        until = time.monotonic() + _FAREWELL_S
        while self._link.dealer.connected and not self._link.all_acked and time.monotonic() < until:
            self._poll.poll(20)
            self._link.dealer.came_back()
            for message in self._link.receive():
                if isinstance(message, Ack):
                    self._link.acked(message.sequence)

    def _close(self) -> None:
        self._engine.close()
        faulthandler.cancel_dump_traceback_later()
        self._factory.close()
        self._link.dealer.close(linger_s=0.3)
        log.info("the pool has ended: %s", self._leaving)
