"""Facts that peers tell are checked where they come in: what cannot be is refused in words, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from core.builders import SESSION, Cluster, recipe

from stoker.contexts.recipe import BARE, Needs, ObjectRef, Recipe
from stoker.manager.protocol import to_client, to_pilot, wire
from stoker.manager.protocol import to_manager as say
from stoker.manager.protocol.blocks import BlockPhase
from stoker.manager.protocol.bounds import wrong_with
from stoker.manager.protocol.calls import CallEnd, CallOptions, CallProgress, CallSpec, FailureKind, Features, Objective

Make = Callable[..., Cluster]
BAD_TIMES = (math.nan, math.inf, -math.inf, -1.0, 1e11)
BAD_SIZES = (-1, 1 << 61)


def device(**facts: Any) -> say.DeviceFacts:
    return say.DeviceFacts(**{"device": "cpu:0", "kind": "cpu", "memory_bytes": 8 * 10**9, **facts})


def hello(*devices: say.DeviceFacts, **more: Any) -> say.PilotHello:
    return say.PilotHello(wire.VERSION, SESSION, "host", 7, devices or (device(),), **more)


def submit(*, features: Features | None = None, payload: Any = b"", call: int = 1, **options: Any) -> say.Submit:
    return say.Submit("f", "bare", [CallSpec(call, payload, features)], CallOptions(**options))  # type: ignore[arg-type]


def facts(**more: Any) -> say.LibraryFacts:
    return say.LibraryFacts(**{"library": 1, "recipe": "bare", "devices": ("cpu:0",), "ready": True, **more})


WRONG: list[Any] = [
    *(say.DefineRecipe(Recipe("k", "k", **bad)) for bad in ({"slots": 0}, {"slots": -3}, {"calls_per_library": -1})),
    say.DefineRecipe(Recipe("", "k")),
    *(say.DefineRecipe(Recipe("k", "k", needs=Needs(devices=count))) for count in (0, -1, 1 << 40)),
    *(say.DefineRecipe(Recipe("k", "k", needs=Needs(**{name: size}))) for size in BAD_SIZES
      for name in ("memory_bytes", "device_memory_bytes", "disk_bytes")),
    *(say.DefineRecipe(Recipe("k", "k", needs=Needs(load_limit_s=time))) for time in BAD_TIMES),
    say.DefineRecipe(Recipe("k", "k", objects=(ObjectRef("o", -1),))),
    *(submit(gang=gang) for gang in ((0, 1), (2, 1), (-1, -1), (1, 1 << 30))),
    *(submit(limit_s=time) for time in BAD_TIMES),
    *(submit(objective=Objective(**{name: time})) for time in BAD_TIMES for name in ("latency_s", "ttft_s", "tpot_s")),
    *(submit(objective=Objective(deadline_at=time)) for time in (math.nan, math.inf, -math.inf)),
    *(submit(features=Features(**{name: -1})) for name in ("items", "input_length", "expected_output")),
    *(submit(features=Features(fixed_s=time)) for time in BAD_TIMES),
    submit(payload=ObjectRef("o", -1)), submit(call=-1), submit(priority=1 << 62),
    say.ClientHello(wire.VERSION, SESSION, -1), say.ClientHello(wire.VERSION, SESSION, acknowledged=1 << 62),
    say.ClientHello(wire.VERSION, SESSION, number=1 << 40), say.Received(-1), say.AskCalls(-1),
    *(say.BlockNews("b1", BlockPhase.PENDING, expected_in_s=time) for time in BAD_TIMES),  # type: ignore[arg-type]
    hello(device(), device()), hello(libraries=(facts(), facts())), hello(last_library=1 << 62), hello(acknowledged=-1),
    *(hello(device(memory_bytes=size)) for size in BAD_SIZES),
    *(hello(device(speed=speed)) for speed in (0.0, -1.0, math.nan, math.inf)),
    hello(recipes=(Recipe("k", "k", slots=0),)),
    hello(device(cores=-1)), hello(libraries=(facts(library=1 << 62),)), hello(libraries=(facts(reserved_bytes=-1),)),
    hello(libraries=(facts(calls=(-1,)),)), hello(libraries=(facts(calls=(4, 4)),)),
    *(hello(ends_in_s=time) for time in BAD_TIMES),
    *(say.LibraryReady(1, **{"start_s": 0.0, "load_s": 0.0, name: time}) for time in BAD_TIMES  # type: ignore[arg-type]
      for name in ("start_s", "load_s", "fetch_s")),
    *(say.LibraryReady(1, 0.0, 0.0, **{name: size}) for size in BAD_SIZES  # type: ignore[arg-type]
      for name in ("resident_bytes", "peak_bytes", "device_bytes")),
    *(say.CallsEnded(1, [CallEnd(1, True, b"", time)]) for time in BAD_TIMES),  # type: ignore[arg-type]
    say.CallsEnded(1, [CallEnd(1, True, ObjectRef("o", -1))]),  # type: ignore[arg-type]
    say.LibraryResized(1, -1), say.Heartbeat(cache_bytes=-1), say.Heartbeat(refused_frames=-1),  # type: ignore[arg-type]
    say.Heartbeat((say.LibraryUse(1, -1),)), say.Heartbeat((say.LibraryUse(1, 1, 1, math.nan),)),  # type: ignore[arg-type]
    say.WantObjects((ObjectRef("o", -1),)), say.ObjectsHere((say.ObjectArrival("o", 1, seconds=math.nan),)),
    say.ObjectsHere((say.ObjectArrival("o", 1, origin_bytes=-1),)),
    *(say.WalltimeNews(time) for time in BAD_TIMES),
    say.SnapshotHere("k", "form", ObjectRef("o", 1), made_s=math.nan),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize("message", WRONG, ids=lambda m: type(m).__name__)
def test_what_cannot_be_is_told_in_words(message: Any) -> None:
    assert wrong_with(message)


@pytest.mark.parametrize("message", [say.DefineRecipe(BARE), submit(), hello(), hello(libraries=(facts(),))])
def test_what_can_be_is_not(message: Any) -> None:
    assert not wrong_with(message)


def test_a_recipe_that_cannot_be_is_refused_and_its_calls_fail(cluster: Make) -> None:
    c = cluster(pilots=1)
    c.tell("ana", say.DefineRecipe(Recipe("k", "k", b"loader", slots=0)))
    assert c.hears("ana", to_client.Rejected).reason == "recipe k: slots is 0: it has to be 1 to 100000"
    assert "k" not in c.core.state.contexts
    c.call("c1", context="k")
    assert c.ended["c1"].failure is not None
    assert c.refused["message of a client with a value that cannot be"] == 1


def test_calls_with_options_that_cannot_be_fail_with_what_is_wrong(cluster: Make) -> None:
    c = cluster(pilots=1).call("c1", limit_s=math.nan)
    failure = c.ended["c1"].failure
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.CANCELLED, "limit_s is nan: it has to be 0 to 1e+10 s")
    c.call("c2").ready().end("c2")
    assert c.ended["c2"].ok


def test_a_pilot_that_says_what_cannot_be_is_refused_and_its_calls_run_elsewhere(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("c1", context="a").forget()
    library = c.library(context="a")
    c.report("p1", say.LibraryReady(library.id, math.nan, 1.0))
    assert "start_s is nan" in c.hears("p1", to_pilot.PilotRefused).reason
    assert c.waiting("a") == ["c1"]
    c.join("p2").ready(only="p2").end("c1")
    assert c.ended["c1"].ok


def test_a_hello_that_cannot_be_is_refused(cluster: Make) -> None:
    c = cluster()
    c.report("p1", hello(device(), device()), numbered=False)
    assert "twice" in c.hears("p1", to_pilot.PilotRefused).reason
    c.tell("bob", say.ClientHello(wire.VERSION, SESSION, -1), numbered=False)
    assert "received is -1" in c.hears("bob", to_client.ClientRefused).reason
    assert list(c.core.state.clients) == ["ana"]
    assert not c.core.state.pilots


def test_a_report_that_cannot_be_costs_only_itself(cluster: Make) -> None:
    """It is the user's code that says how far it is."""
    c = cluster(pilots=1).call("c1").ready()
    c.report("p1", say.CallsProgress(c.library().id, [CallProgress(c.ids["c1"], math.nan, 10.0)]))  # type: ignore[arg-type]
    assert not c.core.state.reports
    assert c.held() == ["c1"]
