from __future__ import annotations

import copy

from core.builders import Cluster, Make, recipe

from stoker.manager.core import ending, report
from stoker.protocol import to_client, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, Failure, FailureKind, ListedState


def ask(c: Cluster, limit: int = 20, only: ListedState | None = None) -> to_client.Calls:
    c.tell("ana", say.AskCalls(limit, only), numbered=False)
    return c.hears("ana", to_client.Calls)


def names(calls: to_client.Calls) -> list[str]:
    return [call.call for call in calls.calls]


def test_running_calls_show_their_library_and_the_calls_before_them(cluster: Make) -> None:
    c = cluster(pilots=1).call("x").hot(run_s=0.001).calls(5).wait(12)
    first, *_, last = ask(c, only=ListedState.RUNNING).calls
    assert (first.call, first.function, first.context, first.since_s) == ("c-2", "f", "bare", 12.0)
    assert (first.where, first.ahead) == (("p1/lib-1",), 0)
    assert (last.where, last.ahead) == (("p1/lib-1",), len(c.held()) - 1)


def test_longest_running_calls_come_first_up_to_the_limit(cluster: Make) -> None:
    c = cluster(pilots=2).call("1").wait(5).call("2").ready()
    assert names(ask(c)) == ["c-1", "c-2"]
    found = ask(c, 1)
    assert (names(found), found.running) == (["c-1"], 2)


def test_waiting_calls_of_all_contexts_are_listed_in_queue_order(cluster: Make) -> None:
    c = cluster().define(recipe("llm")).call("1").call("2", context="llm").wait(1).call("3").call("4", priority=5)
    found = ask(c)
    assert names(found) == ["c-4", "c-1", "c-2", "c-3"]
    assert (found.running, found.waiting, found.failed) == (0, 4, 0)
    assert names(ask(c, 2)) == ["c-4", "c-1"]
    assert names(ask(c, only=ListedState.RUNNING)) == []


def test_failed_calls_are_listed_newest_first_without_cancelled_ones(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready().end("1", ok=False).call("2").end("2").call("3").end("3", ok=False)
    c.call("4").tell("ana", say.Cancel([c.ids["4"]], True)).wait(30)
    c.forget()
    found = ask(c)
    assert names(found) == ["c-3", "c-1"]
    assert found.failed == 2
    assert found.calls[0].error == "raised an exception in your code after 1.000 s"
    assert found.calls[0].since_s == 30.0


def fail(c: Cluster, name: str, raised: str = "", failure: Failure | None = None) -> None:
    c.end(name, ok=False, failure=failure, raised=raised)


def test_failed_calls_are_grouped_by_function_exception_and_line(cluster: Make) -> None:
    c = cluster(pilots=1).calls(6).ready()
    fail(c, "1", "ValueError: no 1\nat /a/x.py:3 in outer\nat /a/x.py:9 in f")
    c.wait(10)
    fail(c, "2", "ValueError: no 2\nat /a/x.py:3 in outer\nat /a/x.py:9 in f")
    fail(c, "3", "ValueError: no 3\nat /a/x.py:12 in f")
    fail(c, "4", "KeyError: 4\nat /a/x.py:9 in f")
    fail(c, "5", failure=Failure(FailureKind.POISON, "it ended its library 2 times:\nas it did", signal=11))
    c.tell("ana", say.Cancel([c.ids["6"]], True)).wait(5).forget()
    found = ask(c, 1)
    assert found.failed == 5 == sum(group.count for group in found.groups)
    first, *rest = found.groups
    assert (first.function, first.error, first.place, first.count) == ("f", "ValueError", "/a/x.py:9 in f", 2)
    assert (first.example, first.message, first.first_s, first.last_s) == ("c-2", "ValueError: no 2", 15.0, 5.0)
    assert [(group.error, group.place, group.example) for group in rest] == [
        ("ValueError", "/a/x.py:12 in f", "c-3"),
        ("KeyError", "/a/x.py:9 in f", "c-4"),
        ("poison (SIGSEGV)", "", "c-5"),
    ]
    assert rest[-1].message == "it ended its library 2 times: as it did"


def test_failures_of_too_many_kinds_are_counted_together(cluster: Make) -> None:
    count = ending.MAX_FAILURE_GROUPS + 3
    c = cluster(pilots=1).calls(count).ready()
    for n in range(1, count + 1):
        fail(c, str(n), f"Error{n}: it failed")
    c.forget()
    found = ask(c)
    assert len(found.groups) == ending.MAX_FAILURE_GROUPS + 1
    assert (found.groups[0].error, found.groups[0].count) == ("other failures", 3)
    assert sum(group.count for group in found.groups) == found.failed == count
    state = copy.deepcopy(c.core.state)  # a failure that was counted wrongly is removed from its group
    for n in (1, count - 2, count - 1, count):
        ending.uncount_call_failure(state, CallEnd(c.ids[str(n)], False, raised=f"Error{n}: it failed"))
    groups = ending.list_failure_groups(state)
    assert sum(group.count for group in groups) == state.failures == count - 4
    assert "other failures" not in {group.error for group in groups}


def test_status_names_the_slowest_ended_calls(cluster: Make) -> None:
    c = cluster(pilots=1).call("x").ready().end("x", run_s=0.5)
    for number in range(ending.MAX_SLOW_CALLS + 5):
        c.call(f"n{number}").end(*[c.names[id] for id in c.core.state.calls], run_s=1.0 + number % 7)
    c.wait(3)
    slowest = c.status().slowest
    assert len(slowest) == ending.MAX_SLOW_CALLS
    assert [run.run_s for run in slowest] == sorted((run.run_s for run in slowest), reverse=True)
    first = slowest[0]
    assert (first.run_s, first.function, first.context, first.pilot) == (7.0, "f", "bare", "p1")
    assert first.ended_s >= 3.0


def test_status_of_a_large_session_is_small() -> None:
    c = Cluster(validates=False).define(recipe("llm"))  # validation would take minutes
    c.join(*[f"p{number}" for number in range(200)])
    c.calls(20_000, context="llm").ready()
    for number, library in enumerate(list(c.core.state.libraries.values())):
        name = c.names[next(iter(library.held))]
        c.end(name, ok=False, raised=f"ValueError: no\n  at prog.py:{number} in f")
    status = report.build_session_status(c.core.state)
    assert (len(status.failure_groups), len(status.longest)) == (20, 10)
    assert len(wire.encode([status])) < 500_000
