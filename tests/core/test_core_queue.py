from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.contexts.recipe import BARE
from stoker.manager.core.call_queue import Queue
from stoker.manager.core.nouns import Call, CallGroup, Client, Context
from stoker.manager.core.per_context import CLOSED, FREE, FULL, FunctionCost, LoadIndex
from stoker.protocol.calls import CallOptions, CallSpec, Objective
from stoker.protocol.ids import CallId, ClientId, FunctionKey, LibraryId, RecipeKey
from stoker.protocol.to_pilot import FunctionBlob


def group(priority: int, *, due_at: float = 0.0, gang: tuple[int, int] = (1, 1)) -> CallGroup:
    client = Client(ClientId("ana"), number=0, observer=False)
    cost = FunctionCost(FunctionBlob(FunctionKey("f"), "f", b""), RecipeKey(BARE.key))
    options = CallOptions(priority=priority, objective=Objective(deadline_at=due_at), gang=gang)
    return CallGroup(priority, client, Context(BARE), cost, options)


def call(id: int, of: CallGroup) -> Call:
    return Call(CallId(id), CallSpec(CallId(id), b""), of, float(id // 3))


KINDS = [
    group(0), group(0, due_at=50.0), group(0, due_at=20.0), group(1), group(1, due_at=90.0), group(0, gang=(2, 2)),
    group(0, gang=(4, 8)), group(1, due_at=10.0, gang=(3, 3)),
]  # fmt: skip


@pytest.mark.parametrize("by_deadline", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_queue_equals_a_sorted_list_after_random_changes(seed: int, by_deadline: bool) -> None:
    chance, queue = random.Random(seed), Queue(by_deadline=by_deadline)
    model: list[Call] = []
    away: list[Call] = []

    def rank(call: Call) -> tuple[float, ...]:
        due_at = call.group.options.objective.deadline_at
        counts = by_deadline and due_at and not call.late
        return -call.group.options.priority, due_at if counts else math.inf, call.submitted_at, call.id

    for id in range(300):
        match chance.choice(("extend", "take", "leave", "back", "demote")):
            case "extend":
                kind = chance.choice(KINDS)
                fresh = [call(10 * id + n, kind) for n in range(chance.randint(1, 5))]
                queue.extend(fresh)
                model += fresh
            case "take" if (single := queue.first_single_call()) is not None:
                taken = queue.take_calls(single.group, chance.randint(1, 4))
                assert taken == [x for x in model if x.group.options.gang[1] == 1][: len(taken)]
                model = [x for x in model if x not in taken]
                away += taken
            case "leave" if model:
                model.remove(gone := chance.choice(model))
                queue.remove(gone)
                away.append(gone)
            case "back" if away:
                again = away.pop(chance.randrange(len(away)))
                queue.put_back(again)
                model.append(again)
            case "demote" if model:
                queue.demote(chance.choice(model))
        model.sort(key=rank)
        singles, gangs = ([x for x in model if (x.group.options.gang[1] > 1) is so] for so in (False, True))
        timed = [x for x in model if rank(x)[1] < math.inf]
        assert list(queue) == queue.first_calls(2000, max_examined=2000) == model
        assert queue.head() is (model[0] if model else None)
        assert queue.first_single_call() is (singles[0] if singles else None)
        assert (queue.count, queue.gang_count, queue.deadline_count) == (len(model), len(gangs), len(timed))
        for most in (1, 2, 3, 8):
            able = [x for x in gangs if x.group.options.gang[0] <= most]
            assert queue.first_gang_call(max_libraries=most) is (able[0] if able else None)
        if timed:
            assert min(timed, key=lambda x: rank(x)[1:]) in list(queue.calls_with_nearest_deadlines())


def test_call_that_must_run_alone_is_last_and_not_taken_with_others() -> None:
    queue, one = Queue(), group(0)
    first, second = call(1, one), call(2, one)
    queue.set_aside(first)
    assert (queue.head(), queue.first_single_call(), queue.count) == (first, None, 1)
    queue.extend([second])
    assert (queue.head(), list(queue), queue.first_calls(5, max_examined=5)) == (
        second,
        [second, first],
        [second, first],
    )
    assert queue.take_calls(one, 5) == [second]
    queue.remove(first)
    assert (queue.head(), queue.count) == (None, 0)


def test_queue_frees_memory_of_calls_removed_from_its_middle() -> None:
    queue, one = Queue(), group(0)
    calls = [call(n, one) for n in range(10_000)]
    queue.extend(calls)
    for gone in calls[1:]:
        queue.remove(gone)
    assert len(queue._levels[0].fresh) < 2000
    assert queue.take_calls(one, 5) == [calls[0]]


def test_time_to_read_the_first_calls_ignores_queue_length() -> None:
    queue, one = Queue(), group(0)
    calls = [call(n, one) for n in range(3000)]
    queue.extend(calls)
    for again in queue.take_calls(one, 2000):
        queue.put_back(again)
    assert queue.first_calls(5, max_examined=5) == calls[:5]
    for gone in calls[:100]:
        queue.remove(gone)
    assert queue.first_calls(5, max_examined=100) == calls[2000:2005], "those before them were not looked at"
    assert queue.first_calls(5, max_examined=105) == calls[100:105]
    assert queue.count == 2900


def test_queue_keeps_no_entries_for_unused_priorities() -> None:
    queue = Queue()
    for n in range(1000):
        queue.extend([call(n, group(n))])
    while (head := queue.head()) is not None:
        queue.take_calls(head.group, 1)
    assert not queue._levels
    assert not queue._priorities


class Shelf:
    """A stand-in for a library with the fields that `LoadIndex` uses."""

    def __init__(self, id: int, kind: str = "cpu") -> None:
        self.id = LibraryId(id)
        self.kind = kind


@given(st.lists(st.tuples(st.integers(0, 6), st.one_of(st.none(), st.integers(CLOSED, 5))), max_size=60))
def test_load_index_gives_the_answers_of_a_linear_search(changes: list[tuple[int, int | None]]) -> None:
    shelves = [Shelf(n) for n in range(7)]
    index: LoadIndex[Shelf] = LoadIndex()
    listed: dict[int, int] = {}  # load of each shelf; the shelf that changed last is last
    for number, level in changes:
        listed.pop(number, None)
        if level is None:
            index.remove_library(shelves[number])
        else:
            index.set_level(shelves[number], level)
            listed[number] = level
        free = [id for id, at in listed.items() if at == FREE]
        busy = [id for id in sorted(listed, key=lambda id: listed[id]) if listed[id] >= FULL]
        assert [library.id for library in index.free_libraries_hottest_first()] == free[::-1]
        assert [library.id for library in index.libraries_with_backlog_room()] == sorted(
            busy, key=lambda id: (listed[id], list(listed).index(id))
        )
        backlogs = [listed[library.id] for library in index.libraries_by_backlog()]
        assert backlogs == sorted((listed[id] for id in busy if listed[id] > FULL), reverse=True)
        assert len(index) == len(listed)


@given(st.lists(st.one_of(st.tuples(st.integers(0, 6), st.integers(CLOSED, 2)), st.booleans()), max_size=60))
def test_free_libraries_are_listed_by_speed(changes: list[tuple[int, int] | bool]) -> None:
    shelves = [Shelf(n, "slow" if n % 2 else "fast") for n in range(7)]
    index: LoadIndex[Shelf] = LoadIndex()
    ranked = False
    for change in changes:
        if isinstance(change, bool):
            ranked = change
            index.set_speeds({"slow": 0.5, "fast": 1.0} if ranked else {})
        elif change[1] == 0:
            index.remove_library(shelves[change[0]])
        else:
            index.set_level(shelves[change[0]], change[1])
        hottest = [library.id for library in index.free_libraries_hottest_first()]
        by_speed = [id for parity in (0, 1) for id in hottest if id % 2 == parity] if ranked else []
        assert [library.id for free in index.free_libraries_by_speed() for library in free] == by_speed
        kinds = {kind: sorted(libraries) for kind, libraries in index.of_kind.items()}
        listed = [shelf for shelf in shelves if index.load_level_of(shelf) is not None]
        assert kinds == {kind: ids for kind in ("fast", "slow") if (ids := [x.id for x in listed if x.kind == kind])}
