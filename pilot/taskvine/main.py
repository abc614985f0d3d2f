"""`python -m stoker.pilot.taskvine.main --session DIR`: the pilot that runs a TaskVine pool.

The pilot sends its hello after the first worker has joined, because only then are the resources of workers known. The
hello lists all slots of the plan; slots without a worker are reported as faulty.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence

from stoker.errors import ConfigError, StokerError
from stoker.folders import working_folder_if_exists
from stoker.log_files import log_to_file
from stoker.pilot.agent.agent import ManagerLink
from stoker.pilot.core import events, presence
from stoker.pilot.core.state import PilotFacts
from stoker.pilot.taskvine import messages
from stoker.pilot.taskvine.engine import VineManager, VinePlan, VineWorker, read_plan
from stoker.pilot.taskvine.factory import VineFactory, find_programs, import_taskvine
from stoker.pilot.taskvine.pool import UNLIMITED_BYTES, VinePool, slot_devices
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_manager import DeviceFacts
from stoker.whole_files import write_whole

log = logging.getLogger("stoker.pilot")

_CHECK_S = 0.5
_SHORT_S, _LONG_S = 0.0005, 0.05
"""Shortest and longest pause, in seconds, between two checks of the pool while calls run."""
_HANG_LIMIT_S = 900.0
"""Seconds after which an iteration counts as hung. An iteration may send a whole model."""


class PoolLoop:
    def __init__(
        self, link: ManagerLink, pool: VinePool, engine: VineManager, factory: VineFactory, *, plan: VinePlan
    ) -> None:
        self._link = link
        self._pool = pool
        self._engine = engine
        self._factory = factory
        self._plan = plan
        self._poll = select.poll()
        for number in link.dealer.filenos():
            self._poll.register(number, select.POLLIN)
        self._devices: tuple[DeviceFacts, ...] = ()
        self._workers: dict[str, VineWorker] = {}
        self._usable_slots = 0
        self._wanted_workers = plan.least_workers
        self._busy_at = 0.0
        self._check_at = 0.0
        self._pause_s = _SHORT_S
        self._signals: list[str] = []
        self._was_signalled = False
        self._engine_ended = False

    def run(self) -> int:
        for how in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(how) is not signal.SIG_IGN:
                signal.signal(how, lambda number, _frame: self._signals.append(signal.Signals(number).name))
        try:
            while not self._pool.is_over:
                heard = self._receive_messages()
                self._do_timed_work(time.monotonic())
                done = self._engine.collect_finished(block=self._is_every_slot_busy())
                for finished in done:
                    self._pool.handle_finished_order(finished)
                self._link.send_queued_frames()
                self._wait(busy=bool(heard or done))
            self._say_farewell()
        finally:
            self._close()
        return self._pool.state.exit_code

    # ---- one turn

    def _receive_messages(self) -> int:
        link, pool = self._link, self._pool
        if link.dealer.handle_connection_changes():
            self._send_hello()
        heard = 0
        for message in link.receive_messages():
            heard += 1
            pool.handle_event(events.FromManager(message))
        if link.dealer.connected and presence.must_send_hello(pool.state):
            self._send_hello()
        while self._signals:
            pool.handle_event(events.SignalReceived(f"it received {self._signals.pop(0)}", again=self._was_signalled))
            self._was_signalled = True
        return heard

    def _is_every_slot_busy(self) -> bool:
        return (
            self._usable_slots > 0 and self._engine.open_orders >= self._usable_slots and not self._pool.state.leaving
        )

    def _wait(self, *, busy: bool) -> None:
        if busy or self._link.dealer.has_input():
            self._pause_s = _SHORT_S
            return
        if self._is_every_slot_busy():
            return
        self._pause_s = min(_LONG_S, 2 * self._pause_s) if self._engine.open_orders else _CHECK_S
        self._poll.poll(self._pause_s * 1000)

    def _do_timed_work(self, now: float) -> None:
        link, pool = self._link, self._pool
        for key in pool.timers.take_due(now):
            pool.handle_event(events.TimerFired(key))
        if now >= self._check_at:
            self._check_at = now + _CHECK_S
            # TaskVine holds the interpreter lock. If TaskVine hangs, exit this process, so that another pool can run.
            faulthandler.dump_traceback_later(_HANG_LIMIT_S, exit=True)
            self._update_connected_workers()
            self._scale_workers(now)
            pool.give_free_slots()
            if not self._engine_ended and (why := self._factory.explain_end()):
                self._engine_ended = True
                pool.handle_event(events.TaskVineEnded(why))
            pool.handle_event(events.Tick())
        elif pool.state.leaving:
            pool.handle_event(events.Tick())
        if not link.dealer.connected:
            pool.handle_event(link.make_absence_event(now))
        if now >= pool.state.heartbeat_at and pool.state.welcomed_at:
            sizes = {number: library.memory_bytes for number, library in pool.libraries.items() if library.memory_bytes}
            pool.handle_event(events.UsageMeasured(sizes, {}, 0, link.refused_frames))

    # ---- workers

    def _update_connected_workers(self) -> None:
        here = {worker.name: worker for worker in self._engine.connected_workers()}
        for name in here.keys() - self._workers.keys():
            worker = here[name]
            log.info("worker %s connected: %d cores, %d GPUs", name, worker.cores, worker.gpus)
        for name in self._workers.keys() - here.keys():
            log.warning("worker %s disconnected; TaskVine runs its tasks elsewhere", name)
        self._workers = here
        if not self._devices and here and not self._pool.state.leaving:
            self._devices = slot_devices(next(iter(here.values())), self._plan)
            self._usable_slots = len(self._devices)
            self._pool.replace_core_with_devices(self._devices)
            if self._link.dealer.connected:
                self._send_hello()
        if self._devices:
            count = sum(len(slot_devices(worker, self._plan, workers=1)) for worker in here.values())
            usable, most = min(len(self._devices), max(1, count)), self._plan.most_workers
            reason = f"TaskVine has no worker for this slot: {len(here)} of {most} workers are connected"
            for place in range(min(usable, self._usable_slots), max(usable, self._usable_slots)):
                why = reason if usable < self._usable_slots else ""
                self._pool.handle_event(events.DeviceAway(self._devices[place].device, why))
            self._usable_slots = usable

    def _scale_workers(self, now: float) -> None:
        """Double the number of wanted workers while every slot is occupied. (TaskVine's factory cannot count waiting
        calls, because Stoker's manager sends only as many calls as there are slots.)
        """
        if self._engine.open_orders:
            self._busy_at = now
        if self._is_every_slot_busy():
            self._wanted_workers = min(self._plan.most_workers, max(self._wanted_workers, 2 * len(self._workers)))
        elif now - self._busy_at > self._plan.idle_s:
            self._wanted_workers = self._plan.least_workers
        self._factory.set_wanted_workers(self._wanted_workers)

    def _send_hello(self) -> None:
        if self._devices:  # no hello before the first worker joins: the devices are unknown
            self._pool.handle_event(self._link.make_hello_event(()))

    # ---- the end

    def _say_farewell(self) -> None:
        self._pool.report_pool_end()
        if self._pool.state.says_farewell:
            self._link.send_last_frames(self._pool.handle_event, pause=lambda: self._poll.poll(20))

    def _close(self) -> None:
        self._engine.close()
        faulthandler.cancel_dump_traceback_later()
        self._factory.close()
        self._link.dealer.close(linger_s=0.3)
        log.info("the pool has ended: %s", self._pool.state.leaving)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stoker-pilot-taskvine", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--session", required=True, metavar="DIR", help="the session's folder")
    parser.add_argument("--site", default="local", help="the site of this pilot")
    parser.add_argument("--block", default="", help="the block that contains this pilot")
    parser.add_argument("--host", default="", help="address of this pilot for workers on other nodes (default: local)")
    given = parser.parse_args(arguments)
    try:
        return _run_pool(SessionFolder(given.session), site=given.site, block=given.block, host=given.host)
    except StokerError as error:
        print(f"stoker-pilot-taskvine: {error}", file=sys.stderr)  # noqa: T201  # the block's log shows this line
        return 1
    except Exception:
        log.exception("the pilot failed because of a bug in Stoker")
        raise


def _run_pool(session: SessionFolder, *, site: str, block: str, host: str) -> int:
    os.umask(0o077)
    session.read()
    pilot = f"taskvine-{secrets.token_hex(2)}"
    logs = session.pilot_folder(pilot)
    own = logs / "taskvine"
    running = own / "running"
    try:
        running.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise ConfigError(f"{running} cannot be made: {error}") from error
    log_to_file(logs / "pilot.log")
    orders = read_plan(session, site=site)
    programs = find_programs()
    password = session.key_file("taskvine").with_suffix("")  # written once per session
    if not password.exists():
        write_whole(password, secrets.token_hex(32).encode())
    engine = VineManager(import_taskvine(), orders, folder=own, password=password)
    log.info("TaskVine's manager listens on port %d of %s", engine.port, socket.gethostname())
    objects, path = str(session.objects), working_folder_if_exists()
    setup = messages.VineLibrarySetup(
        pilot=pilot, logs=str(logs), objects=objects, running=str(running), search_path=path
    )
    factory = VineFactory(
        orders, programs, port=engine.port, host=host, folder=own / "factory", password=password,
        log_file=logs / "factory.log", session=str(session.path),
    )  # fmt: skip
    link = ManagerLink(session, pilot=pilot, block=block)
    facts = PilotFacts(
        pilot=pilot, session=link.session.session, host=socket.gethostname(), pid=os.getpid(), devices=(), block=block,
        cache_bound_bytes=UNLIMITED_BYTES, logs=str(logs), folder=str(logs), objects=objects,
    )  # fmt: skip
    pool = VinePool(engine, link, facts=facts, setup=setup)
    try:
        return PoolLoop(link, pool, engine, factory, plan=orders).run()
    finally:
        shutil.rmtree(own, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
