from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stoker.contexts.recipe import BARE, Recipe
from stoker.pilot.core import commands
from stoker.pilot.core import running as running_calls
from stoker.pilot.core.core import EventQueue, PilotCore
from stoker.pilot.core.events import FromManager, HelloDue, LibraryPrepared, UnacknowledgedFacts
from stoker.pilot.core.objects import CachedObject, Shortage, encode_as_file_name, make_room
from stoker.pilot.core.state import Ledger, PilotFacts, PilotLibrary, Timers
from stoker.protocol.to_manager import DeviceFacts
from stoker.protocol.to_pilot import StartLibrary

DEVICES = {"cuda:0": 100, "cuda:1": 60}


class LedgerMachine(RuleBasedStateMachine):
    """No sequence of valid or invalid orders exceeds the memory of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(DEVICES)
        self.model: dict[int, tuple[tuple[str, ...], int]] = {}

    def held_on(self, device: str) -> int:
        return sum(size for devices, size in self.model.values() if device in devices)

    @rule(
        library=st.integers(0, 4),
        devices=st.lists(st.sampled_from(["cuda:0", "cuda:1", "cuda:9"]), max_size=3),
        size=st.integers(-5, 120),
    )
    def reserve(self, library: int, devices: list[str], size: int) -> None:
        sane = (
            library not in self.model
            and devices
            and len(set(devices)) == len(devices)
            and size >= 0
            and all(one in DEVICES and self.held_on(one) + size <= DEVICES[one] for one in devices)
        )
        if sane:
            self.ledger.reserve(library, devices=tuple(devices), memory_bytes=size)
            self.model[library] = (tuple(devices), size)
        else:
            with pytest.raises(ValueError, match=r"."):
                self.ledger.reserve(library, devices=tuple(devices), memory_bytes=size)

    @rule(library=st.integers(0, 4), size=st.integers(-5, 120))
    def resize(self, library: int, size: int) -> None:
        devices, before = self.model.get(library, ((), 0))
        if devices and size >= 0 and all(self.held_on(one) - before + size <= DEVICES[one] for one in devices):
            self.ledger.resize(library, memory_bytes=size)
            self.model[library] = (devices, size)
        else:
            with pytest.raises(ValueError, match=r"."):
                self.ledger.resize(library, memory_bytes=size)

    @rule(library=st.integers(0, 4))
    def release(self, library: int) -> None:
        self.ledger.release(library)
        self.model.pop(library, None)

    @invariant()
    def adds_up(self) -> None:
        self.ledger.validate()
        for device, capacity in DEVICES.items():
            assert self.ledger.free(device) == capacity - self.held_on(device) >= 0
        for library, (_, size) in self.model.items():
            assert self.ledger.held(library) == size


TestLedger = LedgerMachine.TestCase

entries = st.lists(
    st.builds(CachedObject, st.text("abc", min_size=1), st.integers(0, 50), st.floats(0, 9), st.booleans()),
    unique_by=lambda entry: entry.name,
)


@given(entries, st.integers(0, 120), st.integers(0, 120))
def test_eviction_selects_the_least_recently_used_and_never_pins(
    here: list[CachedObject], size: int, bound: int
) -> None:
    plan = make_room(here, size_bytes=size, bound_bytes=bound)
    movable = sorted((e for e in here if not e.pinned), key=lambda e: (e.used_at, e.name))
    pinned = sum(entry.size_bytes for entry in here if entry.pinned)
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
def test_file_names_are_injective_and_safe(one: str, other: str) -> None:
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


def test_call_that_is_reported_running_twice_leaves_once() -> None:
    library = a_library()
    running_calls.hold_calls(library, [1, 2])
    departure = running_calls.drop_all(library, [1, 1, 9])
    assert (departure.running, departure.unstarted) == ((1,), (2,))


def test_event_caused_by_a_command_follows_the_other_commands() -> None:
    core = PilotCore(PilotFacts(pilot="p", session="s", host="h", pid=1, devices=(DeviceFacts("cpu:0", "cpu", 100),)))
    done: list[object] = []

    def carry_out(command: commands.Command) -> None:
        done.append(command)
        if isinstance(command, commands.Prepare):
            assert queue.handle(LibraryPrepared(command.ordered.library)) == 0
        if isinstance(command, commands.StartProcess | commands.KillProcess):
            done.append(f"after {type(command).__name__}")

    queue = EventQueue(core, carry_out, clock=lambda: 1.0)
    assert queue.handle(FromManager(StartLibrary(1, BARE, ("cpu:0",)))) == 2
    kinds = [one if isinstance(one, str) else type(one).__name__ for one in done]
    assert kinds == ["Prepare", "Tell", "StartProcess", "after StartProcess"]


def test_event_queue_continues_after_a_command_fails() -> None:
    core = PilotCore(PilotFacts(pilot="p", session="s", host="h", pid=1, devices=()))

    def fail(_command: commands.Command) -> None:
        raise OSError("the disk is full")

    queue = EventQueue(core, fail, clock=lambda: 1.0)
    with pytest.raises(OSError, match="disk is full"):
        queue.handle(HelloDue(UnacknowledgedFacts(), 0, ()))
    assert queue.handle(LibraryPrepared(1)) == 1


def test_later_timer_of_an_equal_key_replaces_the_earlier_timer() -> None:
    timers = Timers()
    timers.set(5.0, "a")
    timers.set(3.0, "b")
    timers.set(7.0, "a")
    assert timers.next_at == 3.0
    assert timers.due(6.0) == ["b"]
    assert timers.due(7.0) == ["a"]
    assert timers.next_at == float("inf")
