"""The parts of an agent: the pilot's core, and everything that carries out its commands.

All of it runs in the loop's thread. Other threads hand their results over with `later`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.folders import folders_here
from stoker.pilot.agent.fetches import Fetches, Peers
from stoker.pilot.agent.link import ManagerLink
from stoker.pilot.agent.offers import BOARD, OfferScales
from stoker.pilot.agent.process import LibraryProcess, Wires, Zygotes
from stoker.pilot.agent.scratch import Parent, Scratch
from stoker.pilot.cache import ObjectCache
from stoker.pilot.core.commands import Command
from stoker.pilot.core.core import EventQueue, PilotCore
from stoker.pilot.core.events import Event, FromLibrary, LibraryGarbled, LibraryHungUp
from stoker.pilot.core.state import CoreState, PilotFacts, Timers
from stoker.pilot.devices import PilotDevice, memory
from stoker.pilot.devices.gpu import DRIVER_LIMIT_S
from stoker.pilot.devices.memory import OomKills, anonymous_bytes
from stoker.pilot.devices.monitor import Monitor
from stoker.pilot.zygote.processes import tree
from stoker.protocol.ids import DeviceId, LibraryId
from stoker.protocol.session import SessionFolder

GRACE_S = 2.0
"""How long calls that run may still take when the pilot is told to go at once (a signal from the batch system)."""

PROBE_EVERY_S = 300.0  # how often a device on which nothing is loaded is probed again


class PilotOptions(msgspec.Struct, frozen=True):
    """The options of a pilot's start."""

    pilot: str
    block: str = ""
    lease_s: float = 60.0
    grace_s: float = GRACE_S
    walltime_s: float = 0.0  # how long its job may last, as the site file says; 0 = it does not say
    probe: str = ""  # the command that probes a device (see `observing`); empty: our own, on GPUs
    probe_every_s: float = PROBE_EVERY_S
    in_batch: bool = False  # whether a batch system started it, so that it ends with the process that did
    driver_limit_s: float = DRIVER_LIMIT_S
    """Seconds after which an unanswered GPU driver counts as hanging, a fault of the device."""
    umask: int = -1  # the umask that the pilot was started with, which its libraries have; -1: the pilot's own


class Agent:
    """One pilot's agent. Its parts (`loop`, `processes`, `objects`, `observing`) work on it."""

    def __init__(
        self,
        facts: PilotFacts,
        options: PilotOptions,
        *,
        session: SessionFolder,
        devices: tuple[PilotDevice, ...],
        scratch: Scratch,
        cache: ObjectCache,
        link: ManagerLink,
        peers: Peers,
    ) -> None:
        self.core = PilotCore(facts)
        self.options = options
        self.session = session
        self.logs = session.pilot(options.pilot)
        self.devices: dict[DeviceId, PilotDevice] = {device.facts.device: device for device in devices}
        self.monitors: dict[str, Monitor] = {}  # the monitors of GPUs, by UUID
        self.bare_bytes: dict[DeviceId, int] = {}  # memory of each GPU that was taken while no library was on it
        self.sees_all_processes = memory.sees_all_processes()
        self.scratch = scratch
        self.parent = Parent(watched=options.in_batch)
        self.oom_kills = OomKills(lambda: anonymous_bytes(tree(os.getpid())))
        self.cache = cache
        self.peers = peers
        self.link = link
        self.zygotes = Zygotes(logs=self.logs, scratch=scratch.path, umask=options.umask)
        self.wires = Wires()
        self.search_path = folders_here()
        """Where libraries look for modules last: next to the user's program, if the pilot was started there."""
        self.processes: dict[LibraryId, LibraryProcess] = {}
        self.fetches = Fetches(self)
        self.offers = OfferScales(self.core.state, board=scratch.path / BOARD)
        self.is_over = False  # whether the core has said that everything is done
        self.carry_out: Callable[[Command], None] = lambda _command: None
        self.check_standing: Callable[[], bool] = lambda: False
        """Tells the core if the pilot lacks what its job gave it (`job`): before it hears what fails of that."""
        self.timers = Timers()
        self._queue = EventQueue(self.core, lambda command: self.carry_out(command), clock=time.monotonic)
        self._done: deque[Callable[[], None]] = deque()
        # Writing to the second (a signal, another thread) ends the loop's wait.
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def state(self) -> CoreState:
        """The core's state, for reading."""
        return self.core.state

    # ---- events

    def handle(self, event: Event) -> None:
        """Pass an event to the core, and carry out its commands. Events that this causes are handled after it."""
        self._queue.handle(event)

    def hear(self, process: LibraryProcess, *, to_end: bool = False) -> None:
        """Read what a library has said, once or `to_end`, and tell the core."""
        said, is_open = process.receive(to_end=to_end)
        if said:
            self.handle(FromLibrary(process.library, said))
        if process.garbled:
            self.wires.unwatch(process)
            self.handle(LibraryGarbled(process.library, process.garbled))
        elif not is_open:
            self.wires.unwatch(process)
            self.handle(LibraryHungUp(process.library))

    def later(self, action: Callable[[], None]) -> None:
        """Run this in the loop's thread: other threads hand in their results so."""
        self._done.append(action)
        try:
            os.write(self.wake_write, b"x")
        except OSError:  # full: the loop wakes anyway
            pass

    def take_done(self) -> None:
        """Do what other threads have handed in."""
        try:
            while os.read(self.wake_read, 4096):
                pass
        except BlockingIOError:
            pass
        while self._done:
            self._done.popleft()()

    # ---- what its parts ask

    def devices_of(self, library: LibraryId) -> tuple[PilotDevice, ...]:
        """A library's devices."""
        return tuple(self.devices[device] for device in self.state.libraries[library].devices)

    def log_file(self, number: int) -> Path:
        """A library's log."""
        return self.logs / f"lib-{number}.log"
