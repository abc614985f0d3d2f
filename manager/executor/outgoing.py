"""What a client has to say, made into numbered frames.

`queue` takes calls (as `(job, spec)`) and messages from any thread. `frames` empties it, in order: consecutive calls of
one job become one `Submit`, definitions go once and before the calls that need them, and what was received is
acknowledged along with whatever leaves. Everything else is the business of one thread at a time.

A deadline leaves as the seconds that are left: wall clocks differ, and are set while a program runs. A frame that is
sent again has fewer seconds left than the first time, so its deadlines are counted down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from stoker.contexts.recipe import Recipe
from stoker.manager.protocol import to_client, to_manager, wire
from stoker.manager.protocol.calls import CallEnd, CallForecast, CallOptions, CallProgress, CallSpec
from stoker.manager.protocol.ids import CallId, FunctionKey, RecipeKey
from stoker.manager.protocol.reliable import Outbox
from stoker.manager.protocol.to_pilot import FunctionBlob

FRAME_CALLS = 2_000
FRAME_BYTES = 8_000_000
"""A frame is closed at this many calls or bytes of arguments, so that the manager stays responsive."""
_SAID_WITH_CALLS = (
    to_manager.Submit, to_manager.DefineFunction, to_manager.DefineRecipe, to_manager.DefineManifest,
    to_manager.Received, to_manager.Resubmitted, to_manager.WantPilots,
)  # fmt: skip
"""Messages that are made anew when calls are sent again."""
_MOST_REPLACED = 10_000
RECEIVED_DELAY_S = 0.2
"""Received goes along with the next frame, or alone after this long."""


class Waiter(Protocol):
    """Waits for a call. Called on the I/O thread, exactly once a call."""

    def settle(self, end: CallEnd) -> bool:
        """The call has ended. True: call `flush` when all ends that came together have been settled."""

    def fail(self, call: CallId, error: Exception) -> None:
        """The call will have no end: its session is over or the manager did not take it."""

    def flush(self) -> None:
        """All ends that came together have been settled."""

    def report(self, said: CallProgress | CallForecast) -> None:
        """The running call says how far it is, or the manager when it will end."""


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """What calls of one submission have in common. Calls of the same Job object travel together. `due_at`: their
    deadline on this program's monotonic clock; None = they have none."""

    function: FunctionBlob
    recipe: Recipe
    options: CallOptions
    variants: tuple[Recipe, ...] = ()
    due_at: float | None = None

    @property
    def members(self) -> int:
        """Devices that a call wants at once: as many as it may have if it has a deadline, else as few."""
        return self.options.gang[self.due_at is not None]

    def submit(self, calls: list[CallSpec], *, now: float) -> to_manager.Submit:
        """The message that submits these calls. `now`: the time on the clock of `due_at`."""
        due_in_s = None if self.due_at is None else self.due_at - now
        return to_manager.Submit(self.function.key, RecipeKey(self.recipe.key), calls, self.options, due_in_s)


class Sent(msgspec.Struct, gc=False):
    """A call that was sent and has not ended: a manager that has lost it is sent it again."""

    job: Job
    spec: CallSpec


class Unused(msgspec.Struct, frozen=True):
    """Goes through the queue behind the calls of a function that further calls will name another one instead of."""

    function: FunctionKey
    instead: FunctionKey


class Outgoing:
    """The sending side of a link. A call that is not in `wanted` any more when its turn comes is not sent.

    `describe` says what pilots need to know of a recipe's objects.
    """

    def __init__(
        self, wanted: Container[CallId], *, describe: Callable[[Recipe], list[to_manager.DefineManifest]]
    ) -> None:
        self.queue: deque[tuple[Job, CallSpec] | Any] = deque()
        self.received = 0
        self._wanted = wanted
        self._describe = describe
        self._outbox = Outbox()
        self._counted_at: dict[int, float] = {}
        """When the seconds to deadlines were counted, by the number of each unacknowledged frame that has some."""
        self._known: set[str] = set()
        self._unused: list[FunctionKey] = []
        """Functions that the manager may forget, and was not told so."""
        self._replaced: dict[FunctionKey, None] = {}
        """Functions of which it was said once."""
        self._late: set[FunctionKey] = set()
        """Those among them that calls in the next frame name after all: the manager may forget them after that."""
        self._sent: dict[CallId, Sent] = {}
        self._blocks: to_manager.WantPilots | None = None
        """What was said last of the client's own blocks."""
        self._said = 0
        self._due = 0.0
        self._taken = 0
        """Entries that have left the queue."""

    def has_sent(self, key: str) -> bool:
        """Whether the function or the recipe of this key was sent to this manager."""
        return key in self._known

    def receive(self, results: to_client.Results, now: float) -> Sequence[CallEnd]:
        """Results have come; those that were not had already. `now` is in seconds on any clock `due_in` is asked with.

        If some before them were lost with a connection, none are taken: the next hello brings all of them again.
        """
        seen = self.received - results.first
        if seen < 0:
            return ()
        ends = results.ends[seen:] if seen else results.ends
        if self.received == self._said:
            self._due = now + RECEIVED_DELAY_S
        self.received += len(ends)
        sent = self._sent
        for end in ends:
            sent.pop(end.call, None)
        return ends

    def due_in(self, now: float) -> float | None:
        """Seconds until what was received must be acknowledged, or None if it is."""
        return max(0.0, self._due - now) if self.received > self._said else None

    def frames(self, now: float) -> Iterator[bytes]:
        """Frames of everything that is to be said now. What is put into the queue meanwhile waits for the next time:
        each frame that leaves lets another thread go on, and chasing what that submits makes frames of a few calls."""
        last = self._taken + len(self.queue)
        while self.queue and self._taken < last:
            yield self._frame(self._next_batch(now), now)
        if self.due_in(now) == 0.0:
            yield self._frame([], now)

    def again(self, now: float) -> list[bytes]:
        """Frames that were sent and may have been lost, with the seconds that are left by now."""
        counted_at = self._counted_at
        return [
            _counted_down(frame, number, seconds=now - counted_at[number]) if number in counted_at else frame
            for number, frame in enumerate(self._outbox.unacked(), self._outbox.acknowledged + 1)
        ]

    @property
    def has_unacknowledged(self) -> bool:
        """True if frames were sent that the manager has not acknowledged."""
        return self._outbox.acknowledged < self._outbox.sequence

    @property
    def acknowledged(self) -> int:
        """Frames up to this number are acknowledged, and not kept."""
        return self._outbox.acknowledged

    def say_everything_again(self) -> None:
        """The manager has lost a part of what was said: what is still wanted leaves anew, before what waits to leave.
        The caller keeps other threads from `frames` meanwhile."""
        frames = self._outbox.begin_again()
        self._counted_at.clear()
        self._known.clear()
        self._unused.clear()
        self._said = 0
        again: list[tuple[Job, CallSpec] | Any] = []
        for call in sorted(self._sent):
            entry = self._sent.pop(call)
            if call in self._wanted:
                again.append((entry.job, entry.spec))
        decode = wire.from_client()
        for frame in frames:
            again += [each for each in decode(frame).messages if not isinstance(each, _SAID_WITH_CALLS)]
        if self._blocks is not None:
            again.append(self._blocks)
        self.queue.extendleft(reversed([*again, to_manager.Resubmitted()]))

    def acked(self, sequence: int) -> None:
        """The manager has frames up to this number for good."""
        self._outbox.acked(sequence)
        if self._counted_at:
            for number in [each for each in self._counted_at if each <= self._outbox.acknowledged]:
                del self._counted_at[number]

    def _frame(self, messages: list[Any], now: float) -> bytes:
        if self._late:
            self._known -= self._late
            self._unused += sorted(self._late.difference(self._unused))
            self._late.clear()
        if self.received > self._said or self._unused:
            messages.append(to_manager.Received(self.received, tuple(self._unused)))
            self._said = self.received
            self._unused.clear()
        frame = wire.encode(messages, sequence=self._outbox.sequence + 1)  # raises before the number is taken
        number = self._outbox.next()
        self._outbox.keep(number, frame)
        for message in messages:
            if type(message) is to_manager.Submit and message.due_in_s is not None:
                self._counted_at[number] = now
                break
        return frame

    def _next_batch(self, now: float) -> list[Any]:
        messages: list[Any] = []
        job: Job | None = None
        specs: list[CallSpec] = []
        count = size = 0
        queue = self.queue
        while queue and count < FRAME_CALLS and size < FRAME_BYTES:
            entry = queue.popleft()
            self._taken += 1
            if type(entry) is Unused:
                self._replaced[entry.function] = None
                self._replaced.pop(entry.instead, None)
                if len(self._replaced) > _MOST_REPLACED:
                    del self._replaced[next(iter(self._replaced))]
                if entry.function in self._known:
                    self._known.remove(entry.function)
                    self._unused.append(entry.function)
                continue
            if type(entry) is not tuple:
                messages.append(entry)
                if type(entry) is to_manager.WantPilots:
                    self._blocks = entry
                size += _size_of(entry)
                job = None
                continue
            if entry[1].call not in self._wanted:  # cancelled before it left
                continue
            if entry[0] is not job:
                definitions = self._definitions(entry[0])
                if definitions:  # they may be large: each takes its turn as any message
                    queue.appendleft(entry)
                    queue.extendleft(reversed(definitions))
                    self._taken -= len(definitions) + 1
                    job = None
                    continue
                job = entry[0]
                specs = []
                messages.append(job.submit(specs, now=now))
                if job.function.key in self._replaced:
                    self._late.add(job.function.key)
            specs.append(entry[1])
            self._sent[entry[1].call] = Sent(job, entry[1])
            count += 1
            payload = entry[1].payload
            size += len(payload) if type(payload) is bytes else 0
        return messages

    def _definitions(self, job: Job) -> list[Any]:
        """What the manager has to be told before calls of this job, and was not told yet."""
        messages: list[Any] = []
        for recipe in (job.recipe, *job.variants):
            if recipe.key not in self._known:
                self._known.add(recipe.key)
                messages += self._describe(recipe)
                messages.append(to_manager.DefineRecipe(recipe))
        function = job.function
        if function.key not in self._known:
            self._known.add(function.key)
            self._unused = [key for key in self._unused if key != function.key]
            messages.append(to_manager.DefineFunction(function.key, function.name, function.blob))
        return messages


def _counted_down(frame: bytes, number: int, *, seconds: float) -> bytes:
    """The same frame, so many seconds later."""
    messages = [
        msgspec.structs.replace(each, due_in_s=each.due_in_s - seconds)
        if type(each) is to_manager.Submit and each.due_in_s is not None
        else each
        for each in wire.from_client()(frame).messages
    ]
    return wire.encode(messages, sequence=number)


def _size_of(message: Any) -> int:
    """About how many bytes a definition has; other messages are small."""
    if type(message) is to_manager.DefineFunction:
        return len(message.blob)
    return len(message.recipe.loader) if type(message) is to_manager.DefineRecipe else 0
