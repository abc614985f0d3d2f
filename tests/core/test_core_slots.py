"""A context whose libraries say themselves how many calls they run at once (`slots="auto"`)."""

from __future__ import annotations

from collections.abc import Callable

from core.builders import Cluster, devices, recipe

from stoker.manager.core import outlook
from stoker.manager.core.events import AdviceArrived, ContextAdvice, CostAdvice, OfContext, RecordLoad
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot, wire
from stoker.protocol.show_status import render

Make = Callable[..., Cluster]


def ready(c: Cluster, slots: int, *, pilot: str = "p1") -> Cluster:
    """The library that this pilot was told to start holds its context, and says how many calls it runs at once."""
    start = c.hears(pilot, to_pilot.StartLibrary)
    return c.report(pilot, say.LibraryReady(start.library, 0.1, 1.0, 10**9, 10**9, slots=slots))


def says_hello(c: Cluster, facts: say.LibraryFacts) -> None:
    """The pilot `p1` is here with this library, and is welcome."""
    hello = say.PilotHello(wire.VERSION, c.core.state.session, "host-p1", 7, devices(1), libraries=(facts,))
    c.report("p1", hello, numbered=False).hears("p1", to_pilot.PilotWelcome)


def test_library_gets_as_many_calls_as_it_has_slots(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", slots=0)).calls(5, context="a")
    assert c.library(context="a").slots == 1
    ready(c, 3)
    assert c.runs("p1") == ["1", "2", "3"]
    assert (c.library(context="a").slots, c.context("a").slots) == (3, 3)
    assert list(c.context("a").idle) == []
    c.end("1", "2", "3", run_s=50.0)
    assert c.runs("p1") == ["4", "5"]
    assert list(c.context("a").idle) == [1]  # one of its slots is free
    assert [x.slots for x in c.others if isinstance(x, RecordLoad)] == [3]


def test_status_and_explain_tell_how_many_slots_are_taken(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", slots=0)).calls(3, context="a")
    ready(c, 32)
    assert "a (3 of 32 slots)" in "\n".join(render(c.status()))
    (library,) = c.status().libraries
    assert (library.running, library.slots) == (3, 32)
    story = c.story("lib-1")
    assert "3 of 32 slots taken" in story
    assert "runs 32 calls at once" in story


def test_library_without_slots_runs_one_call_at_a_time(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", slots=0)).calls(2, context="a").ready()
    assert c.runs("p1") == ["1"]
    assert "slots" not in "\n".join(render(c.status()))


def test_known_slots_limit_the_libraries_loaded(cluster: Make) -> None:
    c = cluster(pilots=4).define(recipe("a", slots=0)).call("first", context="a")
    ready(c, 8)
    c.end("first", run_s=100.0).calls(20, context="a")
    assert len(c.lives_on("a")) == 3  # 8 run, and 12 are left for libraries of 8


def test_forecasts_count_on_what_the_last_library_has_said(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", slots=0)).call("first", context="a")
    ready(c, 4)
    c.end("first", run_s=100.0).lose("p1").calls(8, context="a")
    c.join("p2", of=devices(1, kind="A10"))
    c.lose("p2")
    assert outlook.context_outlook_s(c.core.state, c.context("a")) >= 8 / 4 * 100.0
    assert outlook.context_outlook_s(c.core.state, c.context("a")) < 8 * 100.0


def test_measured_slots_count_until_a_library_reports_them(cluster: Make) -> None:
    c = cluster(pilots=4).define(recipe("a", slots=0), recipe("b", slots=2))
    for name in ("a", "b"):
        c.event(
            AdviceArrived(
                OfContext(name),
                CostAdvice({"cpu": ContextAdvice(load_s=1.0, slots=16), "a10": ContextAdvice(slots=20)}),
            )
        )  # type: ignore[arg-type]
    assert (c.context("a").slots, c.context("b").slots) == (16, 2)
    c.calls(16, context="a")
    assert len(c.lives_on("a")) == 1
    ready(c, 6, pilot=c.lives_on("a")[0])
    c.event(AdviceArrived(OfContext("a"), CostAdvice({"cpu": ContextAdvice(slots=16)})))  # type: ignore[arg-type]
    assert c.context("a").slots == 6


def test_returning_pilot_reports_slots_again(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", slots=0)).calls(6, context="a")
    start = c.hears("p1", to_pilot.StartLibrary)
    c.cut("p1")
    facts = say.LibraryFacts(start.library, "a", start.devices, True, slots=4)  # type: ignore[arg-type]
    says_hello(c, facts)
    assert c.library(context="a").slots == 4
    assert c.runs("p1") == ["1", "2", "3", "4"]


def test_a_library_that_is_adopted_has_the_slots_that_its_pilot_tells(cluster: Make) -> None:
    c = cluster().define(recipe("a", slots=0))
    facts = say.LibraryFacts(7, "a", ("cpu:0",), True, slots=2)  # type: ignore[arg-type]
    says_hello(c, facts)
    c.calls(3, context="a")
    assert c.runs("p1") == ["1", "2"]
