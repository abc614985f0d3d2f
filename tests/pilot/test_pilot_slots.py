from __future__ import annotations

import threading
from typing import Any

from core.pilot_shell import GIB, CoreShell
from fake_manager import FakeManager, recipe

from stoker.contexts.inference.adapter import TokenCache
from stoker.contexts.recipe import Needs, Recipe
from stoker.pilot.core import commands
from stoker.pilot.core.events import HelloDue, UnacknowledgedFacts
from stoker.protocol import to_agent
from stoker.protocol import to_manager as told
from stoker.protocol.calls import FailureKind


class Roomy:
    def __init__(self, least: int) -> None:
        self.least = least
        self.asked: list[int] = []

    def slots(self, device_memory_bytes: int) -> int:
        self.asked.append(device_memory_bytes)
        return max(self.least, device_memory_bytes // 100_000_000)


class Wrong:
    def slots(self, device_memory_bytes: int) -> Any:
        return "many" if not device_memory_bytes else 0


class Cached:
    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def token_cache(self) -> Any:
        return self.cache


class Growing(Cached):
    def resize(self, *, device_memory_bytes: int) -> None:
        pass


def _load(context: Any) -> Any:
    return context


def _load_with_meeting(context: Any) -> Any:
    context.meeting = threading.Barrier(8)
    return context


def _meet(context: Any, number: int) -> tuple[int, str]:
    context.meeting.wait(60)
    return number, threading.current_thread().name


def test_context_that_reports_slots_runs_calls_concurrently(served: FakeManager) -> None:
    assert served.ready(recipe(_load_with_meeting, Roomy(8), slots=0)).slots == 8
    found = served.results(served.run(_meet, [(n,) for n in range(8)], takes_context=True), wait_s=90)
    assert [number for number, _ in found] == list(range(8)), "none begins after another has ended"
    assert len({thread for _, thread in found}) == 8


def test_context_is_asked_for_slots_once_unless_its_recipe_declares_them(served: FakeManager) -> None:
    needs = Needs(memory_bytes=500_000_000)
    cases = ((0, 5, [500_000_000]), (1, 0, []))
    for library, (declared, slots, expected) in enumerate(cases, start=1):
        made = recipe(_load, Roomy(1), slots=declared, needs=needs)
        assert served.ready(made, library=library, device_memory_bytes=500_000_000).slots == slots
        asked = served.run(lambda context: context.asked, [()], library=library, takes_context=True)
        assert served.results(asked) == [expected]


def test_context_for_one_call_at_a_time_is_served_by_the_main_thread(served: FakeManager) -> None:
    for library, context in enumerate((Roomy(1), {"slots": 9}, None), start=1):
        assert served.ready(recipe(_load, context, slots=0), library=library).slots == 1
        (name,) = served.results(served.run(lambda: threading.current_thread().name, [()], library=library))
        assert name == "MainThread"


def test_invalid_answers_of_a_context_are_failed_loads(served: FakeManager) -> None:
    cases = (
        (Wrong(), ("slots(0) of the context test-", "returned 'many': it must be a whole number of calls")),
        (Cached(TokenCache(GIB, 1000)), ("token_cache() of the context test-", "tokens the size of its cache")),
    )
    for library, (context, words) in enumerate(cases, start=1):
        served.start(recipe(_load, context, slots=0), library=library)
        failure = served.gone(library).failure
        assert failure.kind is FailureKind.CONTEXT
        assert all(each in failure.message for each in words)


def test_context_reports_its_memory_per_cached_token(served: FakeManager) -> None:
    cache = TokenCache(weights_bytes=GIB, token_bytes=1000, tokens=64)
    fixed = TokenCache(GIB, 1000, 64, is_fixed=True)
    cases = ((Growing(cache), cache), (Cached(cache), fixed), (Cached({"of": "its own"}), None), ({}, None))
    for library, (context, expected) in enumerate(cases, start=1):
        assert served.ready(recipe(_load, context), library=library).cache == expected


def test_pilot_reports_slots_of_a_library_when_ready_and_in_hellos() -> None:
    pilot = CoreShell().join().forget()
    pilot.start(1, Recipe(key="k", name="model", slots=0, needs=Needs(device_memory_bytes=8 * GIB)),
                device_memory_bytes=9 * GIB)  # fmt: skip
    assert pilot.take(commands.StartProcess).device_memory_bytes == 9 * GIB
    cache = TokenCache(GIB, 1000, 64)
    pilot.say(1, to_agent.Hello(1, 1001), to_agent.Loaded(1.0, GIB, GIB, slots=12, cache=cache))
    ready = pilot.take(told.LibraryReady)
    assert (ready.slots, ready.cache) == (12, cache)
    pilot.give(HelloDue(UnacknowledgedFacts(), 0, ()))
    [library] = pilot.take(commands.Greet).hello.libraries
    assert (library.slots, library.cache) == (12, cache)


def test_reservation_beyond_the_recipe_sets_no_memory_limit() -> None:
    pilot = CoreShell().join().forget()
    pilot.start(1, Recipe(key="k", name="model", slots=0), device_memory_bytes=20 * GIB)
    assert pilot.take(commands.StartProcess).device_memory_bytes == 0
