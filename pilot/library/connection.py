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

_MOST_TEXT_CHARACTERS = 40_000
_TAIL_LINES = 20


class LibrarySettings(msgspec.Struct, frozen=True):
    """Settings of a library's process. `objects`: folder for large results. `host`: address of this machine for other
    pilots. `turns`: file in which engines request turns (`TurnBoard`). `probe`: command that tests a device.
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

    def make_failure(self, kind: FailureKind, message: str, *, tail: str = "") -> Failure:
        return Failure(kind, clean_text(message), self.pilot, self.library, tail=clean_text(tail), log=self.log)


def clean_text(text: str) -> str:
    """Convert a user's text to valid UTF-8, and cut the middle of a long text."""
    if len(text) > _MOST_TEXT_CHARACTERS:
        half, left_out = _MOST_TEXT_CHARACTERS // 2, len(text) - _MOST_TEXT_CHARACTERS
        text = f"{text[:half]} … {left_out:,} characters … {text[-half:]}"
    return text.encode("utf-8", "replace").decode()


def print_exception(error: BaseException) -> str:
    """Print an exception of user code to the library's log, and return the last lines of the text."""
    trace = error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, trace.tb_next if trace else None))
    print(text, file=sys.stderr, flush=True)  # noqa: T201
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


decode_settings = msgspec.msgpack.Decoder(LibrarySettings).decode
encode_settings = msgspec.msgpack.Encoder().encode


# ---- frames

_FRAME_HEAD = struct.Struct("<Q")
_LENGTH_BITS = 40
_FRAME_MARK = 0xD7A5C1 << _LENGTH_BITS  # 3 marker bytes at the start of each frame, which no UTF-8 text contains
MOST_FRAME_BYTES = 1 << 32  # maximum frame length, as in MessagePack
_BUFFER_BYTES = 1 << 18
_encode_into = msgspec.msgpack.Encoder().encode_into


def pack_frame(messages: list[Any]) -> bytearray:
    out = bytearray(_FRAME_HEAD.size)
    _encode_into((0, messages), out, _FRAME_HEAD.size)
    _FRAME_HEAD.pack_into(out, 0, _FRAME_MARK | len(out) - _FRAME_HEAD.size)
    return out


def pack_frame_body(body: bytes) -> bytes:
    return _FRAME_HEAD.pack(_FRAME_MARK | len(body)) + body


class FrameReader:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def receive_bytes(self, *, block: bool) -> bool:
        """Read bytes from the socket. Return False at the end of the stream. Without `block`, raises BlockingIOError if
        no data has arrived.
        """
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > 16 * _BUFFER_BYTES:
                self._resize_buffer(_BUFFER_BYTES)
        elif self._start and self._end == len(self._buffer):
            self._resize_buffer(len(self._buffer))
        count = self._sock.recv_into(self._view[self._end :], 0, 0 if block else socket.MSG_DONTWAIT)
        self._end += count
        return count > 0

    def next_frame(self) -> memoryview | None:
        """Return the next complete frame, valid until the next `receive_bytes`, or None. Raises ProtocolError."""
        here = self._end - self._start
        if here < _FRAME_HEAD.size:
            self._ensure_buffer_size(_FRAME_HEAD.size)
            return None
        length = _FRAME_HEAD.unpack_from(self._buffer, self._start)[0] ^ _FRAME_MARK
        first = self._start + _FRAME_HEAD.size
        if length > MOST_FRAME_BYTES:
            raise ProtocolError(f"the bytes {bytes(self._view[self._start : first])!r} do not begin a frame")
        if here < _FRAME_HEAD.size + length:
            self._ensure_buffer_size(_FRAME_HEAD.size + length)
            return None
        self._start = first + length
        return self._view[first : self._start]

    def _ensure_buffer_size(self, frame_bytes: int) -> None:
        if self._start + frame_bytes <= len(self._buffer):
            return
        here = self._end - self._start
        if self._end == len(self._buffer) or self._start:
            self._resize_buffer(min(max(_BUFFER_BYTES, frame_bytes), max(_BUFFER_BYTES, 4 * here)))

    def _resize_buffer(self, size: int) -> None:
        fresh = bytearray(size)
        here = self._end - self._start
        fresh[:here] = self._view[self._start : self._end]
        self._buffer, self._view = fresh, memoryview(fresh)
        self._start, self._end = 0, here


# ---- outbox

_MIN_PROGRESS_INTERVAL_S = 0.05  # minimum seconds between two progress reports
_now = time.perf_counter


class LibraryOutbox:
    """Sends a library's messages, from any thread. `on_send_error` receives the calls whose end was not reported."""

    def __init__(self, sock: socket.socket, *, on_send_error: Callable[[OSError, list[int]], NoReturn]) -> None:
        self._sock = sock
        self._on_send_error = on_send_error
        self._sending = threading.Lock()
        self.unsent_ends: deque[CallEnd] = deque()
        self.oldest_end_at = 0.0  # time (`time.perf_counter`) when the oldest of `unsent_ends` was added
        self._reports: dict[int, CallProgress] = {}
        self._reported_at = 0.0

    def report_progress(self, progress: CallProgress) -> None:
        """Send a call's progress with the next frame, or now if the last report is over 50 ms old."""
        self._reports[progress.call] = _keep_unsent_checkpoint(progress, self._reports.get(progress.call))
        if _now() - self._reported_at > _MIN_PROGRESS_INTERVAL_S:
            self.send_unsent()

    def add_outcome(self, outcome: CallEnd | CallProgress, *, ended_at: float) -> None:
        """Queue the outcome of an ended call, or send the checkpoint of an evicted call now."""
        report = self._reports.pop(outcome.call, None)
        if isinstance(outcome, CallProgress):
            self.send_messages([RunEvicted(progress=_keep_unsent_checkpoint(outcome, report))])
            return
        if report is not None:  # send the call's last progress before its outcome
            self.send_messages([Reports([report])])
        if not self.unsent_ends:
            self.oldest_end_at = ended_at
        self.unsent_ends.append(outcome)

    def send_unsent(self) -> None:
        with self._sending:
            ends, out = self.unsent_ends, []
            while ends:
                out.append(ends.popleft())
            messages: list[Any] = [RunsEnded(out)] if out else []
            if self._reports:
                reports, self._reports = self._reports, {}
                messages.append(Reports(list(reports.values())))
                self._reported_at = _now()
            if messages:
                self._send_frame(messages)

    def send_messages(self, messages: list[Any]) -> None:
        with self._sending:
            self._send_frame(messages)

    def send_pieces(self, pieces: list[Yielded]) -> None:
        if self.unsent_ends:
            self.send_unsent()
        self.send_messages(pieces)

    def _send_frame(self, messages: list[Any]) -> None:
        try:
            self._sock.sendall(pack_frame(messages))
        except OSError as error:
            ended: list[int] = [m.progress.call for m in messages if isinstance(m, RunEvicted)]
            ended += [end.call for m in messages if isinstance(m, RunsEnded) for end in m.ends]
            self._on_send_error(error, ended)


def _keep_unsent_checkpoint(progress: CallProgress, waiting: CallProgress | None) -> CallProgress:
    if waiting is None or not waiting.state or progress.state:
        return progress
    return msgspec.structs.replace(progress, state=waiting.state)


# ---- batch reports

_MIN_INTERVAL_S = 10.0  # minimum seconds between two batch reports
_CHECK_INTERVAL_S = 1.0


class BatchReports:
    """Reports the batch load of a context's engine to the pilot."""

    def __init__(self, context: Any, *, send_report: Callable[[BatchReport], None]) -> None:
        self._context = context
        self._say = send_report
        self._load = EngineLoad()
        self._sent_at = -_MIN_INTERVAL_S

    def send_if_due(self, now: float) -> None:
        """Send new step times of a profiler immediately. Send a changed load at most every 10 s, or immediately if the
        token cache will be too small.
        """
        times, load = self._take_step_times(urgent=True), self._context.batch_load()
        if not isinstance(load, EngineLoad) or (load == self._load and not times.sample_count):
            return
        if not times.sample_count and not load.is_cache_too_small and now - self._sent_at < _MIN_INTERVAL_S:
            return
        self._sent_at, self._load = now, load
        self._say(BatchReport(load, times if times.sample_count else self._take_step_times(urgent=False)))

    def _take_step_times(self, *, urgent: bool) -> StepTimes:
        take = getattr(self._context, "take_step_times", None)
        found = take(urgent=urgent) if callable(take) else None
        return found if isinstance(found, StepTimes) else StepTimes()

    def report_until_error(self) -> None:
        while True:
            time.sleep(_CHECK_INTERVAL_S)
            try:
                self.send_if_due(time.monotonic())
            except Exception:  # the user's context raised an error: stop only the reports
                traceback.print_exc()
                return
