"""The parts of an agent: the connection to the manager, the pilot's core, and the parts that execute its commands.

Messages that change the manager's records travel in numbered frames, which are kept until they are acknowledged. After
each reconnect, the pilot sends a hello, then these frames again in order. So the hello describes the state *before*
them: a call whose end is in one of the frames still counts as held (`UnacknowledgedFacts`).

All code runs in the loop's thread. Other threads pass their results with `Agent.later`.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stoker.dealer import Dealer, Keys
from stoker.errors import ProtocolError
from stoker.folders import folders_here
from stoker.log_files import SeldomLog
from stoker.pilot.agent.fetches import Fetches, Peers
from stoker.pilot.agent.offers import BOARD, OfferInspector
from stoker.pilot.agent.process import LibraryProcess, Wires, Zygotes
from stoker.pilot.agent.scratch import Parent, Scratch
from stoker.pilot.cache import ObjectCache
from stoker.pilot.core.commands import Command
from stoker.pilot.core.core import EventQueue, PilotCore
from stoker.pilot.core.events import Event, FromLibrary, LibraryGarbled, LibraryHungUp, ManagerAway, UnacknowledgedFacts
from stoker.pilot.core.state import CoreState, PilotFacts, Timers
from stoker.pilot.devices import PilotDevice, monitor
from stoker.pilot.devices.gpu import DRIVER_LIMIT_S
from stoker.pilot.devices.monitor import Monitor, OomKills, anonymous_bytes
from stoker.pilot.zygote.processes import tree
from stoker.protocol import to_manager, wire
from stoker.protocol.ids import DeviceId, LibraryId
from stoker.protocol.session import IDENTITY_MARK, SessionFolder
from stoker.protocol.to_pilot import ToPilot
from stoker.protocol.wire import Outbox

# ---- link


log = logging.getLogger("stoker.pilot")

FRAME_BYTES = 16_000_000  # larger batches of messages are split into several frames
_REFUSED_HANDSHAKES = 10  # after this many in a row, the manager does not accept the pilot's key
_PART_S = 1.0  # seconds that an ending pilot waits for the acknowledgement of its last frames
_SEARCH_S = 1.0  # seconds between two readings of the session's folder while the manager is away


class ManagerLink:
    """The connection to the manager (`dealer`), and messages to send."""

    def __init__(self, folder: SessionFolder, *, pilot: str, block: str = "") -> None:
        self._folder = folder
        self.session = folder.read()
        self.refused_frames = 0
        self._search_at = 0.0
        self._refusals = SeldomLog(log)
        self._batch: list[to_manager.FromPilot] = []
        self._passing: list[to_manager.CallYielded] = []  # pieces of results for the next frames
        self.outbox = Outbox()
        self._decode = wire.to_pilot_decoder()
        pair = folder.read_pilot_key(block)
        self.dealer = Dealer(
            self.session.address,
            name=f"{pilot}{IDENTITY_MARK.decode()}{secrets.token_hex(8)}",
            keys=Keys(self.session.server_key, pair.public, pair.secret),
            log=log,
        )

    def receive(self) -> Iterator[ToPilot]:
        for data in self.dealer.receive():
            try:
                messages = self._decode(data).messages
            except ProtocolError as error:
                self.refused_frames += 1
                self._refusals.warning("manager", f"refused a frame of the manager: {error}")
                continue
            yield from messages

    def post(self, message: to_manager.FromPilot) -> None:
        """Queue a message that must arrive for the next frame."""
        self._batch.append(message)

    def pass_on(self, pieces: to_manager.CallYielded) -> None:
        """Queue pieces for the next frames, or drop them without a connection."""
        self._passing.append(pieces)

    def flush(self) -> None:
        """Send the queued frames; keep numbered frames while there is no connection."""
        if self._passing:
            passing, self._passing = self._passing, []
            if self.dealer.connected:
                self._send(passing, keep=False)
        if self._batch:
            batch, self._batch = self._batch, []
            self._send(batch, keep=True)

    def acked(self, sequence: int) -> None:
        self.outbox.acked(sequence)

    def _send(self, messages: list[Any], *, keep: bool) -> None:
        frame = wire.encode(messages, sequence=self.outbox.sequence + 1) if keep else wire.encode(messages)
        if len(frame) > FRAME_BYTES and len(messages) > 1:
            half = len(messages) // 2
            self._send(messages[:half], keep=keep)
            self._send(messages[half:], keep=keep)
            return
        if keep:
            self.outbox.keep(self.outbox.next(), frame)
        if self.dealer.connected:
            self.dealer.send(frame)

    def say(self, message: to_manager.FromPilot) -> None:
        """Send a message that may be lost."""
        if self.dealer.connected:
            self.dealer.send(wire.encode([message]))

    def greet(self, hello: to_manager.PilotHello) -> None:
        """Send a hello, then all unacknowledged frames."""
        self.dealer.send(wire.encode([hello]))
        for frame in self.outbox.unacked():
            self.dealer.send(frame)

    def before(self) -> UnacknowledgedFacts:
        """Return the facts in unacknowledged frames (see the module)."""
        return said_in(self.outbox.unacked())

    def away(self, now: float) -> ManagerAway:
        session_over = ""
        if now >= self._search_at:
            self._search_at = now + _SEARCH_S
            session_over = self._folder.over()  # a pilot that does not see the session's folder cannot know
            if not session_over:
                try:
                    address = self._folder.read().address
                except Exception as error:  # the file is being replaced, or the file system is away: look again later
                    log.debug("session file: %s", error)
                else:
                    self.dealer.move_to(address)  # a restarted manager may listen elsewhere
        refuses_key = self.dealer.failed_handshakes >= _REFUSED_HANDSHAKES
        return ManagerAway(now - self.dealer.lost_at, refuses_key=refuses_key, session_over=session_over)

    def part(self, hear: Callable[[ToPilot], None], *, pause: Callable[[], object]) -> None:
        """Wait up to 1 s until the manager has acknowledged the last frames."""
        if not self.dealer.connected:
            return
        self.flush()
        until = time.monotonic() + _PART_S
        while self.dealer.connected and self.outbox.unacked() and time.monotonic() < until:
            if not self.dealer.readable():
                pause()
            self.dealer.came_back()
            for message in self.receive():
                hear(message)


def said_in(frames: Iterable[bytes]) -> UnacknowledgedFacts:
    """Return the facts in frames that change the manager's records."""
    known = UnacknowledgedFacts()
    decode = wire.from_pilot()
    for frame in frames:
        for message in decode(frame).messages:
            match message:
                case to_manager.CallsEnded(library=library, ends=ends):
                    known.left.setdefault(library, []).extend(end.call for end in ends)
                case to_manager.CallsReturned(library=library, calls=calls):
                    known.left.setdefault(library, []).extend(calls)
                case to_manager.CallEvicted(library=library, progress=progress):
                    known.left.setdefault(library, []).append(progress.call)
                case to_manager.LibraryGone(library=library, running=running, unstarted=unstarted):
                    known.gone[library] = [*running, *unstarted]
                case to_manager.LibraryReady(library=library):
                    known.ready.add(library)
                case _:
                    pass
    return known


# ---- agent


GRACE_S = 2.0
"""Seconds that running calls may continue after a signal from the batch system."""

PROBE_EVERY_S = 300.0  # seconds between two probes of a device without libraries


class PilotOptions(msgspec.Struct, frozen=True):
    pilot: str
    block: str = ""
    lease_s: float = 60.0
    grace_s: float = GRACE_S
    walltime_s: float = 0.0  # seconds of the job, from the site file; 0 = unknown
    probe: str = ""  # the command that probes a device (see `observing`); empty: our own, on GPUs
    probe_every_s: float = PROBE_EVERY_S
    in_batch: bool = False  # True if a batch system started the pilot, which then ends with its parent
    driver_limit_s: float = DRIVER_LIMIT_S
    """Seconds after which an unanswered GPU driver counts as hanging, a fault of the device."""
    umask: int = -1  # umask for libraries; -1: the pilot's own


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
        self.monitors: dict[str, Monitor] = {}  # by UUID of the GPU
        self.bare_bytes: dict[DeviceId, int] = {}  # memory in use on each GPU while no library was on it
        self.sees_all_processes = monitor.sees_all_processes()
        self.scratch = scratch
        self.parent = Parent(watched=options.in_batch)
        self.oom_kills = OomKills(lambda: anonymous_bytes(tree(os.getpid())))
        self.cache = cache
        self.peers = peers
        self.link = link
        self.zygotes = Zygotes(logs=self.logs, scratch=scratch.path, umask=options.umask)
        self.wires = Wires()
        self.search_path = folders_here()
        """Folders where libraries search modules after all others: the program's folder, if the pilot was started
        there.
        """
        self.processes: dict[LibraryId, LibraryProcess] = {}
        self.fetches = Fetches(self)
        self.offers = OfferInspector(self.core.state, board=scratch.path / BOARD)
        self.is_over = False  # True once the core has said `Leave`
        self.carry_out: Callable[[Command], None] = lambda _command: None
        self.check_standing: Callable[[], bool] = lambda: False
        """Tells the core if the pilot lost a resource of its job, before the core sees failures that this causes."""
        self.timers = Timers()
        self._queue = EventQueue(self.core, lambda command: self.carry_out(command), clock=time.monotonic)
        self._done: deque[Callable[[], None]] = deque()
        # A signal or a thread writes to `wake_write` to end the loop's wait.
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def state(self) -> CoreState:
        return self.core.state

    # ---- events

    def handle(self, event: Event) -> None:
        """Pass an event to the core, and execute its commands."""
        self._queue.handle(event)

    def hear(self, process: LibraryProcess, *, to_end: bool = False) -> None:
        """Pass a library's messages to the core: those that arrived, or all (`to_end`)."""
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
        """Run `action` in the loop's thread; thread-safe."""
        self._done.append(action)
        try:
            os.write(self.wake_write, b"x")
        except OSError:  # the pipe is full: the loop wakes anyway
            pass

    def take_done(self) -> None:
        try:
            while os.read(self.wake_read, 4096):
                pass
        except BlockingIOError:
            pass
        while self._done:
            self._done.popleft()()

    # ---- what its parts ask

    def devices_of(self, library: LibraryId) -> tuple[PilotDevice, ...]:
        return tuple(self.devices[device] for device in self.state.libraries[library].devices)

    def log_file(self, number: int) -> Path:
        return self.logs / f"lib-{number}.log"
