"""What an agent has: one object that its parts (`orders`, `starting`, `talk`, `ending`, `watch`) work on."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from stoker.contexts.recipe import Recipe
from stoker.manager.protocol.blocks import LossReason
from stoker.manager.protocol.ids import DeviceId, LibraryId
from stoker.manager.protocol.session import SessionFolder
from stoker.manager.protocol.to_manager import Heartbeat, LibraryFacts, LibraryUse, PilotHello, SnapshotHere
from stoker.manager.protocol.wire import VERSION
from stoker.pilot.agent.library import Library
from stoker.pilot.agent.link import ManagerLink
from stoker.pilot.agent.objects import Objects
from stoker.pilot.agent.parent import Parent
from stoker.pilot.agent.scratch import Scratch
from stoker.pilot.agent.usage import cpu_seconds, resident_bytes
from stoker.pilot.agent.wires import Wires
from stoker.pilot.agent.zygotes import Zygotes
from stoker.pilot.cache import ObjectCache
from stoker.pilot.core.ledger import Ledger
from stoker.pilot.core.library import State
from stoker.pilot.devices import Device, memory
from stoker.pilot.devices.gpu import DRIVER_LIMIT_S
from stoker.pilot.devices.monitor import Monitor
from stoker.working_folder import folders_here

log = logging.getLogger("stoker.pilot")

GRACE_S = 2.0
"""How long calls that run may still take when the pilot is told to go at once (a signal from the batch system)."""

PROBE_EVERY_S = 300.0
"""How often a device on which nothing is loaded is probed again."""


TOLD_RECIPE_BYTES = 65_536
"""The loader of a recipe that goes along with a hello has no more bytes than this. A library of a larger one cannot be
adopted by a manager that has lost its recipe, unless the client defines it first."""


def told_recipes(recipes: Iterable[Recipe]) -> tuple[Recipe, ...]:
    """Recipes that go along with a hello, each once."""
    return tuple({recipe.key: recipe for recipe in recipes if len(recipe.loader) <= TOLD_RECIPE_BYTES}.values())


class Options(msgspec.Struct, frozen=True):
    """What a pilot was started with."""

    pilot: str
    block: str = ""
    lease_s: float = 60.0
    grace_s: float = GRACE_S
    walltime_s: float = 0.0
    """How long its job may last, as the site file says; 0 = it does not say."""
    probe: str = ""
    """The command that probes a device (see `probing`); empty: our own, on GPUs."""
    probe_every_s: float = PROBE_EVERY_S
    in_batch: bool = False
    """Whether a batch system started it, so that it ends with the process that did."""
    driver_limit_s: float = DRIVER_LIMIT_S
    """A GPU's driver that has not answered for so long hangs, which is a fault of the device."""


class Agent:
    """The state of one agent. Everything happens in its loop's thread, but for `later`, which any thread may call."""

    def __init__(
        self,
        options: Options,
        *,
        session: SessionFolder,
        devices: tuple[Device, ...],
        scratch: Scratch,
        cache: ObjectCache,
        troubles: tuple[str, ...] = (),
        lacks: str = "",
    ) -> None:
        self.options = options
        self.session = session
        self.logs = session.pilot(options.pilot)
        self.devices: dict[DeviceId, Device] = {device.facts.device: device for device in devices}
        self.ledger = Ledger({device.facts.device: device.facts.memory_bytes for device in devices})
        self.troubles = troubles
        """What is wrong with what the batch system granted, for the manager."""
        self.lacks = lacks
        """What its site asks for and it has not."""
        self.monitors: dict[str, Monitor] = {}
        """What watches each GPU, by its UUID."""
        self.faults: dict[DeviceId, str] = {
            device.facts.device: device.facts.fault for device in devices if device.facts.fault
        }
        """Devices that have failed, and why."""
        self.bare_bytes: dict[DeviceId, int] = {}
        """Memory of each GPU that was taken while no library was on it."""
        self.sees_all_processes = memory.sees_all_processes()
        self.scratch = scratch
        self.parent = Parent(watched=options.in_batch)
        self.cache = cache
        self.objects = Objects(session, cache)
        self.handing_in = 0
        """Large results that are on their way to the session's seed."""
        self.last_library = 0
        """The highest number of a library that it was told to start."""
        self.told_snapshots: list[SnapshotHere] = []
        self.snapshots: set[str] = set()
        """Forms of contexts that the manager was told of (see `snapshots`)."""
        self.zygotes = Zygotes(logs=self.logs, scratch=scratch.path)
        self.link = ManagerLink(session, pilot=options.pilot, block=options.block)
        self.wires = Wires()
        self.search_path = folders_here()
        """Where libraries look for modules last: beside the user's program, where the pilot was started there."""
        self.libraries: dict[LibraryId, Library] = {}
        self.gone: OrderedDict[LibraryId, LibraryFacts] = OrderedDict()
        """What libraries were that have ended, until the manager surely knows."""
        self.lease_s = options.lease_s
        self.heartbeat_s = 5.0
        self.heartbeat_at = 0.0
        """When the next heartbeat is due."""
        self.welcomed_at = 0.0
        self.ends_at = float("inf")
        """When the batch system ends this job, and when the pilot begins to leave by itself (see `walltime`)."""
        self.drain_at = float("inf")
        self.leaving = ""
        """Why the pilot ends; empty while it does not."""
        self.loss: LossReason | None = None
        """Why it ends although neither the manager nor its walltime wants it; None while they do, or it stays."""
        self.leave_by = float("inf")
        self.farewell = True
        """Whether the manager is to be told of the end (not when it refused the pilot)."""
        self.exit_code = 0
        self._done: deque[Callable[[], None]] = deque()
        # Writing to the second (a signal, another thread) ends the loop's wait.
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def later(self, action: Callable[[], None]) -> None:
        """Have the loop do this: how other threads hand in what they have done."""
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

    def leave(self, reason: str, *, within_s: float, code: int = 0, loss: LossReason | None = None) -> None:
        """Begin to end. Called again it can only make it sooner. `loss`: why the manager is to count it as lost."""
        if not self.leaving:
            log.info("leaving: %s", reason)
            self.exit_code = code
            self.loss = loss
        self.leaving = self.leaving or reason
        self.leave_by = min(self.leave_by, time.monotonic() + within_s)

    def hello(self) -> PilotHello:
        """What this pilot is and holds, as far as the manager's books go (see `link`)."""
        before = self.link.before()
        held = [
            LibraryFacts(
                library=number,
                recipe=library.state.recipe.key,  # type: ignore[arg-type]
                devices=library.state.devices,
                ready=library.state.state in (State.READY, State.DRAINING) and number not in before.ready,
                calls=tuple(dict.fromkeys((*before.left.get(number, ()), *library.state.held))),
                reserved_bytes=self.ledger.held(number),
                memory_bytes=library.resident_bytes,
                device_bytes=library.device_bytes,
            )
            for number, library in self.libraries.items()
        ]
        held += [
            msgspec.structs.replace(
                facts,
                ready=facts.ready and number not in before.ready,
                calls=tuple(dict.fromkeys((*before.left.get(number, ()), *before.gone[number]))),
            )
            for number, facts in self.gone.items()
            if number in before.gone
        ]
        return PilotHello(
            protocol=VERSION,
            session=self.link.session.session,
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=tuple(device.facts for device in self.devices.values()),
            troubles=self.troubles,
            lacks=self.lacks,
            block=self.options.block,
            libraries=tuple(held),
            objects=self.objects.listed(),
            ends_in_s=0.0 if self.ends_at == float("inf") else max(0.001, self.ends_at - time.monotonic()),
            peer=self.objects.peer,
            cache=self.cache.identity,
            acknowledged=self.link.acknowledged,
            recipes=told_recipes(library.state.recipe for library in self.libraries.values()),
            last_library=self.last_library,
            faults=dict(self.faults),
            folder=f"{socket.gethostname()}:{self.logs}" if self.session.is_carried else str(self.logs),
        )

    def heartbeat(self) -> Heartbeat:
        """Measured memory of libraries, and of the cache."""
        uses = []
        for number, library in self.libraries.items():
            if library.pid:
                library.resident_bytes = resident_bytes(library.pid)
                uses.append(
                    LibraryUse(
                        library=number,
                        memory_bytes=library.resident_bytes,
                        device_bytes=library.device_bytes,
                        cpu_s=cpu_seconds(library.pid),
                    )
                )
        return Heartbeat(
            libraries=tuple(uses), cache_bytes=self.cache.used_bytes(), refused_frames=self.link.refused_frames
        )

    def find(self, number: int) -> Library | None:
        """A library that has not ended."""
        return self.libraries.get(LibraryId(number))

    def devices_of(self, library: Library) -> tuple[Device, ...]:
        """A library's devices."""
        return tuple(self.devices[device] for device in library.state.devices)

    def log_file(self, number: int) -> Path:
        """A library's log."""
        return self.logs / f"lib-{number}.log"
