"""Send random events with arbitrary values to the manager core, which must not raise.

Most events contain known peers and numbers, so that they pass the first checks of the core.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import inspect

from benchmarks.reliability.fuzz_inputs import Values
from stoker.contexts.recipe import BARE, Recipe
from stoker.manager.core import events
from stoker.manager.core.reactor import Core
from stoker.manager.policies import default_policies
from stoker.manager.sim.validate import check_state
from stoker.protocol import to_manager as say
from stoker.protocol import wire
from stoker.protocol.blocks import ProvisioningRule, Source
from stoker.protocol.calls import CallOptions, CallSpec, Features
from stoker.protocol.ids import RecipeKey

SESSION = "k3v9"
_INTS = (0, 1, 2, 3, -1, 7, 1000, 10**9, 8 * 10**9, 1 << 40, (1 << 62) + 1, -(1 << 62))
_FLOATS = (0.0, 1.0, 0.5, 30.0, 1e-300, 1e9, 1e300, math.inf, -math.inf, math.nan, -1.0)
_TEXTS = (
    "", "bare", "a", "b", "f", "g", "p0", "p1", "cpu:0", "cpu:1", "c-1", "lib-1", "b1", "b2", "b99", "mine", "\x00é",
)  # fmt: skip


_OF_CLIENT, _OF_PILOT = inspect.type_info(say.FromClient), inspect.type_info(say.FromPilot)


class Session(Values):
    """A manager core with its clients and pilots. In a third of messages, integers are arbitrary (`is_strange`)."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.core = Core(SESSION, default_policies())
        self.now, self.pilots, self.is_strange = 0.0, 0, False
        self.give(events.SessionKept())
        self.give(events.SessionDefined((Source("mine", ProvisioningRule.OPPORTUNISTIC, most=3, keep_pending=2),)))
        for name in ("ana", "bob"):
            self.tell(name, say.ClientHello(wire.VERSION, SESSION))
        self.tell("factory", say.ClientHello(wire.VERSION, SESSION, factory=True))
        recipes = (BARE, Recipe("a", "a", b"loader"), Recipe("b", "b", b"loader", slots=3))
        self.tell("ana", *map(say.DefineRecipe, recipes), say.DefineFunction("f", "f", b""))  # type: ignore[arg-type]
        self.pilot_joins()

    def message(self, kind: Any) -> Any:
        self.is_strange = self.chance.random() < 0.33
        return self.value(kind)

    def struct(self, cls: type, fields: Any, depth: int) -> Any:
        return cls(*[self.value(field.type, field.name, depth + 1) for field in fields])

    def integer(self, kind: Any, name: str) -> int:  # noqa: ARG002
        state, chance = self.core.state, self.chance
        known: list[int] = []
        if name in ("call", "calls", "running", "unstarted"):
            known = list(state.calls)[:20]
        elif name == "library":
            known = list(state.libraries)
        if known and chance.random() < 0.8:
            return chance.choice(known)
        return chance.choice(_INTS) if self.is_strange else chance.randrange(1, 20)

    def real(self, kind: Any) -> float:  # noqa: ARG002
        return self.chance.choice(_FLOATS) if self.is_strange else self.chance.uniform(0, 100)

    def text(self, name: str) -> str:
        state, chance = self.core.state, self.chance
        named: dict[str, Sequence[str]] = {
            "recipe": list(state.contexts), "function": list(state.functions), "block": list(state.blocks),
            "name": list(state.transfers.objects), "object": list(state.transfers.objects),
            "session": [SESSION], "source": list(state.sources), "blocks": list(state.blocks),
        }  # fmt: skip
        known = named.get(name, [])
        return str(chance.choice(known)) if known and chance.random() < 0.8 else chance.choice(_TEXTS)

    def give(self, event: Any) -> None:
        self.now += self.chance.choice((0.0, 0.01, 1.0, 20.0))
        for command in self.core.handle(event, self.now):
            assert not isinstance(command, events.SetTimer) or not math.isnan(command.at), command

    def tell(self, client: str, *messages: Any) -> None:
        self.give(events.FromClient(client, self._next(client, messages), list(messages)))  # type: ignore[arg-type]

    def report(self, pilot: str, *messages: Any) -> None:
        self.give(events.FromPilot(pilot, self._next(pilot, messages), list(messages)))  # type: ignore[arg-type]

    def _next(self, peer: str, messages: tuple[Any, ...]) -> int:
        if isinstance(messages[0], say.ClientHello | say.PilotHello):
            return 0
        state = self.core.state
        known = state.clients.get(peer) or state.pilots.get(peer)  # type: ignore[call-overload]
        return known.inbox.last + 1 if known is not None else 1

    def pilot_joins(self) -> None:
        name, self.pilots = f"p{self.pilots}", self.pilots + 1
        devices = tuple(say.DeviceFacts(f"cpu:{n}", "cpu", 8 * 10**9) for n in range(2))  # type: ignore[arg-type]
        self.report(name, say.PilotHello(wire.VERSION, SESSION, "host", 7, devices, peer="h:1", block="b1"))

    def step(self) -> Any:
        chance, state = self.chance, self.core.state
        pilot, client = f"p{chance.randrange(self.pilots)}", chance.choice(("ana", "bob", "factory"))
        if len(state.pilots) < 2 and chance.random() < 0.3:
            return self.pilot_joins
        if chance.random() < 0.9 and state.pilots:
            pilot = chance.choice(list(state.pilots))
        dice = chance.random()
        if dice < 0.45:
            message = self.message(_OF_PILOT)
            if isinstance(message, say.PilotLeaving) and chance.random() < 0.9:
                message = say.Heartbeat()
            if isinstance(message, say.PilotHello):
                message = msgspec.structs.replace(message, protocol=wire.VERSION, session=SESSION)
            return lambda: self.report(pilot, message)
        if dice < 0.7:
            message = self.message(_OF_CLIENT)
            if isinstance(message, say.EndSession) and chance.random() < 0.99:
                message = say.AskStatus()
            if isinstance(message, say.ClientHello):
                message = msgspec.structs.replace(message, protocol=wire.VERSION, session=SESSION)
            return lambda: self.tell(client, message)
        if dice < 0.85:
            return self._calls(client)
        return lambda: self._other(pilot, client)

    def _calls(self, client: str) -> Any:
        chance, state = self.chance, self.core.state
        known = state.clients.get(client)  # type: ignore[call-overload]
        base = max(known.number, 0) << 40 if known is not None else 0
        options = self.message(inspect.type_info(CallOptions)) if chance.random() < 0.4 else CallOptions()
        features = self.message(inspect.type_info(Features)) if chance.random() < 0.3 else None
        first = chance.randrange(10_000)
        specs = [CallSpec(base | (first + n), b"", features) for n in range(chance.choice((1, 1, 3, 9)))]  # type: ignore[arg-type]
        recipe = chance.choice([*state.contexts])
        return lambda: self.tell(client, say.Submit("f", recipe, specs, options))  # type: ignore[arg-type]

    def _other(self, pilot: str, client: str) -> None:
        chance, state = self.chance, self.core.state
        match chance.randrange(8):
            case 0:
                self.give(events.PilotCut(pilot))  # type: ignore[arg-type]
            case 1:
                self.give(events.PilotLost(pilot, "silent"))  # type: ignore[arg-type]
            case 2:
                self.pilot_joins()
            case 3:
                self.give(events.ClientGone(client))  # type: ignore[arg-type]
                self.tell(client, say.ClientHello(wire.VERSION, SESSION, factory=client == "factory"))
            case 4 if chance.random() < 0.2:
                self.give(events.ManagerRestarted())
            case 5:
                advice = events.CostAdvice({"": events.ContextAdvice(1.0, 10**9)})
                self.give(events.AdviceArrived(events.OfContext(RecipeKey("a")), advice))
            case _:
                if due := min(state.timers, key=state.timers.__getitem__, default=""):
                    self.now = max(self.now, min(state.timers[due], self.now + 1e6))
                    self.give(events.TimerFired(due))


VALIDATE_EVERY = 50


def live(chance: random.Random, *, count: int) -> None:
    """Send `count` random events to a core."""
    session = Session(chance)
    for number in range(count):
        event = session.step()
        try:
            event()
            if number % VALIDATE_EVERY == 0:
                check_state(session.core.state)
        except Exception as error:
            said = [cell.cell_contents for cell in event.__closure__ or ()]
            error.add_note(f"event {number}: {str(said)[:1500]}")
            raise
        if session.core.state.end_reason:
            session = Session(chance)
