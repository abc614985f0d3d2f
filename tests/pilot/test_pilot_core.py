from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.contexts.recipe import BARE, Recipe
from stoker.pilot.core import commands
from stoker.pilot.core import running as running_calls
from stoker.pilot.core.events import FromManager, HelloDue, LibraryPrepared, UnacknowledgedFacts
from stoker.pilot.core.objects import CachedObject, Shortage, choose_evictions, encode_as_file_name
from stoker.pilot.core.reactor import EventQueue, PilotCore
from stoker.pilot.core.state import Ledger, PilotFacts, PilotLibrary, Timers
from stoker.protocol.to_manager import DeviceFacts
from stoker.protocol.to_pilot import StartLibrary


@pytest.mark.parametrize(
    ("library", "devices", "size"),
    [
        (1, ("cuda:0",), 10),  # library 1 already has a reservation
        (2, (), 10),
        (2, ("cuda:9",), 10),
        (2, ("cuda:0", "cuda:0"), 10),
        (2, ("cuda:0",), -1),
        (2, ("cuda:0", "cuda:1"), 41),
    ],
)
def test_ledger_refuses_impossible_reservations(library: int, devices: tuple[str, ...], size: int) -> None:
    ledger = Ledger({"cuda:0": 100, "cuda:1": 60})  # type: ignore[dict-item]
    ledger.reserve(1, devices=("cuda:0",), memory_bytes=60)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"."):
        ledger.reserve(library, devices=devices, memory_bytes=size)  # type: ignore[arg-type]
    for wrong in (-1, 101):
        with pytest.raises(ValueError, match=r"."):
            ledger.resize(1, memory_bytes=wrong)  # type: ignore[arg-type]
    ledger.validate()
    assert (ledger.free_bytes("cuda:0"), ledger.free_bytes("cuda:1")) == (40, 60)  # type: ignore[arg-type]


entries = st.lists(
    st.builds(CachedObject, st.text("abc", min_size=1), st.integers(0, 50), st.floats(0, 9), st.booleans()),
    unique_by=lambda entry: entry.name,
)


@given(entries, st.integers(0, 120), st.integers(0, 120))
def test_eviction_selects_least_recently_used_and_no_pinned_objects(
    here: list[CachedObject], size: int, bound: int
) -> None:
    plan = choose_evictions(here, size_bytes=size, capacity_bytes=bound)
    movable = sorted((e for e in here if not e.is_pinned), key=lambda e: (e.used_at, e.name))
    pinned = sum(entry.size_bytes for entry in here if entry.is_pinned)
    if plan is Shortage.TOO_LARGE:
        assert size > bound
    elif plan is Shortage.PINNED:
        assert pinned + size > bound
    else:
        assert plan == [entry.name for entry in movable[: len(plan)]]
        left = sum(entry.size_bytes for entry in here if entry.name not in plan)
        assert left + size <= bound
        # The plan would free too little memory without its last eviction.
        assert not plan or left + movable[len(plan) - 1].size_bytes + size > bound


@given(st.text(), st.text())
def test_encoded_file_names_are_unique_and_safe(one: str, other: str) -> None:
    try:
        first, second = encode_as_file_name(one), encode_as_file_name(other)
    except UnicodeEncodeError:  # a lone surrogate is not a name
        return
    assert (first == second) == (one == other)
    assert first.isascii()
    assert first == first.lower()
    assert "/" not in first
    assert "\0" not in first
    assert first not in ("", ".", "..")


def a_library(recipe: Recipe = BARE) -> PilotLibrary:
    return PilotLibrary(StartLibrary(1, recipe, ("cpu:0",)), 0.0)


def test_call_that_is_reported_running_twice_counts_once() -> None:
    library = a_library()
    running_calls.hold_calls(library, [1, 2], limit_s=0.0, streams=False)
    left = running_calls.remove_all_calls(library, [1, 1, 9])
    assert left == ((1,), (2,))


def test_event_caused_by_a_command_follows_the_other_commands() -> None:
    core = PilotCore(PilotFacts(pilot="p", session="s", host="h", pid=1, devices=(DeviceFacts("cpu:0", "cpu", 100),)))
    done: list[object] = []

    def carry_out(command: commands.Command) -> None:
        done.append(command)
        if isinstance(command, commands.PrepareLibrary):
            assert queue.handle_event(LibraryPrepared(command.ordered.library)) == 0
        if isinstance(command, commands.StartProcess | commands.KillProcess):
            done.append(f"after {type(command).__name__}")

    queue = EventQueue(core, carry_out, clock=lambda: 1.0)
    assert queue.handle_event(FromManager(StartLibrary(1, BARE, ("cpu:0",)))) == 2
    kinds = [one if isinstance(one, str) else type(one).__name__ for one in done]
    assert kinds == ["PrepareLibrary", "SendToManager", "StartProcess", "after StartProcess"]


def test_event_queue_continues_after_a_command_fails() -> None:
    core = PilotCore(PilotFacts(pilot="p", session="s", host="h", pid=1, devices=()))

    def fail(_command: commands.Command) -> None:
        raise OSError("the disk is full")

    queue = EventQueue(core, fail, clock=lambda: 1.0)
    with pytest.raises(OSError, match="disk is full"):
        queue.handle_event(HelloDue(UnacknowledgedFacts(), 0, ()))
    assert queue.handle_event(LibraryPrepared(1)) == 1


def test_later_timer_of_an_equal_key_replaces_the_earlier_timer() -> None:
    timers = Timers()
    timers.set_timer(5.0, "a")
    timers.set_timer(3.0, "b")
    timers.set_timer(7.0, "a")
    assert timers.next_due_at == 3.0
    assert timers.take_due(6.0) == ["b"]
    assert timers.take_due(7.0) == ["a"]
    assert timers.next_due_at == float("inf")
