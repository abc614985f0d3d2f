"""Test `slinfer` with models that report their memory per cached token only after a load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core.builders import devices, recipe
from policies.slinfer_lab import GB, SlinferLab

from stoker.contexts.inference.adapter import TokenCache
from stoker.contexts.recipe import Needs
from stoker.manager.core.story import tell_story
from stoker.pilot.core.memory import token_cache
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot
from stoker.protocol.calls import Features, Objective

SOON = Objective(ttft_s=10.0, tpot_s=1.0)
CACHE = TokenCache(weights_bytes=4 * GB, token_bytes=1_000_000, tokens=1000)
FIXED = TokenCache(weights_bytes=4 * GB, token_bytes=1_000_000, tokens=1000, is_fixed=True)


class Lab(SlinferLab):
    """A cluster with a device of 20 GB, and models without a declared cache, for example GGUF files."""

    def __init__(self) -> None:
        super().__init__()
        self.pilot_of("p1", "gpu")

    def models(self, *names: str, **needs: Any) -> Lab:
        self.define(*(recipe(name, slots=64, **needs) for name in names))
        return self

    def ask(self, *names: str, context: str = "a", tokens: int = 200) -> Lab:
        self.call(*names, context=context, features=Features(1, tokens - 100, 100, 0.0), objective=SOON)
        self.wait(0.2)  # the request for step times gets no answer in this time
        return self

    def loads(self, cache: TokenCache | None = CACHE, *, pilot: str = "p1", measured: float = 3.0) -> float:
        """Carry out the ordered loads; return the reserved gigabytes."""
        start = self.hears(pilot, to_pilot.StartLibrary)
        size = int(measured * GB)
        self.report(pilot, say.LibraryReady(start.library, 0.1, 1.0, size, size, size, slots=64, cache=cache))
        return start.device_memory_bytes / GB

    def promised(self, context: str = "a") -> list[float]:
        return [library.promised_bytes / GB for library in self.context(context).libraries.values()]


@pytest.fixture
def lab() -> Lab:
    return Lab().models("a", "b")


def test_first_load_reserves_the_default_memory(lab: Lab) -> None:
    assert lab.ask("x").loads() == pytest.approx(20 - 0.256)  # a small part stays free for calls without a context
    assert lab.offered() == ("x", pytest.approx(4 + 1 * 1.25))  # a cache of 1,000 tokens plus a quarter
    assert lab.promised() == [pytest.approx(5.25)]


def test_measured_weights_count_if_they_are_larger(lab: Lab) -> None:
    lab.ask("x").loads(measured=6.0)
    assert lab.offered() == ("x", pytest.approx(6 + 1 * 1.25))


def test_memory_measurements_are_separate_for_each_device_kind(lab: Lab) -> None:
    lab.ask("x").loads()
    lab.offered()
    lab.join("p2", of=devices(1, memory="9 GB")).ask("y")
    lab.offered()
    [library] = lab.holders("y")
    lab.report("p1", say.CallsReturned(library.id, (lab.ids["y"],), refused="late"))
    assert lab.loads(pilot="p2") == 9.0
    assert lab.offered("p2")[0] == "y"


def test_calls_are_limited_to_the_size_of_a_fixed_cache(lab: Lab) -> None:
    lab.ask("1", tokens=600).loads(FIXED, measured=10.0)
    assert lab.offered() == ("1", 0.0)
    assert lab.promised() == [pytest.approx(11.0)]  # the reservation is the measured size, as in the default policy
    lab.ask("2", tokens=500)
    lab.wait(1.0)
    lab.nothing_else_was_said()  # no library is resized, and no second library starts on the device
    lab.ask("3", tokens=400)
    assert lab.offered() == ("3", 0.0)
    [library] = lab.holders("1")
    lines = [text for _, text in library.notes]
    assert any("its cache of 1,000 tokens cannot be resized" in line for line in lines)
    assert "cannot be resized" in str(tell_story(lab.core.state, f"lib-{library.id}"))


def test_manager_without_its_journal_learns_the_cache_size(lab: Lab) -> None:
    facts = say.LibraryFacts(7, "a", ("cuda:0",), True, reserved_bytes=6 * GB, cache=FIXED)
    old = lab._facts["p1"]
    hello = say.PilotHello(
        old.protocol, old.session, "host-p2", 7, devices(1, kind="gpu", memory="20 GB"), libraries=(facts,),
        recipes=(recipe("a", slots=64),),
    )  # fmt: skip
    lab.report("p2", hello, numbered=False)
    lab.hears("p2", to_pilot.PilotWelcome)
    lab.ask("x")
    assert lab.offered("p2") == ("x", 0.0)


@pytest.mark.parametrize("cache", [TokenCache(-1, 1, 1), TokenCache(1, 0, 1), TokenCache(1, 1, 0, is_fixed=True)])
def test_pilot_that_reports_an_impossible_cache_is_disconnected(lab: Lab, cache: TokenCache) -> None:
    lab.ask("x")
    start = lab.hears("p1", to_pilot.StartLibrary)
    lab.report("p1", say.LibraryReady(start.library, 0.1, 1.0, cache=cache))
    assert "p1" not in lab.core.state.pilots


def test_cache_size_of_a_declared_model_is_known_before_the_load() -> None:
    facts = devices(1, kind="gpu", memory="20 GB")[0]
    cache_of: Callable[[Needs], TokenCache | None] = lambda needs: token_cache(needs, facts, None, measured_bytes=0)  # noqa: E731
    declared = Needs(device_memory_bytes=5 * GB, token_bytes=1_000_000, cache_tokens=1000)
    assert cache_of(declared) == CACHE
    assert cache_of(Needs(token_bytes=1_000_000, cache_tokens=1000)) is None
