"""A pilot from the view of its manager, over any shell (the program around a pilot core). A driver controls the
environment of a shell. A library runs one call at a time until the driver ends the call. Each call must leave its
library as often as the call was sent there.
"""

from __future__ import annotations

import abc
import enum
import math
from collections import Counter
from typing import Any, TypeVar

from stoker.contexts.recipe import ObjectRef
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallOptions, CallSpec, FailureKind
from stoker.protocol.ids import CallId, FunctionKey, LibraryId
from stoker.protocol.to_pilot import PilotWelcome, RunCalls, StartLibrary, StopLibrary, ToPilot

M = TypeVar("M")


class Loads(enum.Enum):
    AT_ONCE = enum.auto()
    WHEN_LET = enum.auto()  # loads when a test calls `let_load`
    NEVER = enum.auto()  # the load exceeds its time limit of half a second
    FAILS = enum.auto()
    FILES = enum.auto()  # loads as soon as its object has arrived


class Shell(abc.ABC):
    """One pilot after its welcome."""

    def __init__(self) -> None:
        self.unread: list[say.FromPilot] = []  # unread messages of the pilot
        self.owed: Counter[CallId] = Counter()  # for each call, times sent to a library minus times returned
        self.open: set[LibraryId] = set()  # ordered libraries that have not ended
        self.numbers = 0

    # ---- methods of drivers

    @abc.abstractmethod
    def say(self, message: ToPilot) -> None:
        """Send a message of the manager."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Let the pilot handle all sent messages."""

    @abc.abstractmethod
    def hear(self) -> bool:
        """Wait for the pilot's next message; False if none will come."""

    @abc.abstractmethod
    def hello(self, *, welcome: bool = True) -> say.PilotHello:
        """Return another hello of the pilot. `welcome`: answer it."""

    @abc.abstractmethod
    def recipe(self, loads: Loads) -> Any:
        """Return a recipe for one sequence."""

    @abc.abstractmethod
    def device(self, number: int) -> tuple[str, int]:
        """Return a device and its bytes of memory."""

    @abc.abstractmethod
    def let_load(self, library: LibraryId) -> None:
        """Let a context load."""

    @abc.abstractmethod
    def let_end(self, call: CallId, library: LibraryId) -> None:
        """Let a library's running call end."""

    @abc.abstractmethod
    def die(self, library: LibraryId) -> None:
        """Kill a library's process."""

    @abc.abstractmethod
    def wait(self, seconds: float) -> None:
        """Let time pass."""

    @abc.abstractmethod
    def close(self) -> None:
        """Remove everything."""

    def say_together(self, *messages: ToPilot) -> None:
        for message in messages:
            self.say(message)

    def said_s_ago(self) -> float:
        """Return the seconds since the manager's last message, if the shell has real time."""
        return 0.0

    def arrive(self, ref: ObjectRef) -> None:  # noqa: B027  # in most shells nothing needs to be driven
        """Let an object arrive; in most shells it arrives at once."""

    def begins(self, call: CallId) -> None:  # noqa: B027
        """Wait until a call runs; in most shells it runs at once."""

    def ignores_stops(self, library: LibraryId, call: CallId) -> None:
        raise NotImplementedError

    def exit_code(self) -> int:
        raise NotImplementedError

    def signal(self) -> None:
        """Send the batch system's signal to the pilot."""
        raise NotImplementedError

    def keep_acks(self) -> None:
        """Stop acknowledging messages."""
        raise NotImplementedError

    def say_acks(self) -> None:  # noqa: B027
        """Acknowledge all messages."""

    # ---- orders of sequences

    def new_library(self) -> LibraryId:
        self.numbers += 1
        return LibraryId(self.numbers)

    def new_calls(self, count: int) -> list[CallId]:
        self.numbers += count
        return [CallId(self.numbers - count + number) for number in range(1, count + 1)]

    def start(
        self, loads: Loads = Loads.AT_ONCE, *, device: int = 0, again: LibraryId | None = None, **more: Any
    ) -> LibraryId:
        library = again or self.new_library()
        name, _ = self.device(device)
        self.open.add(library)
        self.say(StartLibrary(library, more.pop("recipe", None) or self.recipe(loads), (name,), **more))
        return library

    def ready(self, **more: Any) -> LibraryId:
        library = self.start(**more)
        self.expect(say.LibraryReady, library=library)
        return library

    def run(self, library: LibraryId, calls: list[CallId], *, limit_s: float = 0.0) -> None:
        """Send calls to a library. They run until `let_end`."""
        self.say_together(*self.orders(library, calls, limit_s=limit_s))

    def begin(self, library: LibraryId, calls: list[CallId]) -> None:
        """Send calls to a library, and wait until the first call runs."""
        self.run(library, calls)
        self.begins(calls[0])

    def orders(self, library: LibraryId, calls: list[CallId], *, limit_s: float = 0.0) -> list[RunCalls]:
        self.owed.update(calls)
        specs = [CallSpec(call, b"x") for call in calls]
        options = CallOptions(limit_s=limit_s)
        return [self.as_taken(RunCalls(library, FunctionKey("hold"), [spec], options)) for spec in specs]

    def as_taken(self, order: RunCalls) -> RunCalls:
        return order

    def end(self, library: LibraryId, calls: list[CallId]) -> None:
        for call in calls:
            self.let_end(call, library)
            ended = self.expect(say.CallsEnded, library=library)
            assert [end.call for end in ended.ends] == [call]

    def stop(self, library: LibraryId, *, drain: bool = True) -> None:
        self.say(StopLibrary(library, "enough", drain))

    # ---- messages of the pilot

    def heard(self, message: say.FromPilot) -> None:
        self.unread.append(message)
        left: tuple[CallId, ...] = ()
        match message:
            case say.CallsEnded(ends=ends):
                left = tuple(end.call for end in ends)
            case say.CallsReturned(calls=calls):
                left = calls
            case say.CallEvicted(progress=progress):
                left = (progress.call,)
            case say.LibraryGone(library=library, running=running, unstarted=unstarted):
                left = (*running, *unstarted)
                self.open.discard(library)
            case _:
                pass
        for call in left:
            self.owed[call] -= 1
            assert self.owed[call] >= 0, f"call {call} has left once more than it came"

    def expect(self, kind: type[M], **fields: Any) -> M:
        """Wait for the first unread message with these fields, and read it."""
        while True:
            for message in self.unread:
                if type(message) is kind and all(getattr(message, name) == value for name, value in fields.items()):
                    self.unread.remove(message)
                    return message
            if not self.hear():
                raise AssertionError(f"no {kind.__name__} {fields}; unread: {self.unread}")

    def expect_failure(self, library: LibraryId, kind: FailureKind, *, loading: bool = False) -> say.LibraryGone:
        gone = self.expect(say.LibraryGone, library=library)
        assert gone.failure is not None
        assert (gone.failure.kind, gone.loading) == (kind, loading)
        return gone

    def expect_returned(self, library: LibraryId, calls: list[CallId]) -> say.CallsReturned:
        """Expect the return of these calls in order, in one or several messages."""
        back: list[CallId] = []
        while len(back) < len(calls):
            returned = self.expect(say.CallsReturned, library=library)
            back += returned.calls
        assert back == calls
        return returned

    def silent(self, kind: type, *, due_in_s: float = math.inf, **fields: Any) -> None:
        """Assert that no message of this kind is unread or arrives at once. Skip the check if the manager's last
        message is older than `due_in_s`, because a message may be due.
        """
        self.settle()
        if self.said_s_ago() >= due_in_s:
            return
        found = [
            message
            for message in self.unread
            if type(message) is kind and all(getattr(message, name) == value for name, value in fields.items())
        ]
        assert not found, found

    def held(self, hello: say.PilotHello, library: LibraryId) -> tuple[CallId, ...]:
        return next((facts.calls for facts in hello.libraries if facts.library == library), ())

    def finish(self) -> None:
        for library in sorted(self.open):
            self.stop(library, drain=False)
        while self.open:
            assert self.hear(), f"libraries {self.open} do not end"
        self.say_acks()
        assert not +self.owed, f"calls that have not left: {+self.owed}"
        assert self.hello().libraries == (), "nothing is held any more"


def answer_to(hello: say.PilotHello, *, lease_s: float = 60.0) -> PilotWelcome:
    return PilotWelcome(hello.session, heartbeat_s=0.5, lease_s=lease_s, hello=hello.number)
