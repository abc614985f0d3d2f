"""The queue of a context against a plain list, and that it costs what it holds."""

from __future__ import annotations

import random

import pytest

from stoker.contexts.recipe import BARE
from stoker.manager.core.queue import Queue
from stoker.manager.core.state import Call, Client, Context, Cost, Group
from stoker.manager.protocol.calls import CallOptions, CallSpec
from stoker.manager.protocol.ids import CallId, ClientId, FunctionKey
from stoker.manager.protocol.to_pilot import FunctionBlob


def group(priority: int) -> Group:
    client = Client(ClientId("ana"), number=0, observer=False)
    cost = Cost(FunctionBlob(FunctionKey("f"), "f", b""), Context(BARE))
    return Group(priority, client, cost, CallOptions(priority=priority))


def call(id: int, of: Group) -> Call:
    return Call(CallId(id), CallSpec(CallId(id), b""), of, float(id // 3))


def in_order(model: list[Call]) -> list[Call]:
    return sorted(model, key=lambda call: (-call.group.options.priority, call.submitted_at, call.id))


@pytest.mark.parametrize("seed", range(20))
def test_it_is_always_sorted_by_priority_and_arrival(seed: int) -> None:
    chance, queue, groups = random.Random(seed), Queue(), [group(n % 3) for n in range(5)]
    model: list[Call] = []
    away: list[Call] = []
    for id in range(400):
        match chance.choice(("extend", "take", "leave", "back", "back")):
            case "extend":
                fresh = [call(10 * id + n, groups[id % 5]) for n in range(chance.randint(1, 5))]
                queue.extend(fresh)
                model += fresh
            case "take" if model:
                head = queue.head()
                assert head is in_order(model)[0]
                taken = queue.take(head.group, chance.randint(1, 4))  # type: ignore[union-attr]
                assert taken == in_order(model)[: len(taken)]
                assert {x.group for x in taken} == {head.group}  # type: ignore[union-attr]
                model = [x for x in model if x not in taken]
                away += taken
            case "leave" if model:
                gone = chance.choice(model)
                queue.leave(gone)
                model.remove(gone)
                away.append(gone)
            case "back" if away:
                again = away.pop(chance.randrange(len(away)))
                queue.put_back(again)
                model.append(again)
        assert list(queue) == in_order(model)
        assert queue.first(7, looks=1000) == in_order(model)[:7]
        assert len(queue) == len(model)


def test_calls_that_left_from_the_middle_are_swept_out() -> None:
    queue, one = Queue(), group(0)
    calls = [call(n, one) for n in range(10_000)]
    queue.extend(calls)
    for gone in calls[1:]:
        queue.leave(gone)
    assert len(queue._levels[0].fresh) < 2000
    assert queue.take(one, 5) == [calls[0]]


def test_the_first_calls_cost_what_they_are_however_many_wait() -> None:
    queue, one = Queue(), group(0)
    calls = [call(n, one) for n in range(3000)]
    queue.extend(calls)
    for again in queue.take(one, 2000):
        queue.put_back(again)
    assert queue.first(5, looks=5) == calls[:5]
    for gone in calls[:100]:
        queue.leave(gone)
    assert queue.first(5, looks=100) == calls[2000:2005], "those before them were not looked at"
    assert queue.first(5, looks=105) == calls[100:105]
    assert len(queue) == 2900


def test_priorities_that_nobody_uses_any_more_cost_nothing() -> None:
    queue = Queue()
    for n in range(1000):
        queue.push(call(n, group(n)))
    while (head := queue.head()) is not None:
        queue.take(head.group, 1)
    assert not queue._levels
    assert not queue._order
