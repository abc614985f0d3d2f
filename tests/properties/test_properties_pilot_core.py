"""Under random events in a pilot, each call leaves its library once, and memory is never reserved twice.

The state machine acts as the manager, the processes and the node. A call is in a library from its order until the
pilot reports that the call left.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from core.pilot_shell import GIB, CoreShell
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stoker.contexts.recipe import Needs, ObjectRef, Recipe
from stoker.pilot.core import events
from stoker.pilot.core.commands import SendToManager, SetTimer
from stoker.pilot.core.state import SLEEP_STAGES
from stoker.protocol import to_agent
from stoker.protocol import to_manager as told
from stoker.protocol import to_pilot as order
from stoker.protocol.calls import WINDOW_PIECES, CallEnd, CallProgress
from stoker.protocol.ids import LibraryId

WEIGHTS = ObjectRef("weights", GIB, "/models/weights")
RECIPES = (
    Recipe(key="plain", name="plain"),
    Recipe(key="files", name="files", objects=(WEIGHTS,)),
    Recipe(key="limits", name="limits", needs=Needs(load_limit_s=5.0), calls_per_library=2),
)
libraries = st.integers(1, 5)
seconds = st.sampled_from((0.0, 0.3, 2.0, 11.0, 40.0))


class Pilot(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pilot = CoreShell(sleeper_bytes=20 * GIB)
        self.believed: dict[int, dict[int, None]] = {}  # Calls by library, as the manager believes
        self.calls = 0
        self.timers: dict[str, float] = {}

    @initialize()
    def join(self) -> None:
        self.pilot.join()
        self.settle()

    def settle(self) -> None:
        for command in self.pilot.wanted:
            if isinstance(command, SetTimer):
                self.timers[command.key] = command.at
            if isinstance(command, SendToManager):
                self.hear(command.message)
        self.pilot.forget()

    def hear(self, message: Any) -> None:
        match message:
            case told.CallsEnded(library=number, ends=ends):
                self.left(number, [end.call for end in ends])
            case told.CallsReturned(library=number, calls=calls):
                self.left(number, calls)
            case told.CallEvicted(library=number, progress=progress):
                self.left(number, [progress.call])
            case told.LibraryGone(library=number, running=running, unstarted=unstarted):
                self.left(number, [*running, *unstarted])
                assert not self.believed.pop(number, {}), "all that it held is told with its end"
            case _:
                pass

    def left(self, number: int, calls: Any) -> None:
        held = self.believed.setdefault(number, {})
        for call in calls:
            assert call in held, f"call {call} leaves lib-{number}, which does not hold it"
            del held[call]

    # ---- the manager
    @rule(number=libraries, recipe=st.sampled_from(RECIPES), memory=st.integers(0, 30))
    def start(self, number: int, recipe: Recipe, memory: int) -> None:
        self.pilot.start(number, recipe, device_memory_bytes=memory * GIB)
        self.settle()

    @rule(number=libraries, count=st.integers(1, 4), limit_s=st.sampled_from((0.0, 1.0)), stream=st.booleans())
    def run(self, number: int, count: int, limit_s: float, stream: bool) -> None:
        calls = range(self.calls + 1, self.calls + 1 + count)
        self.calls += count
        self.believed.setdefault(number, {}).update(dict.fromkeys(calls))
        self.pilot.run(*calls, library=number, limit_s=limit_s, stream=stream)
        self.settle()

    @rule(number=libraries, count=st.integers(1, 3))
    def take_back(self, number: int, count: int) -> None:
        self.pilot.hear(order.TakeBack(LibraryId(number), count))
        self.settle()

    @rule(number=libraries, running=st.booleans(), grace_s=st.sampled_from((0.0, 10.0)))
    def cancel(self, number: int, running: bool, grace_s: float) -> None:
        calls = tuple(self.believed.get(number, ()))[::2]
        self.pilot.hear(order.CancelCalls(LibraryId(number), calls, running, grace_s))
        self.settle()

    @rule(number=libraries, drain=st.booleans())
    def stop(self, number: int, drain: bool) -> None:
        self.pilot.hear(order.StopLibrary(LibraryId(number), "enough", drain))
        self.settle()

    @rule(number=libraries, size=st.integers(-1, 30))
    def resize(self, number: int, size: int) -> None:
        self.pilot.hear(order.ResizeLibrary(LibraryId(number), size * GIB))
        self.settle()

    @rule(number=libraries, keeps=st.integers(0, 3), host=st.integers(0, 24), wakes=st.booleans())
    def put_to_sleep(self, number: int, keeps: int, host: int, wakes: bool) -> None:
        self.pilot.hear(order.SleepLibrary(LibraryId(number), keeps * GIB, host * GIB))
        if wakes:
            self.pilot.hear(order.WakeLibrary(LibraryId(number), 8 * GIB))
        self.settle()

    @rule(number=libraries, size=st.integers(0, 30))
    def wake(self, number: int, size: int) -> None:
        self.pilot.hear(order.WakeLibrary(LibraryId(number), size * GIB))
        self.settle()

    @rule(number=libraries, more=st.integers(0, 24), keeps=st.integers(0, 30), wakes=st.booleans())
    def moves(self, number: int, more: int, keeps: int, wakes: bool) -> None:
        """A process reports, even without an order, that its context sleeps and, if `wakes`, that it is awake."""
        self.pilot.say(number, to_agent.Slept(GIB, more * GIB, keeps * GIB, 0.1))
        if wakes:
            self.pilot.say(number, to_agent.Woke(0.1))
        self.settle()

    @rule(between=st.booleans())
    def greet(self, between: bool) -> None:
        """Send a hello and update the beliefs of the manager; the pilot ignores orders sent before the answer."""
        self.pilot.give(events.HelloDue(events.UnacknowledgedFacts(), 0, ()))
        state = self.pilot.core.state
        listed = {number: list(library.held_calls) for number, library in state.libraries.items()}
        assert listed == {number: list(self.believed.get(number, ())) for number in listed}
        assert not any(calls for number, calls in self.believed.items() if number not in listed)
        if between:
            self.pilot.run(10**9, library=1)
        self.pilot.hear(order.PilotWelcome("s", 5.0, 60.0, hello=state.hellos))
        self.settle()

    # ---- processes
    @rule(number=libraries, loaded=st.booleans(), device=st.integers(0, 30))
    def load(self, number: int, loaded: bool, device: int) -> None:
        self.pilot.give(events.ProcessMade(LibraryId(number), 1)).say(number, to_agent.Hello(number, 1))
        if loaded:
            self.pilot.say(number, to_agent.Loaded(1.0, GIB, GIB, device * GIB, sleeps=device % 3 > 0))
        self.settle()

    def some(self, number: int, every: int) -> list[int]:
        """Return some calls of a process, and one call that the process never received."""
        return [*tuple(self.believed.get(number, ()))[::every], 10**9]

    @rule(number=libraries, every=st.integers(1, 3), ok=st.booleans())
    def end(self, number: int, every: int, ok: bool) -> None:
        self.pilot.say(number, to_agent.RunsEnded([CallEnd(call, ok=ok) for call in self.some(number, every)]))
        self.settle()

    @rule(number=libraries, every=st.integers(1, 3), answers=st.integers(0, 3))
    def give_back(self, number: int, every: int, answers: int) -> None:
        self.pilot.say(number, to_agent.GivenBack(tuple(self.some(number, every)), order=answers))
        self.settle()

    @rule(number=libraries, size=st.integers(-1, 40))
    def evict(self, number: int, size: int) -> None:
        call = self.some(number, 1)[0]
        self.pilot.say(number, to_agent.RunEvicted(CallProgress(call)), to_agent.Resized(size * GIB))
        self.settle()

    @rule(number=libraries, run=st.integers(1, 2), count=st.integers(0, 5), taken=st.integers(0, 9))
    def give_pieces(self, number: int, run: int, count: int, taken: int) -> None:
        library = self.pilot.core.state.libraries.get(LibraryId(number))
        for call, window in list(library.piece_windows.items())[:1] if library is not None else ():
            first = window.first + len(window.items) if run == window.run else 0
            self.pilot.say(number, to_agent.Yielded(call, run, first, [b"x"] * count))
            self.pilot.hear(order.AckPieces(LibraryId(number), call, run, taken))
        self.settle()

    @rule(number=libraries, every=st.integers(1, 3), signal=st.sampled_from((0, 9, 11)), fails=st.booleans())
    def die(self, number: int, every: int, signal: int, fails: bool) -> None:
        running = tuple(self.some(number, every))
        cause = "no process" if fails else ""
        self.pilot.give(events.ProcessEnded(LibraryId(number), signal, running=running, cause=cause))
        self.settle()

    @rule(number=libraries, garbled=st.booleans())
    def break_socket(self, number: int, garbled: bool) -> None:
        self.pilot.give(
            events.LibraryBytesInvalid(LibraryId(number), "x")
            if garbled
            else events.LibrarySocketClosed(LibraryId(number))
        )
        self.settle()

    @rule(number=libraries, every=st.integers(1, 3), ran_s=seconds, over=st.sampled_from((0, GIB)))
    def observe(self, number: int, every: int, ran_s: float, over: int) -> None:
        seen = [(call, ran_s) for call in self.some(number, every)]
        library = self.pilot.core.state.libraries.get(LibraryId(number))
        ends_for_others = library is None or library.is_killed or bool(over or library.socket_closed_at)
        self.pilot.give(events.LibrariesObserved([events.Observation(LibraryId(number), seen, over)]))
        if library is not None and library.is_killed and not ends_for_others and library.stuck_calls:
            others = [call for call, _ in seen if call in library.held_calls and call not in library.stuck_calls]
            assert not others, "a call that runs is not killed for one that does not stop"
        self.settle()

    # ---- the node
    @rule(comes=st.booleans(), in_cache=st.booleans())
    def object_news(self, comes: bool, in_cache: bool) -> None:
        (self.pilot.cache.add if in_cache else self.pilot.cache.discard)("weights")
        self.pilot.give(
            events.ObjectArrived("weights", GIB)
            if comes
            else events.ObjectLost("weights", events.FetchFailure("nowhere"))
        )
        self.settle()

    @rule(after_s=seconds)
    def wait(self, after_s: float) -> None:
        self.pilot.wait(after_s)
        for key in [key for key, at in self.timers.items() if at <= self.pilot.now]:
            del self.timers[key]
            self.pilot.give(events.TimerFired(key))
        self.pilot.give(events.Tick())
        self.settle()

    @rule(left_s=st.sampled_from((5.0, 1000.0)))
    def walltime(self, left_s: float) -> None:
        self.pilot.give(events.WalltimeKnown(left_s))
        self.settle()

    @invariant()
    def pieces_are_kept_of_held_calls_alone(self) -> None:
        for library in self.pilot.core.state.libraries.values():
            assert library.piece_windows.keys() <= library.held_calls.keys()
            assert all(len(window.items) <= WINDOW_PIECES for window in library.piece_windows.values())

    @invariant()
    def memory_adds_up(self) -> None:
        state = self.pilot.core.state
        state.ledger.validate()
        state.host_memory.validate()
        awake = [x for x in state.libraries.values() if x.stage not in SLEEP_STAGES]
        assert not any(state.host_memory.reserved_bytes(library.number) for library in awake)
        asleep = [x for x in state.libraries.values() if x.stage in SLEEP_STAGES]
        assert not any(library.held_calls for library in asleep)
        assert state.host_claims.keys() <= {library.number for library in asleep}

    def teardown(self) -> None:
        self.pilot.give(events.Farewell())
        self.settle()
        assert not any(self.believed.values()), "nothing that was accepted is forgotten"


TestPilot = Pilot.TestCase
TestPilot.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
