"""A client's open calls and questions, and the numbered frames that send them to the manager.

`OpenCallTable` has no lock: each step is one dictionary operation, and only the thread that removes a call notifies its
waiter.

Any thread adds calls and messages to `OutgoingFrames.queue`; `encode_queued_frames` encodes them in order. Consecutive
calls of one submission share a message. A definition is sent before the first call that needs it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from stoker.contexts.recipe import NO_LIMITS, LibraryLimits, ObjectRef, Recipe
from stoker.errors import ProtocolError
from stoker.manager.executor.pieces import PieceInbox
from stoker.manager.executor.session_files import LargeArgumentFiles, remove_result_file
from stoker.protocol import to_client, to_manager, wire
from stoker.protocol.calls import CallEnd, CallForecast, CallOptions, CallProgress, CallSpec, LeftoverFiles
from stoker.protocol.ids import CallId, FunctionKey, RecipeKey, format_call_id
from stoker.protocol.to_pilot import FunctionBlob
from stoker.protocol.wire import Outbox

logger = logging.getLogger(__name__)

A = TypeVar("A")


class ResultReceiver(Protocol):
    """Receives the result of each call by exactly one invocation of `settle` (on the I/O thread) or `fail`."""

    def settle(self, end: CallEnd) -> bool:
        """Receive a call's end. Return True if `flush` must be called after the frame's last result."""

    def fail(self, call: CallId, error: Exception) -> None:
        """Receive the error of a call that the manager refused or whose session ended."""

    def flush(self) -> None:
        """Finish the work for a received frame, after its last `settle`."""

    def report(self, said: CallProgress | CallForecast) -> None:
        """Receive a running call's progress or forecast."""


@dataclass(frozen=True, eq=False, slots=True)
class Submission:
    """A function, context and options that calls share. `due_at`: deadline on this program's monotonic clock."""

    function: FunctionBlob
    recipe: Recipe
    options: CallOptions
    variants: tuple[Recipe, ...] = ()
    due_at: float | None = None

    @property
    def requested_devices(self) -> int:
        """Number of devices that a call requests: with a deadline the largest gang size, else the smallest."""
        return self.options.gang[self.due_at is not None]

    def create_submit(self, calls: list[CallSpec], *, now: float) -> to_manager.Submit:
        due_in_s = None if self.due_at is None else self.due_at - now
        return to_manager.Submit(self.function.key, RecipeKey(self.recipe.key), calls, self.options, due_in_s)


class OpenCall(msgspec.Struct, gc=False, eq=False):
    submission: Submission
    spec: CallSpec
    waiter: ResultReceiver
    inbox: PieceInbox | None = None
    is_sent: bool = False


class OpenCallTable:
    def __init__(self, large: LargeArgumentFiles) -> None:
        self.calls: dict[CallId, OpenCall] = {}
        self._large = large
        self._cancelled: set[CallId] = set()
        """Cancelled calls. If the result of such a call arrives in a file, the file is removed. (Other files stay,
        because the program may still read them.)
        """
        self._has_gangs = False
        self._warned_functions: set[str] = set()

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def slots(self) -> int:
        if not self._has_gangs:
            return len(self.calls)
        return sum(call.submission.requested_devices for call in tuple(self.calls.values()))

    def add(self, call: OpenCall) -> None:
        self.calls[call.spec.call] = call
        self._has_gangs |= call.submission.requested_devices > 1
        if call.inbox is not None:
            call.inbox.expect_call(call.spec.call)

    def add_all(self, calls: Sequence[OpenCall]) -> None:
        """Add calls of one app, which have equal gang sizes."""
        self._has_gangs |= bool(calls) and calls[0].submission.requested_devices > 1
        self.calls.update((call.spec.call, call) for call in calls)

    def drop_calls(self, calls: Iterable[CallId]) -> list[CallId]:
        """Drop these calls without notifying their waiters. Return the calls that had not ended."""
        gone = [call for call in calls if self._remove_open_call(call) is not None]
        self._cancelled.update(gone)
        return gone

    def report(self, reports: Iterable[CallProgress | CallForecast]) -> None:
        for report in reports:
            call = self.calls.get(report.call)
            if call is not None:
                call.waiter.report(report)

    def settle(self, ends: Sequence[CallEnd]) -> None:
        touched: set[ResultReceiver] = set()
        for end in ends:
            if end.left is not None:
                self._warn_of_lost_files(end.left)
            call = self._remove_open_call(end.call)
            if call is None:
                if end.call in self._cancelled:
                    self._cancelled.discard(end.call)
                    remove_result_file(end)
                continue
            try:
                if call.waiter.settle(end):
                    touched.add(call.waiter)
            except BaseException:  # a callback may raise any BaseException; other calls must still end
                logger.exception("a callback of call %s failed", format_call_id(end.call))
        for waiter in touched:
            waiter.flush()

    def fail_rejected_calls(self, calls: Iterable[CallId], reason: str) -> None:
        for number in calls:
            self._fail_call(number, ProtocolError(f"the manager did not accept this call: {reason}"))

    def fail_all(self, error: Exception) -> None:
        while self.calls:
            for number in tuple(self.calls):
                self._fail_call(number, error)

    def _fail_call(self, number: CallId, error: Exception) -> None:
        call = self._remove_open_call(number)
        if call is not None:
            call.waiter.fail(number, error)
            call.waiter.flush()

    def _remove_open_call(self, number: CallId) -> OpenCall | None:
        call = self.calls.pop(number, None)
        if call is not None and isinstance(call.spec.payload, ObjectRef):
            self._large.release_file(call.spec.payload)
        return call

    def _warn_of_lost_files(self, left: LeftoverFiles) -> None:
        if left.function in self._warned_functions:
            return
        self._warned_functions.add(left.function)
        files = ", ".join(left.names) + (f" and {left.count - len(left.names)} more" * (left.count > len(left.names)))
        seen = f"; its pilot does not see {left.home}, where the program runs" if left.home else ""
        text = "%s left files in its working folder that are lost (%s)%s: return their content, or write them to a"
        text += " folder that pilots see, by its absolute path (shown once per function)"
        logger.warning(text, left.function, files, seen)


class OpenQuestions:
    """Unanswered requests to the manager: message, type of the answer, and future. Requests of one kind are answered in
    order. Callers hold the link's lock, except for `handle_answer` and `fail_all`.
    """

    def __init__(self) -> None:
        self.unsent: list[tuple[Any, type[Any], Future[Any]]] = []
        self._sent: list[tuple[Any, type[Any], Future[Any]]] = []

    def add_question(self, question: Any, answer: type[Any], future: Future[Any]) -> None:
        self.unsent.append((question, answer, future))

    def take_unsent(self) -> list[Any]:
        fresh = [each for each in self.unsent if not each[2].done()]
        self.unsent = []
        self._sent += fresh
        return [question for question, _, _ in fresh]

    def requeue_sent_questions(self) -> None:
        self.unsent = [each for each in (*self._sent, *self.unsent) if not each[2].done()]
        self._sent = []

    def handle_answer(self, message: to_client.Status | to_client.Story) -> None:
        for each in self._sent:
            if each[1] is type(message):
                self._sent.remove(each)
                end_future(each[2], message)
                return

    def fail_all(self, error: Exception) -> None:
        for _, _, future in (*self._sent, *self.unsent):
            end_future(future, error=error)


def end_future(future: Future[Any], value: Any = None, *, error: BaseException | None = None) -> None:
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def wait_for_answer(asked: Future[A], *, timeout_s: float) -> A:
    try:
        return asked.result(timeout_s)
    except BaseException:  # also cancel the request after Ctrl-C
        asked.cancel()  # has no effect if the answer has arrived
        raise


# ---- frames


FRAME_CALLS = 2_000
FRAME_BYTES = 8_000_000
"""A frame is full at `FRAME_CALLS` calls or this many bytes of arguments."""
_RECREATED_MESSAGES = (
    to_manager.Submit, to_manager.DefineFunction, to_manager.DefineRecipe, to_manager.DefineManifest,
    to_manager.Received, to_manager.Resubmitted, to_manager.ParslBlockStates,
)  # fmt: skip
"""Types of messages that are not sent again from old frames, because resubmitting the calls creates new messages."""
_MAX_REPLACED_FUNCTIONS = 10_000
RECEIVED_DELAY_S = 0.2
"""Seconds after which a waiting `Received` message is sent in its own frame."""


class ReplacedFunction(msgspec.Struct, frozen=True):
    """A queue entry after the last call of a function that has changed. `new_function` replaces this function."""

    function: FunctionKey
    new_function: FunctionKey


class OutgoingFrames:
    """Encodes queued calls and messages into numbered frames. Drops queued calls that are no longer in `calls`."""

    def __init__(
        self, calls: Mapping[CallId, OpenCall], *, create_manifests: Callable[[Recipe], list[to_manager.DefineManifest]]
    ) -> None:
        self.queue: deque[OpenCall | Any] = deque()
        self.received = 0
        self.sent_definitions: set[str] = set()
        self._calls = calls
        self._create_manifests = create_manifests
        self._outbox = Outbox()
        self._encoded_at: dict[int, float] = {}
        """By number of an unacknowledged frame: time at which the deadlines in the frame were computed."""
        self._limits: dict[str, LibraryLimits] = {}
        self._forgettable_functions: list[FunctionKey] = []
        """Functions that the manager may forget; the next `Received` message lists them."""
        self._replaced: dict[FunctionKey, None] = {}
        self._replaced_in_frame: set[FunctionKey] = set()
        """Replaced functions that calls of the current frame still use."""
        self._blocks: to_manager.ParslBlockStates | None = None
        self._acknowledged_results = 0
        self._acknowledge_at = 0.0
        self._dequeued = 0

    def accept_results(self, results: to_client.Results, now: float) -> Sequence[CallEnd]:
        """Return the new results. If earlier results are missing, return none, because the manager sends all again."""
        seen = self.received - results.first
        if seen < 0:
            return ()
        ends = results.ends[seen:] if seen else results.ends
        if self.received == self._acknowledged_results:
            self._acknowledge_at = now + RECEIVED_DELAY_S
        self.received += len(ends)
        return ends

    def seconds_until_ack(self, now: float) -> float | None:
        return max(0.0, self._acknowledge_at - now) if self.received > self._acknowledged_results else None

    def encode_queued_frames(self, now: float) -> Iterator[bytes]:
        """Yield frames with the current entries of the queue."""
        last = self._dequeued + len(self.queue)
        while self.queue and self._dequeued < last:
            yield self._encode_frame(self._next_batch(now), now)
        if self.seconds_until_ack(now) == 0.0:
            yield self._encode_frame([], now)

    def unacknowledged_frames(self, now: float) -> list[bytes]:
        counted_at = self._encoded_at
        return [
            _with_reduced_deadlines(frame, number, seconds=now - counted_at[number]) if number in counted_at else frame
            for number, frame in enumerate(self._outbox.unacknowledged_frames(), self._outbox.acknowledged + 1)
        ]

    @property
    def has_unacknowledged(self) -> bool:
        return self._outbox.acknowledged < self._outbox.sequence

    @property
    def acknowledged(self) -> int:
        return self._outbox.acknowledged

    def resubmit_everything(self) -> None:
        """Queue all open calls and unacknowledged messages again, because the manager has lost part of its journal."""
        frames = self._outbox.take_unacknowledged_frames()
        for lost in (self._encoded_at, self.sent_definitions, self._limits, self._forgettable_functions):
            lost.clear()
        self._acknowledged_results = 0
        again: list[Any] = [call for call in tuple(self._calls.values()) if call.is_sent]
        again.sort(key=lambda call: call.spec.call)
        for call in again:
            call.is_sent = False
        decode = wire.from_client_decoder()
        for frame in frames:
            again += [each for each in decode(frame).messages if not isinstance(each, _RECREATED_MESSAGES)]
        if self._blocks is not None:
            again.append(self._blocks)
        self.queue.extendleft(reversed([*again, to_manager.Resubmitted()]))

    def handle_ack(self, sequence: int) -> None:
        self._outbox.acknowledge(sequence)
        if self._encoded_at:
            for number in [each for each in self._encoded_at if each <= self._outbox.acknowledged]:
                del self._encoded_at[number]

    def _encode_frame(self, messages: list[Any], now: float) -> bytes:
        if self._replaced_in_frame:
            self.sent_definitions -= self._replaced_in_frame
            self._forgettable_functions += sorted(self._replaced_in_frame.difference(self._forgettable_functions))
            self._replaced_in_frame.clear()
        if self.received > self._acknowledged_results or self._forgettable_functions:
            messages.append(to_manager.Received(self.received, tuple(self._forgettable_functions)))
            self._acknowledged_results = self.received
            self._forgettable_functions.clear()
        frame = wire.encode(messages, sequence=self._outbox.sequence + 1)  # may raise, so take the number later
        number = self._outbox.take_next_number()
        self._outbox.keep(number, frame)
        if any(type(message) is to_manager.Submit and message.due_in_s is not None for message in messages):
            self._encoded_at[number] = now
        return frame

    def _next_batch(self, now: float) -> list[Any]:
        messages: list[Any] = []
        submission: Submission | None = None
        specs: list[CallSpec] = []
        count = size = 0
        queue = self.queue
        while queue and count < FRAME_CALLS and size < FRAME_BYTES:
            entry = queue.popleft()
            self._dequeued += 1
            if type(entry) is ReplacedFunction:
                self._handle_replaced_function(entry)
                continue
            if type(entry) is not OpenCall:
                messages.append(entry)
                if type(entry) is to_manager.ParslBlockStates:
                    self._blocks = entry
                size += _definition_bytes(entry)
                submission = None
                continue
            spec = entry.spec
            if spec.call not in self._calls:  # the call was cancelled before sending
                continue
            if entry.submission is not submission:
                definitions = self._missing_definitions(entry.submission)
                if definitions:  # put the definitions into the queue, so that their bytes count towards the frame
                    queue.appendleft(entry)
                    queue.extendleft(reversed(definitions))
                    self._dequeued -= len(definitions) + 1
                    submission = None
                    continue
                submission = entry.submission
                specs = []
                messages.append(submission.create_submit(specs, now=now))
                if submission.function.key in self._replaced:
                    self._replaced_in_frame.add(submission.function.key)
            specs.append(spec)
            entry.is_sent = True
            count += 1
            size += len(spec.payload) if type(spec.payload) is bytes else 0
        return messages

    def _handle_replaced_function(self, entry: ReplacedFunction) -> None:
        self._replaced[entry.function] = None
        self._replaced.pop(entry.new_function, None)
        if len(self._replaced) > _MAX_REPLACED_FUNCTIONS:
            del self._replaced[next(iter(self._replaced))]
        if entry.function in self.sent_definitions:
            self.sent_definitions.remove(entry.function)
            self._forgettable_functions.append(entry.function)

    def _missing_definitions(self, submission: Submission) -> list[Any]:
        messages: list[Any] = []
        recipes: dict[str, Recipe] = {}
        for recipe in (submission.recipe, *submission.variants):
            recipes.setdefault(recipe.key, recipe)  # if recipes have equal keys, use the limits of the first
        for recipe in recipes.values():
            has_new_limits = recipe.limits != self._limits.get(recipe.key, NO_LIMITS)
            if recipe.key not in self.sent_definitions:
                self.sent_definitions.add(recipe.key)
                messages += self._create_manifests(recipe)
            elif not has_new_limits:
                continue
            if has_new_limits:
                self._limits[recipe.key] = recipe.limits
            messages.append(to_manager.DefineRecipe(recipe))
        function = submission.function
        if function.key not in self.sent_definitions:
            self.sent_definitions.add(function.key)
            self._forgettable_functions = [key for key in self._forgettable_functions if key != function.key]
            messages.append(to_manager.DefineFunction(function.key, function.name, function.blob, function.place))
        return messages


def _with_reduced_deadlines(frame: bytes, number: int, *, seconds: float) -> bytes:
    messages = [
        msgspec.structs.replace(each, due_in_s=each.due_in_s - seconds)
        if type(each) is to_manager.Submit and each.due_in_s is not None
        else each
        for each in wire.from_client_decoder()(frame).messages
    ]
    return wire.encode(messages, sequence=number)


def _definition_bytes(message: Any) -> int:
    if type(message) is to_manager.DefineFunction:
        return len(message.blob)
    return len(message.recipe.loader) if type(message) is to_manager.DefineRecipe else 0
