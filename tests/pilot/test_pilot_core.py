"""The pilot's pure core: its books always add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stoker.contexts.recipe import BARE, Recipe
from stoker.pilot.core.cache import Entry, Shortage, file_name, make_room, plain_name
from stoker.pilot.core.ledger import Ledger
from stoker.pilot.core.library import LibraryState, State
from stoker.pilot.core.turns import FirstCome

DEVICES = {"cuda:0": 100, "cuda:1": 60}


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of orders, sane or not, leaves every device with what it has."""

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
    st.builds(Entry, st.text("abc", min_size=1), st.integers(0, 50), st.floats(0, 9), st.booleans()),
    unique_by=lambda entry: entry.name,
)


@given(entries, st.integers(0, 120), st.integers(0, 120))
def test_room_is_made_from_the_least_recently_used_and_never_from_pins(
    here: list[Entry], size: int, bound: int
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
        # Nothing went that could have stayed.
        assert not plan or left + movable[len(plan) - 1].size_bytes + size > bound


@given(st.text(), st.text())
def test_file_names_are_injective_safe_and_reversible(one: str, other: str) -> None:
    try:
        first, second = file_name(one), file_name(other)
    except UnicodeEncodeError:  # half of a surrogate pair is no name
        return
    assert (first == second) == (one == other)
    assert first.isascii()
    assert first == first.lower()
    assert "/" not in first
    assert "\0" not in first
    assert first not in ("", ".", "..")
    assert plain_name(first) == one


@pytest.mark.parametrize("odd", ["A", "~g0", "~41B", "..", "a/b"])
def test_what_is_no_file_name_is_refused(odd: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        plain_name(odd)


class TurnsMachine(RuleBasedStateMachine):
    """No call is lost, repeated or overtaken."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: FirstCome[str] = FirstCome()
        self.waiting: list[int] = []
        self.next = 0

    @rule()
    def add(self) -> None:
        self.turns.add(self.next, f"work {self.next}")
        self.waiting.append(self.next)
        self.next += 1

    @rule()
    def take(self) -> None:
        taken = self.turns.take()
        expected = self.waiting.pop(0) if self.waiting else None
        assert taken == (None if expected is None else (expected, f"work {expected}"))

    @rule(count=st.integers(0, 4))
    def give_back(self, count: int) -> None:
        back = self.turns.give_back(count)
        assert back == self.waiting[::-1][:count]
        self.waiting = self.waiting[: len(self.waiting) - len(back)]

    @rule(calls=st.lists(st.integers(0, 20), unique=True))
    def drop(self, calls: list[int]) -> None:
        back = self.turns.drop(calls)
        assert set(back) == set(calls) & set(self.waiting)
        self.waiting = [call for call in self.waiting if call not in back]

    @invariant()
    def counts(self) -> None:
        assert len(self.turns) == len(self.waiting)


TestTurns = TurnsMachine.TestCase


class LibraryMachine(RuleBasedStateMachine):
    """Every call that a library holds leaves it exactly once, whatever is said and however often."""

    def __init__(self) -> None:
        super().__init__()
        self.library = LibraryState(1, Recipe(key="k", name="n", calls_per_library=3), ("cpu:0",))
        self.left: list[int] = []
        self.came: list[int] = []

    @rule(state=st.sampled_from(list(State)))
    def move(self, state: State) -> None:
        order = [State.FETCHING, State.STARTING, State.LOADING, State.READY, State.DRAINING]
        now = self.library.state
        legal = now is not State.GONE and (
            state is State.GONE or (now in order[:-1] and state is order[order.index(now) + 1])
        )
        if state is State.GONE:
            return  # `gone` does it
        if legal:
            self.library.move(state)
        else:
            with pytest.raises(ValueError, match=r"cannot go"):
                self.library.move(state)

    @rule(count=st.integers(1, 3))
    def hold(self, count: int) -> None:
        calls = list(range(len(self.came), len(self.came) + count))
        if self.library.state in (State.DRAINING, State.GONE):
            with pytest.raises(ValueError, match=r"takes no calls"):
                self.library.hold(calls)
        else:
            self.library.hold(calls)
            self.came += calls

    @rule(calls=st.lists(st.integers(0, 12)), ended=st.booleans())
    def leave(self, calls: list[int], ended: bool) -> None:
        served = self.library.served
        here = self.library.ended(calls) if ended else self.library.returned(calls)
        self.left += here
        assert self.library.served == served + (len(here) if ended else 0)
        assert self.library.retires == (self.library.served >= 3)

    @rule(running=st.lists(st.integers(0, 12), max_size=2))
    def gone(self, running: list[int]) -> None:
        held = list(self.library.held)
        departure = self.library.gone(running)
        assert sorted((*departure.running, *departure.unstarted)) == sorted(held)
        assert list(departure.unstarted) == [call for call in held if call not in running]
        self.left += [*departure.running, *departure.unstarted]

    @invariant()
    def once(self) -> None:
        assert len(set(self.left)) == len(self.left)
        assert sorted((*self.left, *self.library.held)) == self.came


TestLibrary = LibraryMachine.TestCase


def test_a_library_without_a_bound_never_retires() -> None:
    library = LibraryState(1, BARE, ("cpu:0",))
    library.hold([1])
    library.ended([1])
    assert not library.retires


def test_a_call_that_its_marker_names_twice_leaves_a_library_once() -> None:
    library = LibraryState(1, BARE, ("cpu:0",))
    library.hold([1, 2])
    departure = library.gone([1, 1, 9])
    assert (departure.running, departure.unstarted) == ((1,), (2,))
