"""A pilot as its manager sees it, over any shell: what is said to it, what it says, and what the world does to it.

A driver gives the world of one shell. Each shell's calls run one at a time in a library, until the world lets them
end. Whatever a sequence does, each call must have left its library as often as it was given to it.
"""

from __future__ import annotations

import abc
import enum
import math
from collections import Counter
from typing import Any, TypeVar

from stoker.contexts.recipe import ObjectRef
from stoker.protocol.calls import CallOptions, CallSpec
from stoker.protocol.ids import CallId, FunctionKey, LibraryId
from stoker.protocol.to_manager import (
    CallEvicted,
    CallsEnded,
    CallsReturned,
    FromPilot,
    LibraryGone,
    LibraryReady,
    PilotHello,
)
from stoker.protocol.to_pilot import PilotWelcome, RunCalls, StartLibrary, StopLibrary, ToPilot

M = TypeVar("M")


class Loads(enum.Enum):
    """How a context loads."""

    AT_ONCE = enum.auto()
    WHEN_LET = enum.auto()
    """When the world lets it."""
    NEVER = enum.auto()
    """It may take half a second, and takes for ever."""
    FAILS = enum.auto()
    """Its loader cannot give a context."""
    FILES = enum.auto()
    """At once, when its object is here."""


class Shell(abc.ABC):
    """One pilot that has said hello and is welcome."""

    def __init__(self) -> None:
        self.unread: list[FromPilot] = []
        """What the pilot has said and no sequence has asked for."""
        self.owed: Counter[CallId] = Counter()
        """How often each call was given to a library and has not left it."""
        self.open: set[LibraryId] = set()
        """Libraries that were ordered and have not ended."""
        self.numbers = 0

    # ---- what a driver gives

    @abc.abstractmethod
    def say(self, message: ToPilot) -> None:
        """The manager says something."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Let everything happen that what was said leads to at once."""

    @abc.abstractmethod
    def hear(self) -> bool:
        """Wait for the next that the pilot says; False: it will say no more by itself."""

    @abc.abstractmethod
    def hello(self, *, welcome: bool = True) -> PilotHello:
        """Have the pilot say hello once more; its manager answers it, or not yet."""

    @abc.abstractmethod
    def recipe(self, loads: Loads) -> Any:
        """A recipe that no other sequence uses."""

    @abc.abstractmethod
    def device(self, number: int) -> tuple[str, int]:
        """A device, and its memory in bytes."""

    @abc.abstractmethod
    def let_load(self, library: LibraryId) -> None:
        """A context that loads when it is let does so."""

    @abc.abstractmethod
    def let_end(self, call: CallId, library: LibraryId) -> None:
        """The call that runs in a library ends."""

    @abc.abstractmethod
    def die(self, library: LibraryId) -> None:
        """A library's process is killed by something."""

    @abc.abstractmethod
    def wait(self, seconds: float) -> None:
        """Time passes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave nothing behind."""

    def say_together(self, *messages: ToPilot) -> None:
        """The manager says these in one frame, where there are frames: nothing comes between them."""
        for message in messages:
            self.say(message)

    def said_s_ago(self) -> float:
        """How long ago the manager has said something, where time passes by itself."""
        return 0.0

    def arrive(self, ref: ObjectRef) -> None:  # noqa: B027  # what comes by itself needs no driver
        """An object comes from where the manager has said: in most worlds by itself."""

    def begins(self, call: CallId) -> None:  # noqa: B027
        """Wait until a call runs: in most worlds it does at once."""

    def ignores_stops(self, library: LibraryId, call: CallId) -> None:
        """A call that a library is given later does not stop when it is told to."""
        raise NotImplementedError

    def exit_code(self) -> int:
        """How the pilot ended."""
        raise NotImplementedError

    def signal(self) -> None:
        """The batch system tells the pilot to go."""
        raise NotImplementedError

    def break_device(self, device: str) -> None:
        """A device goes bad."""
        raise NotImplementedError

    def keep_acks(self) -> None:
        """The manager does not acknowledge what it hears from now on."""
        raise NotImplementedError

    def say_acks(self) -> None:  # noqa: B027
        """The manager acknowledges all that it has heard."""

    # ---- what sequences say

    def new_library(self) -> LibraryId:
        self.numbers += 1
        return LibraryId(self.numbers)

    def new_calls(self, count: int) -> list[CallId]:
        self.numbers += count
        return [CallId(self.numbers - count + number) for number in range(1, count + 1)]

    def start(
        self, loads: Loads = Loads.AT_ONCE, *, device: int = 0, again: LibraryId | None = None, **more: Any
    ) -> LibraryId:
        """Order a library."""
        library = again or self.new_library()
        name, _ = self.device(device)
        self.open.add(library)
        self.say(StartLibrary(library, more.pop("recipe", None) or self.recipe(loads), (name,), **more))  # type: ignore[arg-type]
        return library

    def ready(self, **more: Any) -> LibraryId:
        """Order a library, and wait until it is ready."""
        library = self.start(**more)
        self.expect(LibraryReady, library=library)
        return library

    def run(self, library: LibraryId, calls: list[CallId], *, limit_s: float = 0.0) -> None:
        """Give calls to a library. They run until the world lets them end."""
        self.say_together(*self.orders(library, calls, limit_s=limit_s))

    def orders(self, library: LibraryId, calls: list[CallId], *, limit_s: float = 0.0) -> list[RunCalls]:
        """What gives calls to a library, which are owed from now on."""
        self.owed.update(calls)
        specs = [CallSpec(call, b"x") for call in calls]
        options = CallOptions(limit_s=limit_s)
        return [self.as_taken(RunCalls(library, FunctionKey("hold"), [spec], options)) for spec in specs]

    def as_taken(self, order: RunCalls) -> RunCalls:
        """An order as this shell's libraries take it."""
        return order

    def end(self, library: LibraryId, calls: list[CallId]) -> None:
        """Let calls end, one after the other, and hear that they did."""
        for call in calls:
            self.let_end(call, library)
            ended = self.expect(CallsEnded, library=library)
            assert [end.call for end in ended.ends] == [call]

    def stop(self, library: LibraryId, *, drain: bool = True) -> None:
        self.say(StopLibrary(library, "enough", drain))

    # ---- what the manager hears

    def heard(self, message: FromPilot) -> None:
        """Drivers say here what the pilot says."""
        self.unread.append(message)
        left: tuple[CallId, ...] = ()
        match message:
            case CallsEnded(ends=ends):
                left = tuple(end.call for end in ends)
            case CallsReturned(calls=calls):
                left = calls
            case CallEvicted(progress=progress):
                left = (progress.call,)
            case LibraryGone(library=library, running=running, unstarted=unstarted):
                left = (*running, *unstarted)
                self.open.discard(library)
            case _:
                pass
        for call in left:
            self.owed[call] -= 1
            assert self.owed[call] >= 0, f"call {call} has left once more than it came"

    def expect(self, kind: type[M], **fields: Any) -> M:
        """The first unread message of a kind with these fields, now or soon; it is read."""
        while True:
            for message in self.unread:
                if type(message) is kind and all(getattr(message, name) == value for name, value in fields.items()):
                    self.unread.remove(message)
                    return message
            if not self.hear():
                raise AssertionError(f"no {kind.__name__} {fields}; unread: {self.unread}")

    def expect_returned(self, library: LibraryId, calls: list[CallId]) -> CallsReturned:
        """These calls come back, in one message or several, in this order."""
        back: list[CallId] = []
        while len(back) < len(calls):
            returned = self.expect(CallsReturned, library=library)
            back += returned.calls
        assert back == calls
        return returned

    def silent(self, kind: type, *, due_in_s: float = math.inf, **fields: Any) -> None:
        """Nothing of the kind is unread, or comes of what was said. `due_in_s`: when it is to come of that; it may be
        here on a machine that stood still for so long."""
        self.settle()
        if self.said_s_ago() >= due_in_s:
            return
        found = [
            message
            for message in self.unread
            if type(message) is kind and all(getattr(message, name) == value for name, value in fields.items())
        ]
        assert not found, found

    def held(self, hello: PilotHello, library: LibraryId) -> tuple[CallId, ...]:
        """The calls that a hello lists in a library."""
        return next((facts.calls for facts in hello.libraries if facts.library == library), ())

    def finish(self) -> None:
        """The sequence is over: its libraries end, and every call has left as often as it came."""
        for library in sorted(self.open):
            self.stop(library, drain=False)
        while self.open:
            assert self.hear(), f"libraries {self.open} do not end"
        self.say_acks()
        assert not +self.owed, f"calls that have not left: {+self.owed}"
        assert self.hello().libraries == (), "nothing is held any more"


def answer_to(hello: PilotHello, *, lease_s: float = 60.0) -> PilotWelcome:
    """The manager's answer to a hello."""
    return PilotWelcome(hello.session, heartbeat_s=0.5, lease_s=lease_s, hello=hello.number)
