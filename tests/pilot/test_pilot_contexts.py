"""What a context may report and do: slots, caches, batches, sleep."""

from __future__ import annotations

import threading
import types
from types import SimpleNamespace
from typing import Any

import pytest
from core.pilot_shell import GIB, CoreShell
from fake_manager import FakeManager, recipe

from stoker.contexts.inference.adapter import EngineLoad, TokenCache
from stoker.contexts.recipe import Needs, Recipe
from stoker.contexts.step_times import StepSample, StepTimes, group_samples
from stoker.pilot.core import commands
from stoker.pilot.core.events import HelloDue, UnacknowledgedFacts
from stoker.pilot.library.connection import BatchReports, LibrarySettings
from stoker.pilot.library.main import can_sleep, sleep_or_wake_context
from stoker.protocol import to_agent
from stoker.protocol import to_manager as told
from stoker.protocol.calls import FailureKind
from stoker.protocol.to_agent import BatchReport, SleepFailed, Slept, Woke
from stoker.protocol.to_library import Sleep, Wake
from stoker.protocol.to_manager import LibraryEngineReport


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


def test_context_is_asked_once_for_slots_if_none_are_declared(served: FakeManager) -> None:
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
        (Wrong(), ("slots(0) of the context test-", "returned 'many': it must be a whole number of concurrent calls")),
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
    [library] = pilot.take(commands.SendHello).hello.libraries
    assert (library.slots, library.cache) == (12, cache)


def test_context_without_declared_memory_has_no_memory_limit() -> None:
    pilot = CoreShell().join().forget()
    pilot.start(1, Recipe(key="k", name="model", slots=0), device_memory_bytes=20 * GIB)
    assert pilot.take(commands.StartProcess).device_memory_bytes == 0


# ---- reports of the batch

TIMES = group_samples([StepSample(False, 4, 64, 0.1)])


class Model:
    def __init__(self) -> None:
        self.load = EngineLoad(running=1, steps=1)
        self.fresh = TIMES
        self.urgent = False

    def batch_load(self) -> EngineLoad:
        return self.load

    def take_step_times(self, *, urgent: bool = False) -> StepTimes:
        if urgent and not self.urgent:
            return StepTimes()
        found, self.fresh, self.urgent = self.fresh, StepTimes(), False
        return found


def test_engine_load_is_reported_at_a_limited_rate_unless_urgent() -> None:
    model, said = Model(), list[BatchReport]()
    reports = BatchReports(model, send_report=said.append)

    def at(now: float) -> list[BatchReport]:
        said.clear()
        reports.send_if_due(now)
        return list(said)

    assert at(0.0) == [BatchReport(model.load, TIMES)]
    model.load = EngineLoad(running=2, steps=7)
    assert at(9.0) == []
    assert at(10.0) == [BatchReport(model.load)]
    assert at(20.0) == [], "no change since the last report"
    model.urgent, model.fresh = True, TIMES
    assert at(21.0) == [BatchReport(model.load, TIMES)], "a profile is urgent"
    model.load = EngineLoad(running=2, cache_tokens=100, peak_tokens=100)
    assert at(22.0) == []
    model.load = EngineLoad(running=2, cache_tokens=100, peak_tokens=101)
    assert at(23.0) == [BatchReport(model.load)], "the cache will be too small"
    assert at(24.0) == []


@pytest.mark.parametrize(("load", "reported"), [(EngineLoad(running=1), True), (0.5, False)])
def test_context_may_report_load_without_step_times_but_no_other_type(load: object, reported: bool) -> None:
    said = list[BatchReport]()
    BatchReports(SimpleNamespace(batch_load=lambda: load), send_report=said.append).send_if_due(0.0)
    assert said == ([BatchReport(load)] if reported else [])  # type: ignore[arg-type]


def test_manager_receives_the_engine_load_of_a_real_library(served: FakeManager) -> None:
    def load() -> Any:
        from stoker.contexts.inference.adapter import EngineLoad as Load

        class Context:
            def batch_load(self) -> Load:
                return Load(running=5, rows=8)

        return Context()

    served.ready(recipe(load))
    assert served.wait_for(LibraryEngineReport).load == EngineLoad(running=5, rows=8)


# ---- sleep

MIB = 1 << 20


class Both:
    def sleep(self) -> None: ...

    def wake(self, soon: bool = True) -> None: ...


class OnlySleep:
    def sleep(self) -> None: ...


class Wants(Both):
    def wake(self, device: str) -> None: ...  # type: ignore[override]


class Later(Both):
    async def wake(self, soon: bool = True) -> None: ...  # type: ignore[override]


class Proxy:
    def __getattr__(self, name: str) -> Any:
        return lambda: name


@pytest.mark.parametrize(
    ("context", "can"),
    [
        (Both(), True), (OnlySleep(), False), (Wants(), False), (Later(), False), (Proxy(), False), (None, False),
        (types.SimpleNamespace(sleep=print, wake=print), False), ({"sleep": 1, "wake": 2}, False),
    ],
)  # fmt: skip
def test_context_sleeps_if_its_class_supports_sleep(context: Any, can: bool) -> None:
    assert can_sleep(context) is can


class Cache:
    def __init__(self) -> None:
        self.data = b"\1" * (64 * MIB)
        self.bad = ""

    def sleep(self) -> None:
        self.data = b""
        if self.bad:
            raise OSError(self.bad)

    def wake(self) -> None:
        self.data = b"\1" * (64 * MIB)
        if self.bad:
            raise SystemExit(self.bad)


def move(order: Any, context: Any) -> Any:
    settings = LibrarySettings(pilot="p1", library=7, folder="/nowhere", log="/logs/lib-7.log", objects="/nowhere")
    return sleep_or_wake_context(order, context=context, name="cache", devices=("cpu:0",), settings=settings)


def test_sleep_and_wake_times_are_measured() -> None:
    context = Cache()
    asleep = move(Sleep(), context)
    assert isinstance(asleep, Slept)
    assert (asleep.more_bytes, asleep.device_bytes) == (0, 0)
    awake = move(Wake(), context)
    assert isinstance(awake, Woke)
    again = move(Sleep(), context)
    assert isinstance(again, Slept)
    assert abs(again.resident_bytes - asleep.resident_bytes) < 32 * MIB, "the cache is gone from this process"


@pytest.mark.parametrize("method", ["sleep", "wake"])
def test_exception_of_a_context_is_reported(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    context = Cache()
    context.bad = "no memory"
    failed = move(Sleep() if method == "sleep" else Wake(), context)
    assert isinstance(failed, SleepFailed)
    error = {"sleep": "OSError", "wake": "SystemExit"}[method]
    assert failed.failure.message == f"{method}() of the context cache raised {error}: no memory"
    assert (failed.failure.kind, failed.failure.library) == (FailureKind.CONTEXT, 7)
    assert "no memory" in failed.failure.tail
    assert f"in {method}\n" in capfd.readouterr().err
