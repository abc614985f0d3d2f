"""The pieces that running calls yield, and the rendezvous addresses of gangs.

A call waits in its slot while `WINDOW_PIECES` of its pieces have not reached its client, and at its end until its
client has all pieces. Pieces of several calls share frames. The library gathers pieces for a time that grows with the
number of calls, but sends the first pieces of a call immediately.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from types import AsyncGeneratorType, GeneratorType
from typing import Any

from stoker.connections import join_address
from stoker.contexts import payloads
from stoker.contexts.ambient import Gang, RelayedTexts, StopRequest
from stoker.errors import GangBroken
from stoker.protocol.calls import WINDOW_BYTES, WINDOW_PIECES, GangPlace
from stoker.protocol.ids import CallId
from stoker.protocol.to_agent import RankZeroListens, Yielded
from stoker.protocol.to_library import PiecesReceived
from stoker.units import show_seconds

# ---- meetings

_MOST_ADDRESSES = 64  # maximum number of stored addresses that no call has requested yet


class GangMeetings:
    """Connects the ranks of gangs in one library. `key`: session secret from which gang keys derive."""

    def __init__(self, *, host: str, send_message: Callable[[RankZeroListens], None], key: bytes = b"") -> None:
        self._host = host
        self._send_message = send_message
        self._key = key
        self._addresses: dict[int, str] = {}
        self._changed = threading.Condition()

    def record_address(self, call: int, address: str) -> None:
        """Record the address of rank 0 of a call's gang, or "" if this rank is cancelled. The call may arrive later."""
        with self._changed:
            self._addresses[call] = address
            while len(self._addresses) > _MOST_ADDRESSES:
                del self._addresses[next(iter(self._addresses))]
            self._changed.notify_all()

    def forget_call(self, call: int) -> None:
        if self._addresses:  # take the lock only if needed: most libraries run no gangs
            with self._changed:
                self._addresses.pop(call, None)

    def join_gang(self, call: CallId, place: GangPlace, limit_s: float) -> Gang:
        """Wait for the address of rank 0, and return the `Gang` of this rank. Raises GangBroken."""
        if place.size == 1:
            return Gang(rank=0, size=1)
        if place.rank == 0:
            return self._listen_as_rank_0(call, place)
        with self._changed:
            if not self._changed.wait_for(lambda: call in self._addresses or place.rendezvous, limit_s):
                raise GangBroken(
                    f"rank {place.rank} of {place.size} did not get the address of rank 0 within"
                    f" {show_seconds(limit_s)}: did rank 0 begin, and does it call stoker.gang()?",
                    rank=place.rank, size=place.size,
                )  # fmt: skip
            address = self._addresses.pop(call, "") or place.rendezvous
        if not address:
            raise GangBroken(f"rank {place.rank} of {place.size} was cancelled", rank=place.rank, size=place.size)
        return Gang(rank=place.rank, size=place.size, rendezvous=address, key=self._gang_key_of_call(call))

    def _listen_as_rank_0(self, call: CallId, place: GangPlace) -> Gang:
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server((self._host, 0), family=family, backlog=place.size + 64)
        except OSError as error:
            raise GangBroken(
                f"rank 0 of {place.size} cannot listen on {self._host}: {error}", rank=0, size=place.size
            ) from error
        port = listener.getsockname()[1]
        self._send_message(RankZeroListens(call=call, port=port))
        rendezvous, key = join_address(self._host, port), self._gang_key_of_call(call)
        return Gang(rank=0, size=place.size, rendezvous=rendezvous, listener=listener, key=key)

    def _gang_key_of_call(self, call: CallId) -> bytes:
        return hmac.digest(self._key, f"call {call}".encode(), "sha256")


# ---- generators


def is_generator(result: Any) -> bool:
    return type(result) is GeneratorType or type(result) is AsyncGeneratorType


def pass_pieces(result: Any, put: Callable[[Any], bool], stop: StopRequest) -> bool:
    """Pass each piece of the result to `put`. Return False if `put` refused a piece."""
    if not hasattr(result, "__anext__"):
        try:
            return all(put(piece) for piece in result)
        finally:
            if hasattr(result, "close"):
                result.close()
    return bool(run_in_event_loop(_pass_pieces_async(result, put), stop))


async def _pass_pieces_async(result: Any, put: Callable[[Any], bool]) -> bool:
    try:
        async for piece in result:
            if not put(piece):
                return False
        return True
    finally:
        if hasattr(result, "aclose"):
            await result.aclose()


def collect_pieces(result: Any, stop: StopRequest) -> list[Any]:
    pieces: list[Any] = []

    def put(piece: Any) -> bool:
        pieces.extend(piece if isinstance(piece, RelayedTexts) else (piece,))
        return True

    pass_pieces(result, put, stop)
    return pieces


def run_in_event_loop(coroutine: Coroutine[Any, Any, Any], stop: StopRequest) -> Any:
    import asyncio  # a late import saves 50 ms in libraries without coroutines

    async def run() -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def cancel() -> None:
            if task is not None and not task.cancelling():
                task.cancel()

        def wake() -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(cancel)

        stop.add_wake_function(wake)
        try:
            return await coroutine
        finally:
            stop.remove_wake_function(wake)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        stop.raise_if_requested()
        raise


# ---- gathering

MAX_PAUSE_PER_CALL_S, MAX_PAUSE_S = 0.000_05, 0.004  # pause between frames: 0.05 ms per yielding call, at most 4 ms
MAX_GATHERED_BYTES = 250_000  # bytes of gathered pieces after which a frame is sent
_now = time.monotonic


class PieceBatcher:
    """Collects pieces from any thread, and passes the pieces to `send` in order."""

    def __init__(self, send: Callable[[list[Yielded]], None]) -> None:
        self.yielding_calls = 0  # number of running calls that yield pieces
        self._send = send
        self._waiting: dict[int, Yielded] = {}  # unsent pieces, by the number of the run that sends them
        self._bytes = 0
        self._due = 0.0  # earliest time of the next send, unless a piece is urgent
        self._pieces_added = threading.Condition()  # held during a send, so that pieces stay in order
        self._sender: threading.Thread | None = None

    def add_pieces(self, pieces: Yielded, *, at_once: bool) -> None:
        with self._pieces_added:
            self._append_pieces(pieces)
            self._send_or_schedule_pieces(at_once=at_once or pieces.waits)

    def add_pieces_of_runs(self, pieces: list[tuple[YieldingRun, Yielded]], *, at_once: bool) -> None:
        """Add pieces, except pieces of runs that another thread has ended."""
        with self._pieces_added:
            for run, each in pieces:
                if not run.is_over:
                    self._append_pieces(each)
            self._send_or_schedule_pieces(at_once=at_once)

    def _append_pieces(self, pieces: Yielded) -> None:
        before = self._waiting.get(pieces.run)
        if before is None:
            self._waiting[pieces.run] = pieces
        else:
            items = before.items + pieces.items
            self._waiting[pieces.run] = Yielded(pieces.call, pieces.run, before.first, items, pieces.waits)
        self._bytes += sum(map(len, pieces.items))

    def _send_or_schedule_pieces(self, *, at_once: bool) -> None:
        if at_once or self._bytes >= MAX_GATHERED_BYTES or _now() >= self._due:
            self._send_all()
        elif self._sender is None:
            self._sender = threading.Thread(target=self._send_pieces_when_due, name="stoker-pieces", daemon=True)
            self._sender.start()
        else:
            self._pieces_added.notify()

    def drop_pieces_of_run(self, run: int) -> None:
        with self._pieces_added:
            self._waiting.pop(run, None)

    def _send_all(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        if waiting:
            self._send(list(waiting.values()))
        self._due = _now() + min(MAX_PAUSE_S, self.yielding_calls * MAX_PAUSE_PER_CALL_S)

    def _send_pieces_when_due(self) -> None:
        while True:
            with self._pieces_added:
                while not self._waiting:
                    self._pieces_added.wait()
                wait_s = self._due - _now()
            time.sleep(max(0.0, wait_s))
            with self._pieces_added:
                if self._waiting and _now() >= self._due:  # otherwise another thread has sent the pieces
                    self._send_all()


# ---- the window of pieces

END_CHECK_INTERVAL_S = 0.1  # seconds between two checks whether a waiting call must end
IMMEDIATE_PIECES = 3  # the first 3 pieces of a call are sent immediately, because the client has no output yet
_RUN_BITS = 32


class PieceSender:
    """Sends a library's pieces. `read_messages(seconds)`: reads the agent's messages; None if another thread does."""

    def __init__(self, library: int, *, send: Callable[[list[Yielded]], None]) -> None:
        self.read_messages: Callable[[float], None] | None = None
        self._batcher = PieceBatcher(send)
        self._runs: dict[int, YieldingRun] = {}
        self._engine_texts: list[tuple[YieldingRun, Yielded]] = []
        """Texts that the engine's thread has yielded. Only that thread uses the list."""
        self._next_run = library << _RUN_BITS
        self.window_changed = threading.Condition()

    def begin_run(
        self, call: CallId, *, must_end: Callable[[], bool], on_waited: Callable[[float], None]
    ) -> YieldingRun:
        with self.window_changed:
            number, self._next_run = self._next_run, self._next_run + 1
            run = self._runs[call] = YieldingRun(self, call, number, must_end=must_end, on_waited=on_waited)
            self._batcher.yielding_calls = len(self._runs)
        return run

    def end_run(self, run: YieldingRun) -> None:
        with self.window_changed:
            run.is_over = True
            self._runs.pop(run.call, None)
            self._batcher.yielding_calls = len(self._runs)
        self._batcher.drop_pieces_of_run(run.number)

    def record_taken_pieces(self, message: PiecesReceived) -> None:
        with self.window_changed:
            run = self._runs.get(message.call)
            if run is not None and run.number == message.run:
                run.drop_taken_pieces(message.upto)
                self.window_changed.notify_all()

    def wake_waiting_calls(self) -> None:
        with self.window_changed:
            self.window_changed.notify_all()

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        if self.read_messages is not None:
            if not is_over():
                self.read_messages(END_CHECK_INTERVAL_S)
            return
        with self.window_changed:
            self.window_changed.wait_for(is_over, END_CHECK_INTERVAL_S)

    def send_piece(self, pieces: Yielded) -> None:
        self._batcher.add_pieces(pieces, at_once=pieces.first < IMMEDIATE_PIECES)

    def queue_engine_text(self, run: YieldingRun, pieces: Yielded) -> None:
        self._engine_texts.append((run, pieces))

    def send_engine_texts(self) -> None:
        relayed, self._engine_texts = self._engine_texts, []
        self._batcher.add_pieces_of_runs(relayed, at_once=any(each.first < IMMEDIATE_PIECES for _, each in relayed))


@dataclass(eq=False)
class YieldingRun:
    sender: PieceSender
    call: CallId
    number: int
    must_end: Callable[[], bool]
    on_waited: Callable[[float], None]
    count: int = 0
    waited_s: float = 0.0  # seconds waited for the client
    is_over: bool = False
    _sizes: deque[int] = field(default_factory=deque)
    _bytes: int = 0

    def send_piece(self, piece: bytes) -> bool:
        """Wait until the window has space, then send a piece. Return False if the call must end."""
        if not self._wait_for_client(lambda: self._has_room(len(piece))):
            return False
        with self.sender.window_changed:
            number = self._add_to_window(piece)
        self.sender.send_piece(Yielded(self.call, self.number, number, [piece]))
        return True

    # ---- texts from the engine's thread

    def add(self, text: str) -> bool:
        """Accept a text as the next piece. Return False if the window is full."""
        piece = payloads.dumps(text, what="piece")
        with self.sender.window_changed:
            if not self._has_room(len(piece)):
                return False
            number = self._add_to_window(piece)
        self.sender.queue_engine_text(self, Yielded(self.call, self.number, number, [piece]))
        return True

    def send(self) -> None:
        self.sender.send_engine_texts()

    # ---- the window

    def _add_to_window(self, piece: bytes) -> int:
        self._sizes.append(len(piece))
        self._bytes += len(piece)
        self.count += 1
        return self.count - 1

    def wait_until_all_taken(self) -> bool:
        """Wait until the client has acknowledged every piece. Return False if the call must end."""
        return self._wait_for_client(lambda: not self._sizes)

    def drop_taken_pieces(self, upto: int) -> None:
        sizes = self._sizes
        while sizes and self.count - len(sizes) < upto:
            self._bytes -= sizes.popleft()

    def _has_room(self, size: int) -> bool:
        sizes = self._sizes
        return not sizes or (len(sizes) < WINDOW_PIECES and self._bytes + size <= WINDOW_BYTES)

    def _wait_for_client(self, is_over: Callable[[], bool]) -> bool:
        if self.must_end():
            return False
        if is_over():
            return True
        self.sender.send_piece(Yielded(self.call, self.number, self.count, [], waits=True))
        began, before = time.perf_counter(), self.waited_s
        while not is_over():
            self.sender.wait_until(lambda: is_over() or self.must_end())
            self.waited_s = before + time.perf_counter() - began
            self.on_waited(self.waited_s)
            if self.must_end():
                return False
        return True
