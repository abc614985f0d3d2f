"""What a client has to say, made into numbered frames.

`queue` takes calls (as `(job, spec)`) and messages from any thread. `frames` empties it, in order: consecutive calls of
one job become one `Submit`, definitions go once and before the calls that need them, and what was received is
acknowledged along with whatever leaves. Everything else is the business of one thread at a time.
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
from stoker.manager.protocol.ids import CallId, RecipeKey
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
RECEIVED_DELAY_S = 0.2
"""Received goes along with the next frame, or alone after this long."""


class Waiter(Protocol):
    """Who waits for a call. Called on the I/O thread, exactly once a call."""

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
    """What calls of one submission have in common. Calls of the same Job object travel together."""

    function: FunctionBlob
    recipe: Recipe
    options: CallOptions
    variants: tuple[Recipe, ...] = ()

    @property
    def members(self) -> int:
        """Devices that a call wants at once: as many as it may have if it has a deadline, else as few."""
        return self.options.gang[bool(self.options.objective.deadline_at)]


class Sent(msgspec.Struct, gc=False):
    """A call that was sent and has not ended: a manager that has lost it is sent it again."""

    job: Job
    spec: CallSpec


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
        self._known: set[str] = set()
        self._sent: dict[CallId, Sent] = {}
        self._blocks: to_manager.WantPilots | None = None
        """What was said last of the client's own blocks."""
        self._said = 0
        self._due = 0.0
        self._taken = 0
        """Entries that have left the queue."""

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
            yield self._frame(self._next_batch())
        if self.due_in(now) == 0.0:
            yield self._frame([])

    def again(self) -> list[bytes]:
        """Frames that were sent and may have been lost."""
        return self._outbox.unacked()

    @property
    def acknowledged(self) -> int:
        """Frames up to this number are acknowledged, and not kept."""
        return self._outbox.acknowledged

    def say_everything_again(self) -> None:
        """The manager has lost a part of what was said: what is still wanted leaves anew, before what waits to leave.
        The caller keeps other threads from `frames` meanwhile."""
        frames = self._outbox.begin_again()
        self._known.clear()
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

    def _frame(self, messages: list[Any]) -> bytes:
        if self.received > self._said:
            messages.append(to_manager.Received(self.received))
            self._said = self.received
        frame = wire.encode(messages, sequence=self._outbox.sequence + 1)  # raises before the number is taken
        self._outbox.keep(self._outbox.next(), frame)
        return frame

    def _next_batch(self) -> list[Any]:
        messages: list[Any] = []
        job: Job | None = None
        specs: list[CallSpec] = []
        count = size = 0
        queue = self.queue
        while queue and count < FRAME_CALLS and size < FRAME_BYTES:
            entry = queue.popleft()
            self._taken += 1
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
                messages.append(to_manager.Submit(job.function.key, RecipeKey(job.recipe.key), specs, job.options))
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
            messages.append(to_manager.DefineFunction(function.key, function.name, function.blob))
        return messages


def _size_of(message: Any) -> int:
    """About how many bytes a definition has; other messages are small."""
    if type(message) is to_manager.DefineFunction:
        return len(message.blob)
    return len(message.recipe.loader) if type(message) is to_manager.DefineRecipe else 0
