"""The agent's view of its child processes: libraries, zygotes, and the poller of their sockets."""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.pilot.cache import Pin
from stoker.pilot.library import call_records, connection
from stoker.pilot.zygote import processes
from stoker.pilot.zygote.client import Zygote
from stoker.pilot.zygote.processes import TRACKER_LIMIT_S, MemoryLimitCheck
from stoker.protocol import wire
from stoker.protocol.calls import OutputRange
from stoker.protocol.ids import CallId, LibraryId
from stoker.protocol.to_agent import ToAgent

# ---- a library's process

_decode = wire.to_agent_decoder()


class LibraryProcess:
    """The process of a library. The agent keeps this object until the core forgets the library."""

    def __init__(self, library: LibraryId, *, folder: Path, log: str) -> None:
        self.library = library
        self.folder = folder
        self.log = log
        self.zygote: Zygote | None = None
        self.pid = 0
        self.memory = MemoryLimitCheck()
        self.object_pins: list[Pin] = []
        self.argument_pins: dict[CallId, Pin] = {}  # large arguments of calls, pinned in the object cache
        self.invalid_bytes_reason = ""  # reason why the socket is no longer read, after an invalid message
        self._socket: socket.socket | None = None
        self._reader: connection.FrameReader | None = None
        self._unsent = bytearray()

    # ---- its socket

    def make_socket_pair(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.setblocking(False)
        self._socket, self._reader = ours, connection.FrameReader(ours)
        return theirs

    def fileno(self) -> int:
        return self._socket.fileno() if self._socket is not None else -1

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send_messages(self, messages: list[Any]) -> None:
        """Send messages in one frame. `send_unsent` later sends the bytes that the socket does not accept now."""
        self.send_bytes(connection.pack_frame(messages))

    def send_bytes(self, data: bytes | bytearray) -> None:
        if self._unsent:
            self._unsent += data
            return
        sent = self._send_without_blocking(data)
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]

    def send_unsent(self) -> None:
        sent = self._send_without_blocking(self._unsent)
        del self._unsent[:sent]

    def _send_without_blocking(self, data: bytes | bytearray) -> int:
        if self._socket is None:
            return len(data)
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the process has ended; the zygote reports its end
            return len(data)

    def receive_messages(self, *, to_end: bool = False) -> tuple[list[ToAgent], bool]:
        """Read the socket once, or until its end (`to_end`). Return the messages, and True if the socket is open.
        Invalid bytes set `invalid_bytes_reason`.
        """
        out: list[ToAgent] = []
        if self._reader is None or self.invalid_bytes_reason:
            return out, False
        try:
            while self._reader.receive_bytes(block=False):
                while (frame := self._reader.next_frame()) is not None:
                    out += _decode(frame).messages
                if not to_end:
                    return out, True
        except BlockingIOError:
            return out, True
        except OSError:
            pass
        except Exception as error:
            self.invalid_bytes_reason = str(error) or repr(error)
        return out, False

    # ---- its calls and pins

    def running_calls(self) -> list[tuple[CallId, float]]:
        """Return the running calls, each with its run time in seconds. Reads twice, to ignore half-written records."""
        first = {(run.call, run.start_ns) for run in self._read_call_records()}
        now = time.monotonic_ns()
        second = self._read_call_records() if first else []
        return [(CallId(run.call), (now - run.start_ns) / 1e9) for run in second if (run.call, run.start_ns) in first]

    def recorded_calls(self) -> tuple[CallId, ...]:
        return tuple(CallId(run.call) for run in self._read_call_records())

    def recover_last_call_output(self) -> OutputRange | None:
        """Return the output of the call that ran when the process ended; None unless exactly one call ran."""
        ran = self._read_call_records()
        for run in ran:
            if run.log_offset != call_records.UNKNOWN_OFFSET:
                call_records.recover_call_output(self.log, call_records.call_output_path(self.folder, run.slot))
        if len(ran) != 1 or ran[0].log_offset == call_records.UNKNOWN_OFFSET:
            return None
        try:
            end = os.stat(self.log).st_size
        except OSError:
            return None
        return OutputRange(self.log, start=min(ran[0].log_offset, end), end=end)

    def _read_call_records(self) -> list[call_records.RunningCall]:
        return call_records.read_running_calls(self.folder / "running")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for pin in (*self.object_pins, *self.argument_pins.values()):
            pin.release()
        self.object_pins.clear()
        self.argument_pins.clear()


MessageSource = LibraryProcess | Zygote


class AgentPoller:
    """The poller of the agent's loop: the watched sockets, and the queued messages for libraries."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sources: dict[int, MessageSource] = {}
        self._watched: dict[int, int] = {}
        self._batches: dict[LibraryProcess, list[Any]] = {}

    def watch_descriptor(self, number: int) -> None:
        self._epoll.register(number, select.EPOLLIN)

    def wait_for_events(self, timeout_s: float) -> list[tuple[int, int]]:
        return self._epoll.poll(timeout_s)

    def watched_source(self, number: int) -> MessageSource | None:
        return self._sources.get(number)

    def watch(self, source: MessageSource) -> None:
        """Poll `source` for input, and for output if it has unsent bytes."""
        number = source.fileno()
        if number < 0:
            return
        what = select.EPOLLIN | (select.EPOLLOUT if source.has_unsent else 0)
        if number not in self._watched:
            self._epoll.register(number, what)
        elif self._watched[number] != what:
            self._epoll.modify(number, what)
        self._watched[number] = what
        self._sources[number] = source

    def unwatch(self, source: MessageSource) -> None:
        """Stop polling `source`, before its socket is closed."""
        number = source.fileno()
        if self._sources.get(number) is source:
            self._epoll.unregister(number)
            del self._sources[number], self._watched[number]

    def queue_message(self, library: LibraryProcess, message: Any) -> None:
        self._batches.setdefault(library, []).append(message)

    def send_queued_messages(self) -> None:
        batches, self._batches = self._batches, {}
        for library, messages in batches.items():
            library.send_messages(messages)
            if library.has_unsent:
                self.watch(library)

    def close(self) -> None:
        self._epoll.close()


# ---- zygotes

_MAX_IDLE_S = 600.0
_CLEANUP_LIMIT_S = 3.0 + TRACKER_LIMIT_S  # seconds that a zygote has to end its libraries and their processes


class Zygotes:
    """A zygote for each set of preloaded modules, so that the imports of one recipe do not affect other recipes."""

    def __init__(self, *, logs: Path, scratch: Path, umask: int = -1) -> None:
        self._umask = umask
        self._logs = logs
        self._scratch = scratch
        self._by_preload: dict[tuple[str, ...], Zygote] = {}
        self._used_at: dict[tuple[str, ...], float] = {}
        self._numbers = itertools.count()

    def get_or_start(self, preload: tuple[str, ...]) -> tuple[Zygote, bool]:
        """Return the zygote for these modules, and True if it is new. Raises OSError."""
        key = tuple(dict.fromkeys(preload))
        self._used_at[key] = time.monotonic()
        if is_new := key not in self._by_preload:
            log = self._logs / f"zygote-{next(self._numbers)}.log"
            self._by_preload[key] = Zygote(key, log=log, scratch=self._scratch, environ=os.environ, umask=self._umask)
        return self._by_preload[key], is_new

    def __iter__(self) -> Iterator[Zygote]:
        return iter(list(self._by_preload.values()))

    def remove_zygote(self, zygote: Zygote) -> None:
        """Kill a zygote and the remaining processes of its libraries."""
        self._by_preload.pop(zygote.preload, None)
        zygote.kill_and_reap()
        processes.kill_stray_children({other.pid for other in self}, of_main_thread=True)

    def long_idle_zygotes(self) -> list[Zygote]:
        """Return the zygotes that have preloaded modules, have no libraries, and were unused for 10 minutes."""
        now = time.monotonic()
        return [z for z in self if not z.libraries and z.preload and now - self._used_at[z.preload] > _MAX_IDLE_S]

    def close(self) -> None:
        here = list(self)
        for zygote in here:
            zygote.close()
        for zygote in here:
            if zygote.has_preloaded:  # a zygote that still imports modules has no library
                zygote.wait_for_end(_CLEANUP_LIMIT_S)
            zygote.kill_and_reap()
        self._by_preload.clear()
        processes.kill_stray_children(())
        processes.end_resource_trackers()
