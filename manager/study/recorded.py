"""What a journal tells of the session's world: who came when, what loads and calls took, what came in between.

The journal is replayed through the core, since it holds what was said to the manager and not what the manager said:
which library was told to load what on which device, and which call was sent where, are the core's commands.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.contexts.recipe import Recipe
from stoker.errors import SessionError
from stoker.manager.core.events import (
    AdviceArrived,
    Command,
    ContextAdvice,
    CostAdvice,
    Event,
    FromClient,
    FromPilot,
    OfContext,
    PilotCut,
    PilotLost,
    ToPilot,
)
from stoker.manager.core.seams import Policies
from stoker.manager.core.state import State
from stoker.manager.live.replay import Replay
from stoker.protocol import to_manager, to_pilot
from stoker.protocol.calls import CallEnd
from stoker.protocol.to_manager import DeviceFacts


class RecordedLoad(msgspec.Struct, frozen=True):
    """A load that ended well. `whole_s`: from the order until the manager heard of its end. `slots`: calls that the
    library runs at once."""

    recipe: str
    kind: str
    start_s: float
    load_s: float
    fetch_s: float
    whole_s: float
    memory_bytes: int
    slots: int = 1


class RecordedRun(msgspec.Struct, frozen=True):
    """A run of a call. `first`: the first of its library. `between_s`: of the library's time since its last end, or
    since the call was sent, what was not this run; `waiting`: the call was there before it could begin (-1 s: it is not
    known, because libraries of several slots do not do one thing after the other)."""

    recipe: str
    kind: str
    items: int
    run_s: float
    first: bool
    between_s: float
    waiting: bool


class RecordedCall(msgspec.Struct, frozen=True):
    """A call, and when it came."""

    at: float
    call: int
    recipe: str
    items: int
    priority: int


class RecordedStay(msgspec.Struct):
    """A pilot from when it came until it went (infinite: it was there to the end)."""

    pilot: str
    devices: tuple[DeviceFacts, ...]
    came_at: float
    left_at: float = float("inf")
    cut_at: float = 0.0
    """When its connection broke, if it has not come back."""


class _Held(msgspec.Struct):
    """A library, as far as its loads and runs are concerned."""

    recipe: Recipe
    kind: str
    ordered_at: float
    free_since: float = 0.0
    served: int = 0
    sent: dict[int, float] = {}
    slots: int = 1


class RecordedSession:
    """A session, read from its journal. Times are the manager's, in seconds since the epoch."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.since = 0.0
        """What happened before this time is not in the journal any more, because it was compacted; 0 = nothing is."""
        self.recipes: dict[str, Recipe] = {}
        self.advice: dict[str, dict[str, ContextAdvice]] = {}
        self.loads: list[RecordedLoad] = []
        self.runs: list[RecordedRun] = []
        self.asked: dict[int, RecordedCall] = {}
        self.ended: dict[int, float] = {}
        """When the calls that ran had ended."""
        self.stays: dict[str, RecordedStay] = {}
        self._libraries: dict[int, _Held] = {}

    @property
    def calls(self) -> list[RecordedCall]:
        """The calls that ran to an end, in the order in which they came."""
        return [call for call in self.asked.values() if call.call in self.ended]

    @property
    def makespan_s(self) -> float:
        """From the first of these calls to the last end."""
        calls = self.calls
        return max(self.ended.values()) - calls[0].at if calls else 0.0

    # ---- while it is read

    def begin(self, state: State, *, since: float) -> None:
        """The journal was compacted: what its snapshot says of the session before this time."""
        self.since = since
        self.recipes = {key: context.recipe for key, context in state.contexts.items()}
        self.advice = {key: dict(context.advice) for key, context in state.contexts.items() if context.advice}
        for pilot in state.pilots.values():
            devices = tuple(device.facts for device in pilot.devices.values())
            self.stays[pilot.id] = RecordedStay(pilot.id, devices, since)
        for call in state.calls.values():
            items = call.spec.features.items if call.spec.features is not None else 1
            key, priority = call.group.context.recipe.key, call.group.options.priority
            self.asked[call.id] = RecordedCall(call.submitted_at, call.id, key, items, priority)
        kinds = [device.facts.kind for device in state.devices()]
        for key, context in state.contexts.items():
            if context.loads:  # what its loads took on the average; their kind of device is that of its libraries
                kind = next((x.devices[0].facts.kind for x in context.libraries.values()), kinds[0] if kinds else "cpu")
                load = RecordedLoad(
                    key, kind, 0.0, context.load_s, 0.0, context.load_s, context.resident_bytes, context.slots
                )
                self.loads.append(load)
        for library in state.libraries.values():
            sent = {id: call.sent_at for id, call in library.held.items()}
            kind = library.devices[0].facts.kind
            self._libraries[library.id] = _Held(
                library.context.recipe, kind, library.started_at, library.used_at, library.served, sent, library.slots
            )

    def happened(self, now: float, event: Event) -> None:
        """An event."""
        if isinstance(event, FromClient):
            for message in event.messages:
                self._client_said(now, message)
        elif isinstance(event, FromPilot):
            for said in event.messages:
                self._pilot_said(now, event.pilot, said)
        elif isinstance(event, PilotCut) and event.pilot in self.stays:
            self.stays[event.pilot].cut_at = now
        elif isinstance(event, PilotLost):
            self._pilot_left(now, event.pilot)
        elif isinstance(event, AdviceArrived) and isinstance(event.about, OfContext) and not self.loads:
            self.advice[event.about.recipe] = event.advice.by_kind if isinstance(event.advice, CostAdvice) else {}

    def decided(self, now: float, commands: list[Command]) -> None:
        """What the core answered to it."""
        for command in commands:
            match command:
                case ToPilot(pilot=pilot, message=to_pilot.StartLibrary() as order):
                    kinds = {facts.device: facts.kind for facts in self.stays[pilot].devices}
                    held = _Held(order.recipe, kinds[order.devices[0]], now, sent={})
                    self._libraries[order.library] = held
                case ToPilot(message=to_pilot.RunCalls() as order):
                    library = self._libraries.get(order.library)
                    if library is not None:
                        library.sent.update((spec.call, now) for spec in order.calls)
                case _:
                    pass

    def _client_said(self, now: float, message: to_manager.FromClient) -> None:
        if isinstance(message, to_manager.DefineRecipe):
            self.recipes.setdefault(message.recipe.key, message.recipe)
        elif isinstance(message, to_manager.Submit):
            for spec in message.calls:
                items = spec.features.items if spec.features is not None else 1
                call = RecordedCall(now, spec.call, message.recipe, items, message.options.priority)
                self.asked.setdefault(spec.call, call)

    def _pilot_said(self, now: float, pilot: str, message: to_manager.FromPilot) -> None:
        match message:
            case to_manager.PilotHello(devices=devices):
                stay = self.stays.setdefault(pilot, RecordedStay(pilot, devices, now))
                stay.left_at, stay.cut_at = float("inf"), 0.0
            case to_manager.PilotLeaving():
                self._pilot_left(now, pilot)
            case to_manager.LibraryReady():
                self._ready(now, message)
            case to_manager.CallsEnded(library=number, ends=ends):
                library = self._libraries.get(number)
                if library is not None:
                    self._ended(now, library, ends)
            case _:
                pass

    def _pilot_left(self, now: float, pilot: str) -> None:
        if pilot in self.stays:
            self.stays[pilot].left_at = self.stays[pilot].cut_at or now

    def _ready(self, now: float, message: to_manager.LibraryReady) -> None:
        library = self._libraries.get(message.library)
        if library is None:
            return
        library.free_since = now
        library.slots = message.slots or library.recipe.slots or 1
        memory = message.device_bytes or message.resident_bytes
        whole_s = now - library.ordered_at
        load = RecordedLoad(
            library.recipe.key,
            library.kind,
            message.start_s,
            message.load_s,
            message.fetch_s,
            whole_s,
            memory,
            library.slots,
        )
        self.loads.append(load)

    def _ended(self, now: float, library: _Held, ends: list[CallEnd]) -> None:
        known = [end for end in ends if end.call in library.sent]  # others were told twice
        if not known:
            return
        busy_s = sum(end.run_s for end in known)
        sent_at = min(library.sent.pop(end.call) for end in known)
        waiting = sent_at < library.free_since
        between_s = (now - max(sent_at, library.free_since) - busy_s) / len(known)
        if library.slots > 1:
            between_s = -1.0
        for end in known:
            if end.failure is not None or end.call not in self.asked:
                continue
            library.served += 1
            self.ended[end.call] = now
            items = self.asked[end.call].items
            self.runs.append(
                RecordedRun(
                    library.recipe.key, library.kind, items, end.run_s, library.served <= library.slots,
                    between_s, waiting,
                )
            )  # fmt: skip
        library.free_since = now


def read_session(path: Path, *, session: str, policies: Policies) -> RecordedSession:
    """The session of a journal, which `policies` ran. Raises SessionError if it has no calls that ran to an end."""
    found = RecordedSession(session)
    again = Replay(path, session, policies)
    if again.core is not None:
        found.begin(again.core.state, since=again.since)
    for now, event in again.events():
        found.happened(now, event)
        found.decided(now, again.handle(event, now))
    if not found.calls:
        raise SessionError(f"no call of session {session} ran to an end: there is nothing to measure", session=session)
    return found
