"""Send random events with arbitrary values to a pilot core, which must not raise.

Its memory sums must be consistent, and each call must leave the core once. Most events contain known libraries, calls
and devices. The Hypothesis tests of `tests/properties` and `tests/pilot` send only possible events.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from msgspec import inspect
from msgspec.structs import replace

from benchmarks.reliability.fuzz_inputs import Values
from stoker.contexts.recipe import Awareness, Needs, ObjectRef, Recipe
from stoker.pilot.core import events
from stoker.pilot.core.commands import SendToLibrary, SendToManager
from stoker.pilot.core.reactor import PilotCore
from stoker.pilot.core.state import PilotFacts
from stoker.protocol import to_agent, to_pilot
from stoker.protocol import to_manager as told
from stoker.protocol.calls import CallSpec
from stoker.protocol.ids import CallId, DeviceId, LibraryId

_GB = 10**9
_BYTES = (-1, 0, 1, _GB, 10 * _GB, 2**63)
_SECONDS = (-1.0, 0.0, 0.5, 11.0, 1e9, math.inf)
_REF = ObjectRef("weights", _GB, "/models/weights")
_RECIPES = (
    Recipe(key="plain", name="plain"),
    Recipe(key="files", name="files", objects=(_REF,), calls_per_library=3),
    Recipe(key="sources", name="sources", objects=(_REF,), awareness=Awareness.NONE),
    Recipe(key="needs", name="needs", needs=Needs(memory_bytes=_GB, disk_bytes=_GB, load_limit_s=5.0), slots=2),
)
_DEVICES = tuple(told.DeviceFacts(DeviceId(f"gpu:{n}"), "A10", 8 * _GB) for n in range(2))
_ORDER, _RUN, _SAID = map(inspect.type_info, (to_pilot.ToPilot, to_pilot.RunCalls, to_agent.ToAgent))
_OF_NODE = [
    inspect.type_info(kind)
    for kind in (
        events.ProcessEnded, events.LibrariesObserved, events.ObjectsPinned, events.ObjectArrived, events.ObjectLost,
        events.SourceFailed, events.CacheListed, events.LibraryPrepared, events.ProcessMade, events.LibraryBytesInvalid,
        events.LibrarySocketClosed, events.ArgumentsFetched, events.DeviceProbed, events.DriverReported,
        events.UsageMeasured, events.Tick, events.HelloDue,
    )
]  # fmt: skip
_OF_JOB = [inspect.type_info(kind) for kind in (events.ManagerAway, events.SignalReceived, events.ResourceLost)]
_NAMES = {
    "call": ("call", "calls", "running", "paths", "lacks"),
    "library": ("library", "resident_bytes", "cpu_s", "lines", "in_use_bytes"),
    "device": ("device", "devices"),
}
_SUBJECT = {name: subject for subject, names in _NAMES.items() for name in names}


class Life(Values):
    """A pilot core, and the sources of its events. `sent`: for each call, times sent minus times returned."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        facts = PilotFacts(
            pilot="p", session="s", host="h", pid=1, devices=_DEVICES, cache_bound_bytes=5 * _GB,
            is_carried=chance.random() < 0.3, probed=frozenset({DeviceId("gpu:0")}),
        )  # fmt: skip
        self.core = PilotCore(facts)
        self.now = 0.0
        self.fresh = 0
        self.sent: Counter[int] = Counter()
        self.give(events.HelloDue(events.UnacknowledgedFacts(), 0, ()))
        self.give(events.FromManager(to_pilot.PilotWelcome("s", 5.0, 60.0)))

    def integer(self, kind: Any, name: str) -> int:
        match _SUBJECT.get(name):
            case "call":
                return self.chance.randrange(self.fresh + 3)
            case "library":
                return self.chance.randrange(1, 6)
        if name == "signal":
            return self.chance.choice((0, 9, 11))
        if name.endswith("bytes"):
            return self.chance.choice(_BYTES)
        return super().integer(kind, name) if self.chance.random() < 0.2 else self.chance.randrange(5)

    def real(self, kind: Any) -> float:  # noqa: ARG002
        return self.chance.choice(_SECONDS)

    def text(self, name: str) -> str:
        if _SUBJECT.get(name) == "device":
            return "gpu:0"  # this device is probed
        return self.chance.choice(("weights", "other")) if self.chance.random() < 0.7 else super().text(name)

    def give(self, event: events.Event) -> None:
        for command in self.core.handle(event, self.now):
            match command.message if isinstance(command, SendToManager | SendToLibrary) else None:
                case told.CallsEnded(ends=ends):
                    self.left(end.call for end in ends)
                case told.CallsReturned(calls=calls):
                    self.left(calls)
                case told.CallEvicted(progress=progress):
                    self.left([progress.call])
                case told.LibraryGone(running=running, unstarted=unstarted):
                    self.left([*running, *unstarted])

    def left(self, calls: Iterable[int]) -> None:
        for call in calls:
            self.sent[call] -= 1
            assert self.sent[call] >= 0, f"call {call} leaves twice"

    def event(self) -> Any:
        chance = self.chance
        dice = chance.random()
        if dice < 0.4:
            return events.FromManager(self.order())
        if dice < 0.65:
            said = [self.value(_SAID) for _ in range(chance.randrange(3))]
            return events.FromLibrary(LibraryId(chance.randrange(1, 6)), said)
        if dice < 0.69:
            return self.measured()
        if dice < 0.73:
            return events.TimerFired(f"{chance.choice(('snapshots', 'cancel'))}/{chance.randrange(1, 6)}")
        return self.value(chance.choice(_OF_NODE if dice < 0.997 else _OF_JOB))

    def order(self) -> Any:
        chance = self.chance
        dice = chance.random()
        if dice < 0.3:
            device = DeviceId(chance.choice(("gpu:0", "gpu:1", "gpu:9")))
            number, recipe, size = LibraryId(chance.randrange(1, 6)), chance.choice(_RECIPES), chance.choice(_BYTES)
            return to_pilot.StartLibrary(number, recipe, (device,), 0, size)
        message = self.value(_RUN if dice < 0.6 else _ORDER)
        if isinstance(message, to_pilot.RunCalls):
            new = [CallSpec(CallId(self.fresh + at), b"x") for at in range(chance.randrange(1, 4))]
            self.fresh += len(new)
            if self.core.state.answered_hello == self.core.state.hellos:
                self.sent.update(spec.call for spec in new)
            return replace(message, calls=new, gang=None, offer=False)
        if isinstance(message, to_pilot.CancelCalls):
            library = self.core.state.libraries.get(message.library)
            return replace(message, calls=tuple(library.held_calls)[::2] if library is not None else ())
        return to_pilot.HelloAgain(0) if isinstance(message, to_pilot.Exit | to_pilot.PilotRefused) else message

    def measured(self) -> events.DevicesMeasured:
        """Return the memory use of a device by one of its libraries."""
        for number, library in self.core.state.libraries.items():
            if self.chance.random() < 0.5 and library.devices:
                device = library.devices[0]
                used = {number: {device: self.chance.choice(_BYTES[1:])}}
                return events.DevicesMeasured(used, {device: self.chance.choice((-1, _GB))}, {device: self.now})
        return events.DevicesMeasured({}, {}, {})


def live(chance: random.Random, *, count: int) -> None:
    """Send `count` random events to a core, then end the pilot."""
    life = Life(chance)
    for _ in range(count):
        life.now += chance.choice((0.0, 0.001, 0.3, 3.0, 50.0))
        life.give(life.event())
        life.core.state.ledger.validate()
        held = Counter(call for library in life.core.state.libraries.values() for call in library.held_calls)
        assert all(life.sent[call] >= number for call, number in held.items()), "a call came from nowhere"
    life.give(events.Farewell())
    assert not any(library.held_calls for library in life.core.state.libraries.values()), "a call is left behind"
