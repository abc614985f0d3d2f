from __future__ import annotations

import types
from typing import Any

import pytest

from stoker.pilot.library.connection import Settings
from stoker.pilot.library.sleeper import Sleeper, can_sleep
from stoker.protocol.calls import FailureKind
from stoker.protocol.to_agent import SleepFailed, Slept, Woke

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


def sleeper_of(context: Any) -> Sleeper:
    settings = Settings(pilot="p1", library=7, folder="/nowhere", log="/logs/lib-7.log", objects="/nowhere")
    return Sleeper(context, name="cache", devices=("cpu:0",), settings=settings)


def test_sleep_and_wake_times_are_measured() -> None:
    sleeper = sleeper_of(Cache())
    asleep = sleeper.sleep()
    assert isinstance(asleep, Slept)
    assert (asleep.more_bytes, asleep.device_bytes) == (0, 0)
    awake = sleeper.wake()
    assert isinstance(awake, Woke)
    again = sleeper.sleep()
    assert isinstance(again, Slept)
    assert abs(again.resident_bytes - asleep.resident_bytes) < 32 * MIB, "the cache is gone from this process"


@pytest.mark.parametrize("method", ["sleep", "wake"])
def test_exception_of_a_context_is_reported(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    context = Cache()
    context.bad = "no memory"
    failed = getattr(sleeper_of(context), method)()
    assert isinstance(failed, SleepFailed)
    error = {"sleep": "OSError", "wake": "SystemExit"}[method]
    assert failed.failure.message == f"{method}() of the context cache raised {error}: no memory"
    assert (failed.failure.kind, failed.failure.library) == (FailureKind.CONTEXT, 7)
    assert "no memory" in failed.failure.tail
    assert f"in {method}\n" in capfd.readouterr().err
