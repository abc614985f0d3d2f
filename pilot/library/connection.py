"""The connection between a library and its agent: a Unix socket pair.

The first frame contains the library's settings. A frame begins with its length in 5 bytes (little endian) and a mark of
3 bytes. The mark detects bytes that user code wrote to this socket.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.step_times import StepTimes
from stoker.errors import ProtocolError
from stoker.protocol.calls import CallEnd, CallProgress, Failure, FailureKind
from stoker.protocol.to_agent import BatchReport, Reports, RunEvicted, RunsEnded, Yielded

# ---- settings

_TEXT_MOST = 40_000
_TAIL_LINES = 20


class Settings(msgspec.Struct, frozen=True):
    """`objects`: folder for large results. `host`: address of this machine for other pilots. `turns`: file in which
    engines request turns (`TurnBoard`). `probe`: command that tests a device.
    """

    pilot: str
    library: int
    folder: str
    log: str
    objects: str
    search_path: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    gang_key: bytes = b""
    turns: str = ""
    probe: tuple[str, ...] = ()

    def failure(self, kind: FailureKind, message: str, *, tail: str = "") -> Failure:
        return Failure(kind, clean(message), self.pilot, self.library, tail=clean(tail), log=self.log)


def clean(text: str) -> str:
    """Convert a user's text to valid UTF-8, and cut the middle of a long text."""
    if len(text) > _TEXT_MOST:
        text = f"{text[: _TEXT_MOST // 2]} … {len(text) - _TEXT_MOST:,} characters … {text[-_TEXT_MOST // 2 :]}"
    return text.encode("utf-8", "replace").decode()


def print_exception(error: BaseException) -> str:
    """Print an exception of user code to the library's log, and return the last lines."""
    trace = error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, trace.tb_next if trace else None))
    print(text, file=sys.stderr, flush=True)  # noqa: T201
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


decode_settings = msgspec.msgpack.Decoder(Settings).decode
encode_settings = msgspec.msgpack.Encoder().encode


# ---- frames

_HEAD = struct.Struct("<Q")
_LENGTH_BITS = 40
_MARK = 0xD7A5C1 << _LENGTH_BITS  # 3 marker bytes in the head of each frame, which no UTF-8 text contains
MOST_BYTES = 1 << 32  # maximum frame length, as in MessagePack
_ROOM = 1 << 18
_encode_into = msgspec.msgpack.Encoder().encode_into


def pack(messages: list[Any]) -> bytearray:
    out = bytearray(_HEAD.size)
    _encode_into((0, messages), out, _HEAD.size)
    _HEAD.pack_into(out, 0, _MARK | len(out) - _HEAD.size)
    return out


def pack_raw(body: bytes) -> bytes:
    return _HEAD.pack(_MARK | len(body)) + body


class FrameReader:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(_ROOM)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def fill(self, *, block: bool) -> bool:
        """Read the received bytes. Return False at the end of the stream. Raises BlockingIOError if no data has
        arrived.
        """
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > 16 * _ROOM:
                self._resize(_ROOM)
        elif self._start and self._end == len(self._buffer):
            self._resize(len(self._buffer))
        count = self._sock.recv_into(self._view[self._end :], 0, 0 if block else socket.MSG_DONTWAIT)
        self._end += count
        return count > 0

    def next(self) -> memoryview | None:
        """Return the next complete frame, or None. The frame is valid until the next `fill`. Raises ProtocolError."""
        here = self._end - self._start
        if here < _HEAD.size:
            self._make_room(_HEAD.size)
            return None
        length = _HEAD.unpack_from(self._buffer, self._start)[0] ^ _MARK
        first = self._start + _HEAD.size
        if length > MOST_BYTES:
            raise ProtocolError(f"the bytes {bytes(self._view[self._start : first])!r} do not begin a frame")
        if here < _HEAD.size + length:
            self._make_room(_HEAD.size + length)
            return None
        self._start = first + length
        return self._view[first : self._start]

    def _make_room(self, frame_bytes: int) -> None:
        if self._start + frame_bytes <= len(self._buffer):
            return
        here = self._end - self._start
        if self._end == len(self._buffer) or self._start:
            self._resize(min(max(_ROOM, frame_bytes), max(_ROOM, 4 * here)))

    def _resize(self, size: int) -> None:
        fresh = bytearray(size)
        here = self._end - self._start
        fresh[:here] = self._view[self._start : self._end]
        self._buffer, self._view = fresh, memoryview(fresh)
        self._start, self._end = 0, here


# ---- outbox

_REPORT_S = 0.05  # minimum seconds between two progress reports
_now = time.perf_counter


class LibraryOutbox:
    """Sends a library's messages, from any thread. `lost` receives calls whose end could not be reported."""

    def __init__(self, sock: socket.socket, *, lost: Callable[[OSError, list[int]], NoReturn]) -> None:
        self._sock = sock
        self._lost = lost
        self._sending = threading.Lock()
        self.ends: deque[CallEnd] = deque()
        self.oldest_end = 0.0  # time (`time.perf_counter`) when the oldest entry of `ends` was added
        self._reports: dict[int, CallProgress] = {}
        self._reported_at = 0.0

    def report(self, progress: CallProgress) -> None:
        """Send a call's progress with the next frame, or now if the last report is over 50 ms old."""
        self._reports[progress.call] = _with_checkpoint(progress, self._reports.get(progress.call))
        if _now() - self._reported_at > _REPORT_S:
            self.send_waiting()

    def add(self, outcome: CallEnd | CallProgress, *, ended_at: float) -> None:
        """Queue the outcome of an ended call, or send the checkpoint of an evicted call now."""
        report = self._reports.pop(outcome.call, None)
        if isinstance(outcome, CallProgress):
            self.send([RunEvicted(progress=_with_checkpoint(outcome, report))])
            return
        if report is not None:  # send the call's last progress before its outcome
            self.send([Reports([report])])
        if not self.ends:
            self.oldest_end = ended_at
        self.ends.append(outcome)

    def send_waiting(self) -> None:
        with self._sending:
            ends, out = self.ends, []
            while ends:
                out.append(ends.popleft())
            messages: list[Any] = [RunsEnded(out)] if out else []
            if self._reports:
                reports, self._reports = self._reports, {}
                messages.append(Reports(list(reports.values())))
                self._reported_at = _now()
            if messages:
                self._send(messages)

    def send(self, messages: list[Any]) -> None:
        with self._sending:
            self._send(messages)

    def send_pieces(self, pieces: list[Yielded]) -> None:
        if self.ends:
            self.send_waiting()
        self.send(pieces)

    def _send(self, messages: list[Any]) -> None:
        try:
            self._sock.sendall(pack(messages))
        except OSError as error:
            ended: list[int] = [m.progress.call for m in messages if isinstance(m, RunEvicted)]
            ended += [end.call for m in messages if isinstance(m, RunsEnded) for end in m.ends]
            self._lost(error, ended)


def _with_checkpoint(progress: CallProgress, waiting: CallProgress | None) -> CallProgress:
    if waiting is None or not waiting.state or progress.state:
        return progress
    return msgspec.structs.replace(progress, state=waiting.state)


# ---- batch reports

_EVERY_S = 10.0  # minimum seconds between two batch reports
_LOOK_S = 1.0


class BatchReports:
    """Reports the batch load of a context's engine to the pilot."""

    def __init__(self, context: Any, *, say: Callable[[BatchReport], None]) -> None:
        self._context = context
        self._say = say
        self._load = EngineLoad()
        self._sent_at = -_EVERY_S

    def send_if_due(self, now: float) -> None:
        """Send new step times of a profiler immediately. Send a changed load at most every 10 s, or immediately if the
        token cache will be too small.
        """
        times, load = self._times(urgent=True), self._context.batch_load()
        if not isinstance(load, EngineLoad) or (load == self._load and not times.samples):
            return
        if not times.samples and not load.is_cache_too_small and now - self._sent_at < _EVERY_S:
            return
        self._sent_at, self._load = now, load
        self._say(BatchReport(load, times if times.samples else self._times(urgent=False)))

    def _times(self, *, urgent: bool) -> StepTimes:
        take = getattr(self._context, "take_step_times", None)
        found = take(urgent=urgent) if callable(take) else None
        return found if isinstance(found, StepTimes) else StepTimes()

    def run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            try:
                self.send_if_due(time.monotonic())
            except Exception:  # the user's context raised an error: stop only the reports
                traceback.print_exc()
                return
