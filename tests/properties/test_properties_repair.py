"""If a manager restarts with a shorter journal, pilots and client repeat their state, and every call ends once."""

from __future__ import annotations

from typing import Any

import msgspec
from core.desk import SESSION
from core.toy import Toy
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from properties.test_properties_core import Pilots

from stoker.contexts.recipe import BARE
from stoker.manager.core.events import Command, FromClient, ManagerRestarted, ToClient
from stoker.manager.core.reactor import Core
from stoker.manager.sim.validate import check_state
from stoker.protocol import to_client, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.ids import ClientId

ANA = ClientId("ana")
CONTEXTS = ("bare", "a", "b", "c", "d")


class Forgetful(Toy):
    """A toy cluster whose manager may lose the last part of its journal."""

    def __init__(self) -> None:
        self.submits: list[say.Submit] = []
        self.recipes = [BARE]
        self.received = 0
        self.sequence = 0
        super().__init__(validates=False)

    # ---- the client keeps its open calls
    def tell(self, *messages: Any, numbered: bool = True) -> Toy:
        self.submits += [message for message in messages if isinstance(message, say.Submit)]
        self.recipes += [message.recipe for message in messages if isinstance(message, say.DefineRecipe)]
        self.sequence = getattr(self, "sequence", 0) + numbered
        self._carry_out(self.give(FromClient("ana", self.sequence if numbered else 0, list(messages))))
        return self

    def _carry_out(self, commands: list[Command]) -> None:
        rest, again = [], False
        for command in commands:
            if isinstance(command, ToClient) and isinstance(command.message, to_client.Results):
                self._results(command.message)
                continue
            if isinstance(command, ToClient) and isinstance(command.message, to_client.ClientWelcome):
                again = command.message.again
            rest.append(command)
        super()._carry_out(rest)
        if again:
            self.submit_again()

    def _results(self, message: to_client.Results) -> None:
        assert message.first <= self.received, "results were skipped"
        for end in message.ends[self.received - message.first :]:
            self.received += 1
            self.ended.setdefault(self.names[end.call], end)  # keep the first end: a client drops repeated ends

    def submit_again(self) -> None:
        messages: list[Any] = [say.DefineRecipe(recipe) for recipe in {r.key: r for r in self.recipes}.values()]
        messages.append(say.DefineFunction("f", "f", b"code"))
        submits, self.submits = self.submits, []
        for submit in submits:
            open_calls = [spec for spec in submit.calls if self.names[spec.call] not in self.ended]
            if open_calls:
                messages.append(msgspec.structs.replace(submit, calls=open_calls))
        self.recipes = [BARE]
        self.tell(*messages, say.Resubmitted())

    # ---- the loss
    def lose(self, keep: float) -> None:
        """Restart the manager with this share of its journal."""
        kept = int(len(self.past) * keep)
        self.past, self.did = self.past[:kept], self.did[: kept + 1]
        self.policies = self._make()
        self.core = Core(SESSION, self.policies, strict=True)
        self.core.start()
        for now, event in self.past:
            self.core.handle(event, now)
        for key, at in self.core.state.timers.items():
            self.after(at - self.now, lambda key=key, at=at: self._timer(key, at))
        for name, pilot in self.pilots.items():
            self.links[name] = 0
            if pilot.alive:
                self.after(0.1, lambda pilot=pilot: self._connect(pilot))
            else:
                self.after(20.0, lambda name=name: self.kill(name))
        self._event(ManagerRestarted())
        self.after(0.05 if keep > 0.5 else 0.2, self._come_back)
        check_state(self.core.state)

    def _come_back(self) -> None:
        hello = say.ClientHello(wire.VERSION, SESSION, self.received, acknowledged=self.sequence, number=0)
        self.tell(hello, numbered=False)


class Losing(Pilots):
    def __init__(self) -> None:
        super().__init__()
        self.toy: Forgetful = Forgetful()
        self.toy.context("a", load_s=0.5, memory="3 GB")
        self.toy.context("b", load_s=0.5, memory="5 GB", slots=3)
        for name in ("c", "d"):  # a device holds both contexts only if one of them sleeps
            self.toy.context(name, load_s=1.0, memory="1 GB", declares="6 GB", sleeps=True)
        self.count = 0

    @rule(context=st.sampled_from(CONTEXTS), count=st.integers(1, 12), run_s=st.sampled_from((0.001, 0.3, 2.0)))
    def submit(self, context: str, count: int, run_s: float) -> None:
        client = self.toy.core.state.clients.get(ANA)
        if client is not None and client.connected:
            self.toy.call(*(f"c{self.count + n + 1}" for n in range(count)), context=context, run_s=run_s)
            self.count += count

    @rule(keep=st.sampled_from((0.0, 0.1, 0.5, 0.8, 0.95, 1.0)))
    def the_journal_loses_its_end(self, keep: float) -> None:
        self.toy.lose(keep)
        self.toy.run(until=self.toy.now + 0.4)

    def teardown(self) -> None:
        self.toy.run(until=self.toy.now + 60.0)
        self.toy.pilot("last", devices=2)
        self.toy.run(limit_s=5000)
        assert set(self.toy.ended) == set(self.toy.ids)
        assert all(end.ok or _is_blamed(end.failure) for end in self.toy.ended.values())
        self.toy.check()


def _is_blamed(failure: Failure) -> bool:
    """True if the call failed because pilots were lost during the call or the load of its context."""
    if failure.kind is FailureKind.CONTEXT:
        return "could not be loaded: its pilot died" in failure.message
    return failure.kind is FailureKind.POISON


class Picks:
    """A random source that always picks one pilot."""

    def __init__(self, pilot: str) -> None:
        self.pilot = pilot

    def choice(self, _names: list[str]) -> str:
        return self.pilot


def test_orders_that_free_memory_are_repeated_first() -> None:
    losing = Losing()
    losing.pilot_joins(devices=2, block="")
    losing.pilot_joins(devices=2, block="")
    losing.submit(context="c", count=9, run_s=2.0)
    for _ in range(3):
        losing.the_journal_loses_its_end(keep=0.0)
    losing.submit(context="a", count=1, run_s=0.001)
    losing.wait(seconds=5.0)
    losing.submit(context="c", count=1, run_s=0.001)
    losing.pilot_dies(chance=Picks("p1"))  # a library of `c` will wake in memory of a library of `a`
    losing.the_journal_loses_its_end(keep=1.0)
    losing.teardown()


TestLosing = Losing.TestCase
TestLosing.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
