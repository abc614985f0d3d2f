"""`slinfer` at the seams: small cases with known answers. The test plays the pilot."""

from __future__ import annotations

from typing import Any

import pytest
from core.builders import Cluster, devices, recipe

from stoker.contexts.step_times import StepSample, times_of
from stoker.manager.core.events import AdviceArrived, AskAdvice, ContextAdvice, CostAdvice
from stoker.manager.policies.provisioning import TakeWhatComes
from stoker.manager.policies.slinfer import slinfer
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot
from stoker.protocol.calls import CallProgress, Features, Objective

GB = 1_000_000_000
SOON = Objective(ttft_s=1.0, tpot_s=0.25)
STEPS = times_of(
    [StepSample(True, 2**power, 2**power / 2, 0.001 * 2**power) for power in range(12)]
    + [StepSample(False, rows, length, 0.05) for rows in (1, 64) for length in (8, 4096)]
)
"""A token that is read takes a millisecond, a step that writes 50."""


class Lab(Cluster):
    """Models `a`, `b`, ... of 4 GB and a cache of a GB for a thousand tokens, and devices by their kind."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(policies=lambda: slinfer(provisioning=TakeWhatComes(), **settings))

    def models(self, *names: str) -> Lab:
        for name in names:
            self.define(
                recipe(name, slots=64, device_memory_bytes=5 * GB, token_bytes=1_000_000, cache_tokens=1000)
            )  # fmt: skip
        return self

    def pilot_of(self, name: str, kind: str, memory: str = "20 GB") -> Lab:
        self.join(name, of=devices(1, kind=kind, memory=memory))
        return self

    def ask(
        self, *names: str, context: str = "a", prompt: int = 100, output: int = 100, objective: Objective = SOON
    ) -> Lab:  # fmt: skip
        """Calls come in series; step times are known on every kind of device."""
        for name in names:
            self.call(
                name, context=context, features=Features(1, prompt, output, 0.0), objective=objective
            )  # fmt: skip
            for command in [each for each in self.others if isinstance(each, AskAdvice)]:
                self.others.remove(command)
                kinds = {kind: ContextAdvice(steps=STEPS) for kind in ("cpu", "gpu")}
                self.event(AdviceArrived(command.about, CostAdvice(kinds)))
        return self

    def started(self, pilot: str) -> tuple[str, float]:
        start = self.hears(pilot, to_pilot.StartLibrary)
        self.report(pilot, say.LibraryReady(start.library, 0.1, 1.0, GB, GB, slots=64))
        return start.recipe.key, start.device_memory_bytes / GB

    def offered(self, pilot: str) -> tuple[str, float]:
        order = self.hears(pilot, to_pilot.RunCalls)
        assert order.offer
        return self.names[order.calls[0].call], order.reserve_bytes / GB

    def refuse(self, pilot: str, name: str, *, required: int = 0) -> Lab:
        [library] = self.holders(name)
        back = say.CallsReturned(library.id, (self.ids[name],), refused="late", required_bytes=required)  # type: ignore[arg-type]
        self.report(pilot, back)
        return self


@pytest.fixture
def lab() -> Lab:
    return Lab().models("a", "b", "c").pilot_of("gpu", "gpu").pilot_of("cpu", "cpu")


def test_the_first_instance_is_loaded_on_a_cpu_and_offered_the_call(lab: Lab) -> None:
    lab.ask("x")
    assert lab.started("cpu") == ("a", 5.25)  # a cache of a GB, and a quarter more
    assert lab.offered("cpu") == ("x", 0.0)
    lab.nothing_else_was_said()


def test_a_cpu_that_reads_too_slowly_is_left_out(lab: Lab) -> None:
    lab.ask("x", prompt=950)  # 1.045 s with a tenth more, and a second is left
    lab.nothing_else_was_said()
    assert lab.wait(1.2).ended["x"].failure.message.startswith("its first token would come more than")  # type: ignore[union-attr]


def test_a_refused_call_goes_to_the_next_then_to_a_new_instance(lab: Lab) -> None:
    lab.ask("x")
    assert lab.started("cpu")[0] == "a"
    assert lab.offered("cpu") == ("x", 0.0)
    lab.refuse("cpu", "x")
    assert lab.started("gpu") == ("a", 5.25)
    assert lab.offered("gpu") == ("x", 0.0)
    lab.ask("y")
    assert lab.offered("cpu") == ("y", 0.0)
    lab.refuse("cpu", "y")
    assert lab.offered("gpu") == ("y", 0.0)


def test_an_offer_carries_step_times_and_the_wait_of_the_call(lab: Lab) -> None:
    lab.ask("x", objective=Objective(ttft_s=60.0))
    start = lab.hears("cpu", to_pilot.StartLibrary)
    assert start.steps == STEPS
    lab.wait(3.0)
    lab.report("cpu", say.LibraryReady(start.library, 0.1, 2.9, GB, GB, slots=64))
    assert lab.hears("cpu", to_pilot.RunCalls).waited_s == 0.0  # it has waited for the load
    lab.wait(0.5)
    lab.ask("y", objective=Objective(ttft_s=60.0))
    assert lab.hears("cpu", to_pilot.RunCalls).waited_s == 0.0
    lab.wait(0.25)
    lab.refuse("cpu", "y")
    lab.hears("gpu", to_pilot.StartLibrary)
    lab.wait(2.0)
    order = lab.hears("cpu", to_pilot.RunCalls)
    assert order.offer
    assert 0.25 < order.waited_s <= 2.5


def test_an_instance_grows_to_the_watermark_for_what_it_is_offered(lab: Lab) -> None:
    lab.ask("1", "2", "3", "4", "5", prompt=100, output=100)
    lab.started("cpu")
    assert [lab.offered("cpu") for _ in range(5)] == [(str(n), 0.0) for n in range(1, 6)]
    lab.ask("6", prompt=200, output=100)
    assert lab.offered("cpu") == ("6", pytest.approx(4 + 1.3 * 1.25))


def test_an_instance_grows_to_what_its_pilot_says(lab: Lab) -> None:
    lab.ask("x")
    lab.started("cpu")
    lab.offered("cpu")
    lab.refuse("cpu", "x", required=6 * GB)
    assert lab.offered("cpu") == ("x", pytest.approx(4 + 2 * 1.25))
    lab.refuse("cpu", "x", required=9 * GB)  # once is enough
    assert lab.started("gpu")[0] == "a"


def test_where_the_device_is_nearly_full_what_is_required_will_do() -> None:
    lab = Lab().models("a").pilot_of("cpu", "cpu", memory="5.5 GB").ask("1", "2", "3", "4", "5")
    assert lab.started("cpu") == ("a", 5.25)
    assert [lab.offered("cpu")[0] for _ in range(5)] == ["1", "2", "3", "4", "5"]
    lab.ask("6", prompt=200, output=200)
    assert lab.offered("cpu") == ("6", 5.5)


def test_the_largest_batch_is_offered_a_call_first(lab: Lab) -> None:
    lab.pilot_of("cpu2", "cpu").ask("x", prompt=10, output=10)
    lab.started("cpu")
    lab.offered("cpu")
    lab.refuse("cpu", "x")
    lab.started("cpu2")
    lab.offered("cpu2")
    lab.ask("y", prompt=10, output=10)
    assert lab.offered("cpu2")[0] == "y"


def neighbours(*, others: int) -> Lab:
    """`a` with two calls and `b` with this number on a device that is full."""
    lab = Lab().models("a", "b").pilot_of("cpu", "cpu", memory="10.6 GB").ask("1", "2", prompt=400, output=100)
    lab.started("cpu")
    lab.forget()
    lab.ask(*(f"b{n}" for n in range(others)), context="b")
    lab.started("cpu")
    lab.forget()
    return lab


def test_a_smaller_neighbour_makes_room_if_its_calls_fit_elsewhere() -> None:
    lab = neighbours(others=1).pilot_of("cpu2", "cpu", memory="6 GB").ask("3", prompt=400, output=100)
    assert lab.hears("cpu", to_pilot.EvictCall).call == lab.ids["b0"]
    assert lab.hears("cpu", to_pilot.StopLibrary).reason == "a grows beside it"
    assert lab.offered("cpu") == ("3", pytest.approx(4 + 1.5 * 1.25))


def test_an_evicted_call_finds_a_place_however_late_it_is() -> None:
    lab = neighbours(others=1).pilot_of("cpu2", "cpu", memory="6 GB").ask("3", prompt=400, output=100)
    victim = lab.hears("cpu", to_pilot.EvictCall)
    evicted = say.CallEvicted(victim.library, CallProgress(victim.call))
    lab.lose("cpu2").report("cpu", evicted).wait(5.0)
    lab.forget()
    lab.pilot_of("cpu3", "cpu", memory="6 GB").wait(0.2)
    assert lab.started("cpu3")[0] == "b"
    assert lab.offered("cpu3")[0] == "b0"


@pytest.mark.parametrize(("others", "elsewhere"), [(1, False), (2, True)])
def test_other_neighbours_stay(others: int, elsewhere: bool) -> None:
    lab = neighbours(others=others)
    if elsewhere:
        lab.pilot_of("cpu2", "cpu", memory="6 GB")
    lab.ask("3", prompt=400, output=100)
    assert [type(message) for message in lab.mail.get("cpu", ())] == []
    if elsewhere:
        assert lab.started("cpu2")[0] == "a"


def test_an_idle_instance_goes_after_a_second(lab: Lab) -> None:
    lab.ask("x")
    lab.started("cpu")
    lab.offered("cpu")
    lab.end("x").wait(0.9).nothing_else_was_said()
    lab.wait(0.3)
    assert lab.hears("cpu", to_pilot.StopLibrary).reason == "it has served nothing for 1 s"


def test_an_idle_instance_makes_room_at_once() -> None:
    lab = Lab().models("a", "b").pilot_of("cpu", "cpu", memory="6 GB").ask("x")
    lab.started("cpu")
    lab.offered("cpu")
    lab.end("x").ask("y", context="b")
    assert lab.hears("cpu", to_pilot.StopLibrary).reason == "b needs the room, and nothing runs here"
    assert lab.started("cpu")[0] == "b"


def test_a_large_cache_shrinks_when_it_is_far_too_large(lab: Lab) -> None:
    lab.ask("1", "2", prompt=2000, output=500, objective=Objective(ttft_s=9.0, tpot_s=0.25))
    assert lab.started("cpu") == ("a", pytest.approx(4 + 2.5 * 1.25))
    assert lab.offered("cpu") == ("1", 0.0)
    assert lab.offered("cpu") == ("2", pytest.approx(4 + 5 * 1.25))
    lab.report("cpu", say.LibraryResized(lab.library("cpu", "a").id, int(10.25 * GB)))
    lab.wait(0.3).nothing_else_was_said()
    lab.end("2").wait(0.3)
    assert lab.hears("cpu", to_pilot.ResizeLibrary).device_memory_bytes == pytest.approx((4 + 2.5 * 1.25) * GB)


def test_a_waiting_call_is_dropped_once_its_first_token_would_be_late() -> None:
    lab = Lab().models("a", "b").pilot_of("cpu", "cpu", memory="6 GB").ask("x").ask("y", context="b")
    lab.started("cpu")
    lab.wait(0.9)
    assert "y" not in lab.ended
    lab.wait(0.3)
    assert not lab.ended["y"].ok
    assert lab.ended["y"].failure.message.startswith("its first token would come more than 0.")  # type: ignore[union-attr]


def test_a_model_that_fits_nowhere_is_told() -> None:
    lab = Lab().pilot_of("cpu", "cpu", memory="2 GB").models("a").ask("x")
    assert "no device" in lab.ended["x"].failure.message or "GB" in lab.ended["x"].failure.message  # type: ignore[union-attr]


def test_a_gang_of_a_language_model_is_refused(lab: Lab) -> None:
    lab.call("x", context="a", gang=(2, 2))
    assert "leave its gang away" in lab.ended["x"].failure.message  # type: ignore[union-attr]


def test_a_context_without_a_cache_is_served_as_by_default(lab: Lab) -> None:
    lab.define(recipe("plain", memory="1 GB")).call("x", context="plain")
    assert lab.mail["gpu"] or lab.mail["cpu"]
