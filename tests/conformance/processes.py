from __future__ import annotations

from collections.abc import Callable

from stoker.pilot.core.events import Event, FromLibrary, ProcessEnded
from stoker.protocol import to_agent, to_library
from stoker.protocol.calls import CallEnd, CallProgress
from stoker.protocol.ids import CallId, LibraryId


class ModelProcess:
    """A library that runs its first call while other calls wait."""

    def __init__(self, number: LibraryId, tell: Callable[[Event], None]) -> None:
        self.number = number
        self.calls: list[CallId] = []
        self._tell = tell
        self._stops = False
        self.deaf: set[CallId] = set()  # calls that ignore stop orders

    def load(self) -> None:
        self.say(to_agent.Hello(self.number, 7), to_agent.Loaded(0.0, 1, 1))

    def say(self, *messages: to_agent.ToAgent) -> None:
        self._tell(FromLibrary(self.number, messages))

    def hear(self, message: to_library.ToLibrary) -> None:
        match message:
            case to_library.Run(calls=specs):
                self.calls += [spec.call for spec in specs]
            case to_library.GiveBack(count=count, calls=named, order=order):
                waiting = self.calls[1:]
                back = [call for call in waiting if call in named] if named else waiting[::-1][:count]
                self.calls = [call for call in self.calls if call not in back]
                if back or not named:
                    self.say(to_agent.GivenBack(tuple(back), order=order))
            case to_library.Evict(call=call) if self.calls[:1] == [call] and call not in self.deaf:
                self.calls.pop(0)
                self.say(to_agent.RunEvicted(CallProgress(call)))
                self._start_next_call()
            case to_library.Resize(device_memory_bytes=size):
                self.say(to_agent.Resized(size))
            case to_library.Stop():
                self._stops = True
                back = self.calls[:0:-1]
                self.calls = self.calls[:1]
                if back:
                    self.say(to_agent.GivenBack(tuple(back)))
                self._start_next_call()
            case _:
                pass

    def end(self, call: CallId) -> None:
        assert self.calls[:1] == [call], "it does not run"
        self.calls.pop(0)
        self.say(to_agent.RunsEnded([CallEnd(call, ok=True)]))
        self._start_next_call()

    def die(self, signal: int = 9) -> None:
        self._tell(ProcessEnded(self.number, signal=signal, running=tuple(self.calls[:1])))

    def _start_next_call(self) -> None:
        if self._stops and not self.calls:
            self.die(signal=0)
