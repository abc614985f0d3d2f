"""The agent of a pilot holds the connection to the manager and the pilot's core, and executes the core's commands.

Messages that change the manager's records are sent in numbered frames, which the pilot keeps until the manager
acknowledges them. After each reconnect, the pilot sends a hello, then the unacknowledged frames in order. The hello
therefore describes the state before the unacknowledged frames: it lists a call as held even if one of these frames
reports the call's end (`UnacknowledgedFacts`).

All code of the agent runs in the thread of the loop. Other threads pass their results with `Agent.run_in_loop`.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, assert_never

import msgspec

from stoker.connections import split_address
from stoker.dealer import CurveKeys, Dealer
from stoker.errors import ProtocolError, SessionError
from stoker.folders import working_folder_if_exists
from stoker.log_files import RateLimitedLog
from stoker.pilot.agent.offers import BOARD_FILE, OfferInspector
from stoker.pilot.agent.process import AgentPoller, LibraryProcess, Zygotes
from stoker.pilot.agent.scratch import ParentProcess, Scratch
from stoker.pilot.cache import CacheFetch, ObjectCache, Pin, ServedCache
from stoker.pilot.core import commands, events
from stoker.pilot.core.reactor import EventQueue, PilotCore
from stoker.pilot.core.state import CoreState, PilotFacts, Timers
from stoker.pilot.devices import PilotDevice, monitor
from stoker.pilot.devices.monitor import GpuMonitor, OomKillDetector, anonymous_bytes
from stoker.pilot.transfer import wire as transfer_wire
from stoker.pilot.transfer.fetch import SEED_FILE, read_key
from stoker.pilot.transfer.server import ObjectServer
from stoker.pilot.zygote.processes import process_tree
from stoker.protocol import to_manager, wire
from stoker.protocol.ids import DeviceId, LibraryId
from stoker.protocol.session import IDENTITY_MARK, SessionFolder
from stoker.protocol.to_pilot import FetchObject, ToPilot
from stoker.protocol.wire import Outbox

# ---- link

log = logging.getLogger("stoker.pilot")

FRAME_BYTES = 16_000_000  # a batch of messages above this size is split into several frames
_REFUSED_HANDSHAKES = 10  # after this many failed handshakes in a row, the manager is assumed to refuse the key
_LAST_ACKNOWLEDGEMENT_S = 1.0  # seconds that an exiting pilot waits for its last acknowledgement
_SEARCH_S = 1.0  # seconds between two readings of the session's folder while disconnected


class ManagerLink:
    """The pilot's connection to the manager (`dealer`), and the messages that wait to be sent."""

    def __init__(self, folder: SessionFolder, *, pilot: str, block: str = "") -> None:
        self._folder = folder
        self.session = folder.read()
        self.refused_frames = 0
        self._search_at = 0.0
        self._refusals = RateLimitedLog(log)
        self._batch: list[to_manager.FromPilot] = []
        self._queued_pieces: list[to_manager.CallYielded] = []  # pieces of results to send in the next frames
        self.outbox = Outbox()
        self._decode = wire.to_pilot_decoder()
        pair = folder.read_pilot_key(block)
        self.dealer = Dealer(
            self.session.address,
            name=f"{pilot}{IDENTITY_MARK.decode()}{secrets.token_hex(8)}",
            keys=CurveKeys(self.session.server_key, pair.public, pair.secret),
            log=log,
        )

    def receive_messages(self) -> Iterator[ToPilot]:
        for data in self.dealer.receive():
            try:
                messages = self._decode(data).messages
            except ProtocolError as error:
                self.refused_frames += 1
                self._refusals.warning("manager", f"refused a frame of the manager: {error}")
                continue
            yield from messages

    def execute_command(self, command: commands.MessageToManager) -> None:
        match command:
            case commands.SendToManager(message=message):
                self._batch.append(message)
            case commands.DropAcknowledgedFrames(sequence=sequence):
                self.outbox.acknowledge(sequence)
            case commands.SendPieces(message=pieces):
                self._queued_pieces.append(pieces)
            case commands.SendHeartbeat(message=heartbeat):
                if self.dealer.connected:
                    self.dealer.send(wire.encode([heartbeat]))
            case commands.SendHello(hello=hello):
                for frame in (wire.encode([hello]), *self.outbox.unacknowledged_frames()):
                    self.dealer.send(frame)
            case _:
                assert_never(command)

    def send_queued_frames(self) -> None:
        """Send the queued frames. Without a connection, keep the numbered frames and drop the other frames."""
        if self._queued_pieces:
            passing, self._queued_pieces = self._queued_pieces, []
            if self.dealer.connected:
                self._send(passing, keep=False)
        if self._batch:
            batch, self._batch = self._batch, []
            self._send(batch, keep=True)

    def _send(self, messages: list[Any], *, keep: bool) -> None:
        frame = wire.encode(messages, sequence=self.outbox.sequence + 1) if keep else wire.encode(messages)
        if len(frame) > FRAME_BYTES and len(messages) > 1:
            half = len(messages) // 2
            self._send(messages[:half], keep=keep)
            self._send(messages[half:], keep=keep)
            return
        if keep:
            self.outbox.keep(self.outbox.take_next_number(), frame)
        if self.dealer.connected:
            self.dealer.send(frame)

    def make_hello_event(self, objects: Sequence[str]) -> events.HelloDue:
        """Send the queued frames, and return the event that a hello is due. `objects`: names of cached objects."""
        self.send_queued_frames()
        return events.HelloDue(
            collect_unacknowledged_facts(self.outbox.unacknowledged_frames()), self.outbox.acknowledged, objects
        )

    def make_absence_event(self, now: float) -> events.ManagerAway:
        session_over = ""
        if now >= self._search_at:
            self._search_at = now + _SEARCH_S
            session_over = self._folder.end_reason()
            if not session_over:
                try:
                    address = self._folder.read().address
                except Exception as error:  # the file is being replaced, or the file system hangs
                    log.debug("session file: %s", error)
                else:
                    self.dealer.reconnect_to(address)  # the address changes if the manager restarts
        refuses_key = self.dealer.failed_handshakes >= _REFUSED_HANDSHAKES
        return events.ManagerAway(now - self.dealer.lost_at, refuses_key=refuses_key, session_over=session_over)

    def send_last_frames(self, handle_event: Callable[[events.Event], None], *, pause: Callable[[], object]) -> None:
        """Send the last frames before the exit, and wait up to 1 s for their acknowledgement."""
        if not self.dealer.connected:
            return
        self.send_queued_frames()
        until = time.monotonic() + _LAST_ACKNOWLEDGEMENT_S
        while self.dealer.connected and self.outbox.unacknowledged_frames() and time.monotonic() < until:
            if not self.dealer.has_input():
                pause()
            self.dealer.handle_connection_changes()
            for message in self.receive_messages():
                handle_event(events.FromManager(message))


def collect_unacknowledged_facts(frames: Iterable[bytes]) -> events.UnacknowledgedFacts:
    known = events.UnacknowledgedFacts()
    decode = wire.from_pilot_decoder()
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
    return known


# ---- objects


class PeerServer:
    """The transfer server of one pilot, and the keys for transfers and gangs."""

    def __init__(self, session: SessionFolder, cache: ObjectCache) -> None:
        self.served_cache = ServedCache(cache)
        self.host = "127.0.0.1"  # address at which other pilots reach this machine
        with suppress(OSError, ValueError, SessionError):
            self.host = transfer_wire.local_address_for_host(
                split_address(session.read().address.removeprefix("tcp://"))[0]
            )
        self.key = b""
        with suppress(OSError, ValueError):
            self.key = read_key(session.key_file("transfer"))
        # Libraries derive the keys of gangs from this secret. They cannot transfer objects with it.
        self.gang_key = hmac.digest(self.key, b"gangs", "sha256") if self.key else b""
        self._session = session
        self._server: ObjectServer | None = None
        if not self.key:
            log.info("the session has no transfer key: this pilot does not serve objects to other pilots")
            return
        try:
            self._server = ObjectServer(self.served_cache, key=self.key, host=self.host)
        except (OSError, ValueError) as error:
            log.warning("this pilot does not serve objects to other pilots: %s", error)

    @property
    def address(self) -> str:
        return self._server.address if self._server is not None else ""

    @property
    def is_serving(self) -> bool:
        return self._server is not None and bool(self._server.served_peers)

    def find_seed(self) -> str:
        """Return the address of the session's seed (file server); empty if none runs."""
        try:
            return (self._session.path / SEED_FILE).read_text().strip() if self.key else ""
        except OSError:
            return ""

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class OngoingFetch:
    """A fetch of one object that is in progress (see `objects`)."""

    def __init__(self, order: FetchObject) -> None:
        self.order = order
        self.cache_fetch: CacheFetch | None = None


# ---- agent


class PilotOptions(msgspec.Struct, frozen=True):
    walltime_s: float  # walltime of the job in seconds, from the site file; 0 if unknown
    probe: str  # command that probes a device; if empty, Stoker's own probe tests the GPUs
    in_batch: bool  # True in a batch job: the pilot exits when its parent process ends
    umask: int  # umask of libraries


class Agent:
    """The agent of one pilot. The modules `loop`, `processes`, `objects` and `observing` act on an `Agent`."""

    def __init__(
        self, facts: PilotFacts, options: PilotOptions, *, session: SessionFolder, devices: tuple[PilotDevice, ...],
        scratch: Scratch, cache: ObjectCache, link: ManagerLink, peers: PeerServer,
    ) -> None:  # fmt: skip
        self.core = PilotCore(facts)
        self.options = options
        self.session = session
        self.devices: dict[DeviceId, PilotDevice] = {device.facts.device: device for device in devices}
        self.monitors: dict[str, GpuMonitor] = {}  # the monitor of each GPU, by UUID
        self.bare_bytes: dict[DeviceId, int] = {}  # bytes in use on each GPU while no library uses the GPU
        self.sees_all_processes = monitor.sees_all_processes()
        self.scratch = scratch
        self.parent = ParentProcess(ends_with_parent=options.in_batch)
        self.oom_kills = OomKillDetector(lambda: anonymous_bytes(process_tree(os.getpid())))
        self.cache = cache
        self.peers = peers
        self.link = link
        self.zygotes = Zygotes(logs=session.pilot_folder(facts.pilot), scratch=scratch.path, umask=options.umask)
        self.poller = AgentPoller()
        self.search_path = working_folder_if_exists()  # the program's folder, if the pilot was started there
        self.processes: dict[LibraryId, LibraryProcess] = {}
        self.fetches: dict[str, OngoingFetch] = {}
        self.arrived_pins: dict[str, Pin] = {}  # pins that keep arrived objects until the libraries have pinned them
        self.offer_inspector = OfferInspector(self.core.state, board=scratch.path / BOARD_FILE)
        self.must_exit = False  # True once the core has issued the command `ExitPilot`
        self.execute_command: Callable[[commands.Command], None] = lambda _command: None
        self.timers = Timers()
        self._queue = EventQueue(self.core, lambda command: self.execute_command(command), clock=time.monotonic)
        self._queued_actions: deque[Callable[[], None]] = deque()
        # A signal handler or a thread writes to `wake_write` to wake the loop.
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def state(self) -> CoreState:
        return self.core.state

    # ---- events

    def handle_event(self, event: events.Event) -> None:
        self._queue.handle_event(event)

    def receive_library_messages(self, process: LibraryProcess, *, to_end: bool = False) -> None:
        """Pass messages of a library to the core. With `to_end`, read until the end of the socket."""
        said, is_open = process.receive_messages(to_end=to_end)
        if said:
            self.handle_event(events.FromLibrary(process.library, said))
        if process.invalid_bytes_reason:
            self.poller.unwatch(process)
            self.handle_event(events.LibraryBytesInvalid(process.library, process.invalid_bytes_reason))
        elif not is_open:
            self.poller.unwatch(process)
            self.handle_event(events.LibrarySocketClosed(process.library))

    def run_in_loop(self, action: Callable[[], None]) -> None:
        """Run `action` in the thread of the loop. Any thread may call this method."""
        self._queued_actions.append(action)
        with suppress(OSError):  # if the pipe is full, its earlier bytes wake the loop
            os.write(self.wake_write, b"x")

    def run_queued_actions(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self.wake_read, 4096):
                pass
        while self._queued_actions:
            self._queued_actions.popleft()()

    # ---- queries of its modules

    def devices_of(self, library: LibraryId) -> tuple[PilotDevice, ...]:
        return tuple(self.devices[device] for device in self.state.libraries[library].devices)
