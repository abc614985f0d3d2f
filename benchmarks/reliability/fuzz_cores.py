"""Send random events to a pilot core and to pure parts of manager and pilot.

The pilot core must not raise, its memory sums must be consistent, and each call must leave the core once. The parts
raise only declared errors, which leave the state unchanged.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.reliability import fuzz_manager
from stoker.contexts.recipe import BARE, Awareness, Needs, ObjectRef, Recipe
from stoker.pilot.core import events, lifecycle, running
from stoker.pilot.core.commands import Tell, TellLibrary
from stoker.pilot.core.core import PilotCore
from stoker.pilot.core.events import DeviceHealth, ProbeVerdict
from stoker.pilot.core.state import Ledger, PilotFacts, PilotLibrary, Stage
from stoker.pilot.core.turns import FirstCome
from stoker.protocol import to_agent, to_pilot
from stoker.protocol import to_manager as told
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import CallEnd, CallOptions, CallProgress, CallSpec, Failure, FailureKind
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId, PilotId
from stoker.protocol.to_pilot import StartLibrary

_GB = 10**9
_PILOT_SIZES = (-1, 0, 1, _GB, 10 * _GB, 2**63)
_SECONDS = (-1.0, 0.0, 0.5, 11.0, 1e9, math.inf)
_REF = ObjectRef("weights", _GB, "/models/weights")
_RECIPES = (
    Recipe(key="plain", name="plain"),
    Recipe(key="files", name="files", objects=(_REF,), calls_per_library=3),
    Recipe(key="sources", name="sources", objects=(_REF,), awareness=Awareness.NONE),
    Recipe(key="needs", name="needs", needs=Needs(memory_bytes=_GB, disk_bytes=_GB, load_limit_s=5.0), slots=2),
)
_DEVICES = tuple(told.DeviceFacts(DeviceId(f"gpu:{n}"), "A10", 8 * _GB) for n in range(2))
_FAILURE = Failure(FailureKind.CONTEXT, "no such file")


def run_life(chance: random.Random, *, count: int) -> None:
    _Life(chance).live(count)


class _Life:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        carried = chance.random() < 0.3
        facts = PilotFacts(
            pilot="p", session="s", host="h", pid=1, devices=_DEVICES, cache_bound_bytes=5 * _GB, is_carried=carried,
            probed=frozenset({DeviceId("gpu:0")}),
        )  # fmt: skip
        self.core = PilotCore(facts)
        self.now = 0.0
        self.fresh = 0
        self.sent: Counter[int] = Counter()
        """For each call, times sent to the pilot minus times returned."""

    def live(self, count: int) -> None:
        self.give(events.HelloDue(events.UnacknowledgedFacts(), 0, ()))
        self.give(events.FromManager(to_pilot.PilotWelcome("s", 5.0, 60.0)))
        for _ in range(count):
            self.now += self.chance.choice((0.0, 0.001, 0.3, 3.0, 50.0))
            self.give(self.event())
            self.core.state.ledger.validate()
            held = Counter(call for library in self.core.state.libraries.values() for call in library.held)
            assert all(self.sent[call] >= number for call, number in held.items()), "a call came from nowhere"
        self.give(events.Farewell())
        assert not any(library.held for library in self.core.state.libraries.values()), "a call is left behind"

    def give(self, event: events.Event) -> None:
        for command in self.core.handle(event, self.now):
            message = command.message if isinstance(command, Tell | TellLibrary) else None
            match message:
                case told.CallsEnded(ends=ends):
                    self.left(end.call for end in ends)
                case told.CallsReturned(calls=calls):
                    self.left(calls)
                case told.CallEvicted(progress=progress):
                    self.left([progress.call])
                case told.LibraryGone(running=running, unstarted=unstarted):
                    self.left([*running, *unstarted])
                case _:
                    pass

    def left(self, calls: Any) -> None:
        for call in calls:
            self.sent[call] -= 1
            assert self.sent[call] >= 0, f"call {call} leaves twice"

    def library(self) -> LibraryId:
        return LibraryId(self.chance.randrange(1, 6))

    def calls(self) -> tuple[CallId, ...]:
        return tuple(CallId(self.chance.randrange(self.fresh + 3)) for _ in range(self.chance.randrange(4)))

    def event(self) -> Any:
        chance, number = self.chance, self.library()
        match chance.randrange(20):
            case 0 | 1 | 2 | 3 | 4 | 5:
                return events.FromManager(self.order())
            case 6 | 7 | 8 | 9 | 10:
                return events.FromLibrary(number, [self.said() for _ in range(chance.randrange(3))])
            case 11:
                return events.ProcessEnded(
                    number, chance.choice((0, 9)), chance.choice((0, 1, 116, 119, 120)), self.calls()
                )
            case 12:
                seen = [(call, chance.choice(_SECONDS)) for call in self.calls()]
                return events.Observed([events.Observation(number, seen, chance.choice((0, _GB)))])
            case 13:
                paths = {"weights": "/cache/weights"} if chance.random() < 0.7 else {}
                lack = events.FetchFailure("the disk is full", is_pilots_fault=True) if chance.random() < 0.2 else None
                return chance.choice((
                    events.Pinned(number, paths, lack), events.ObjectArrived("weights", _GB),
                    events.ObjectLost("weights", events.FetchFailure("nowhere")),
                    events.SourceFailed("weights", "it hung", PilotId(chance.choice(("", "p2")))),
                    events.CacheListed({name: _GB for name in ("weights", "other") if chance.random() < 0.5}),
                ))  # fmt: skip
            case 14:
                wrong = "no space left" if chance.random() < 0.2 else ""
                return events.LibraryPrepared(
                    number, chance.choice(_PILOT_SIZES), chance.choice(("", "/models/weights")), (), wrong
                )
            case 15:
                return chance.choice((
                    events.ProcessMade(number, 7), events.LibraryGarbled(number, "x"), events.LibraryHungUp(number),
                ))  # fmt: skip
            case 16:
                ticket = chance.randrange(self.core.state.last_ticket + 2)
                some = self.calls()
                paths_of = dict.fromkeys(some[:1], "/cache/argument")
                return events.ArgumentsBrought(
                    number, ticket, paths_of, dict.fromkeys(some[1:], events.FetchFailure("away"))
                )
            case 17:
                answer = chance.choice(list(ProbeVerdict))
                uses = {number: {DeviceId("gpu:0"): chance.choice(_PILOT_SIZES[1:])}}
                library = self.core.state.libraries.get(number)
                if library is not None and "gpu:0" in library.devices:
                    device = DeviceId("gpu:0")
                    return events.DevicesMeasured(uses, {device: chance.choice((-1, _GB))}, {device: self.now})
                return events.Probed(DeviceId("gpu:0"), answer, "said")
            case 18:
                key = f"{chance.choice(('snapshots', 'cancel'))}/{number}"
                return chance.choice((events.TimerFired(key), events.Tick(chance.random() < 0.5)))
            case _:
                return self.rare()

    def rare(self) -> Any:
        chance = self.chance
        if chance.random() < 0.05:
            return chance.choice((
                events.ManagerAway(1e9), events.WalltimeKnown(0.0), events.Signalled("it got SIGTERM"),
                events.ResourceLost("its scratch folder is gone", LossReason.SCRATCH_GONE),
            ))  # fmt: skip
        return chance.choice((
            events.HelloDue(events.UnacknowledgedFacts(), 0, ()), events.ManagerAway(1.0), events.WalltimeKnown(1e6),
            events.DriverSaid(DeviceId("gpu:1"), "Xid 79", ""), events.UsageMeasured({self.library(): 1}, {}, 0),
        ))  # fmt: skip

    def order(self) -> Any:
        chance, number = self.chance, self.library()
        match chance.randrange(12):
            case 0 | 1 | 2:
                devices = tuple(chance.choices([DeviceId("gpu:0"), DeviceId("gpu:1"), DeviceId("gpu:9")], k=1))
                snapshots = {"bf16": ObjectRef("snap", _GB)} if chance.random() < 0.3 else {}
                return to_pilot.StartLibrary(
                    number, chance.choice(_RECIPES), devices, 0, chance.choice(_PILOT_SIZES), snapshots,
                    chance.choice(_SECONDS[:4]),
                )  # fmt: skip
            case 3 | 4 | 5 | 6:
                payload: Any = ObjectRef("argument", 2 * 10**6) if chance.random() < 0.2 else b"x"
                new = [CallSpec(CallId(self.fresh + at), payload) for at in range(chance.randrange(1, 4))]
                self.fresh += len(new)
                accepted = self.core.state.answered == self.core.state.hellos
                self.sent.update(spec.call for spec in new if accepted)
                limit_s = chance.choice(_SECONDS)
                return to_pilot.RunCalls(
                    number, FunctionKey("f"), new, CallOptions(limit_s=limit_s, stream=chance.random() < 0.3)
                )
            case 7:
                return to_pilot.TakeBack(number, chance.choice((-1, 0, 2, 10**9)))
            case 8:
                grace_s = chance.choice(_SECONDS[:4])
                return to_pilot.CancelCalls(number, self.held_of(number), chance.random() < 0.5, grace_s)
            case 9:
                return to_pilot.StopLibrary(number, "enough", chance.random() < 0.7)
            case 10:
                return to_pilot.ResizeLibrary(number, chance.choice(_PILOT_SIZES))
            case _:
                return chance.choice((
                    to_pilot.FetchObject(_REF, origin=chance.random() < 0.5, keep=chance.random() < 0.5),
                    to_pilot.PilotWelcome("s", chance.choice(_SECONDS), 60.0, hello=chance.randrange(4)),
                    to_pilot.HelloAgain(chance.randrange(5)), to_pilot.Ack(chance.randrange(5)),
                    to_pilot.EvictCall(number, CallId(1)), to_pilot.MeetGang(number, CallId(1), "h:1"),
                    to_pilot.AckPieces(number, CallId(1), chance.randrange(3), chance.randrange(9), again=True),
                ))  # fmt: skip

    def held_of(self, number: LibraryId) -> tuple[CallId, ...]:
        library = self.core.state.libraries.get(number)
        return tuple(library.held)[::2] if library is not None else ()

    def said(self) -> Any:
        chance = self.chance
        match chance.randrange(9):
            case 0:
                return to_agent.Hello(1, 7)
            case 1:
                return to_agent.Loaded(1.0, _GB, _GB, chance.choice(_PILOT_SIZES))
            case 2:
                return to_agent.LoadFailed(_FAILURE)
            case 3 | 4:
                large: Any = ObjectRef("result", 2 * 10**6) if chance.random() < 0.1 else b""
                return to_agent.RunsEnded([CallEnd(call, True, large) for call in self.calls()])
            case 5:
                return to_agent.GivenBack(self.calls(), order=chance.randrange(4))
            case 6:
                return to_agent.RunEvicted(CallProgress(CallId(chance.randrange(self.fresh + 1))))
            case 7:
                return to_agent.Resized(chance.choice(_PILOT_SIZES))
            case _:
                return chance.choice((
                    to_agent.Reports([CallProgress(CallId(1))]), to_agent.Listens(CallId(1), 70000),
                    to_agent.SnapshotMade("bf16", "/snapshots/x", 1.0),
                    to_agent.Yielded(CallId(1), chance.randrange(3), chance.randrange(3), [b"x"] * chance.randrange(3)),
                ))  # fmt: skip


EVENTS = 200
_SIZES = (-1, 0, 1, 10, 50, 99, 100, 101, 2**63)


def lives() -> dict[str, Callable[[random.Random], None]]:
    return {
        "manager core: every message": functools.partial(fuzz_manager.live, events=EVENTS),
        "pilot core: every event": functools.partial(run_life, count=EVENTS), "pilot core: ledger": _ledger,
        "pilot core: library": _library, "pilot core: turns": _turns, "pilot core: health": _health,
    }  # fmt: skip


def _ledger(chance: random.Random) -> None:
    devices = {DeviceId(f"cuda:{number}"): 100 for number in range(3)}
    ledger = Ledger(devices)
    names = [*devices, DeviceId("cuda:9")]
    for _ in range(EVENTS):
        library = LibraryId(chance.randrange(5))
        before = [ledger.free(device) for device in devices], ledger.held(library)
        try:
            match chance.randrange(3):
                case 0:
                    some = tuple(chance.choices(names, k=chance.randrange(4)))
                    ledger.reserve(library, devices=some, memory_bytes=chance.choice(_SIZES))
                case 1:
                    ledger.resize(library, memory_bytes=chance.choice(_SIZES))
                case _:
                    ledger.release(library)
        except ValueError:
            assert before == ([ledger.free(device) for device in devices], ledger.held(library)), "it changed something"
        ledger.validate()


def _library(chance: random.Random) -> None:
    library = PilotLibrary(StartLibrary(LibraryId(1), BARE, (DeviceId("cpu:0"),)), 0.0)
    inside: set[CallId] = set()
    left: list[CallId] = []
    fresh = 0
    for _ in range(EVENTS):
        some = [CallId(chance.randrange(fresh + 3)) for _ in range(chance.randrange(4))]
        was = library.stage
        try:
            match chance.randrange(5):
                case 0:
                    lifecycle.move_to(library, chance.choice([each for each in Stage if each is not Stage.GONE]))
                case 1:
                    new = [CallId(fresh + number) for number in range(chance.randrange(4))]
                    running.hold_calls(library, new, limit_s=chance.choice([0.0, 5.0]))
                    fresh += len(new)
                    inside.update(new)
                case 2:
                    left += running.drop_ended(library, some)
                case 3:
                    left += running.drop_returned(library, some)
                case _ if chance.random() < 0.03:
                    if library.stage is not Stage.GONE:
                        lifecycle.move_to(library, Stage.GONE)
                    gone = running.drop_all(library, some)
                    left += [*gone.running, *gone.unstarted]
        except ValueError:
            assert library.stage is was, "it changed something"
        assert len(left) == len(set(left)), "a call left twice"
        assert set(left) | set(library.held) == inside, "a call was lost, or came from nowhere"
        assert not set(left) & set(library.held), "a call left and is still held"


def _turns(chance: random.Random) -> None:
    turns: FirstCome[int] = FirstCome()
    waiting: list[int] = []
    for number in range(EVENTS):
        match chance.randrange(4):
            case 0 | 1:
                turns.add(number, -number)
                waiting.append(number)
            case 2:
                taken = turns.take()
                assert taken == ((waiting[0], -waiting[0]) if waiting else None), "not the oldest"
                del waiting[:1]
            case _ if chance.random() < 0.5:
                count = chance.randrange(-1, 5)
                back = turns.give_back(count)
                assert back == waiting[::-1][: max(0, count)], "not the newest"
                del waiting[len(waiting) - len(back) :]
            case _:
                some = [chance.randrange(EVENTS) for _ in range(5)]
                assert set(turns.drop(some)) == set(some) & set(waiting), "dropped others"
                waiting = [each for each in waiting if each not in some]
        assert len(turns) == len(waiting)


def _health(chance: random.Random) -> None:
    health = DeviceHealth()
    lasting = False
    for _ in range(EVENTS):
        before = health.fault
        if chance.random() < 0.02:
            changed = health.reported("Xid 79")
            lasting = True
        else:
            answer = chance.choice([*ProbeVerdict, ProbeVerdict.SOUND, ProbeVerdict.SOUND])
            changed = health.heard(answer, "refused memory")
        assert changed == (health.fault != before), "it did not say what changed"
        assert not (lasting and before and not health.fault), "a fault of the driver went away by itself"
