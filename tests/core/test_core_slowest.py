"""A status names the slowest calls and groups of failures, and stays small and cheap in a large session."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from core import desk
from core.builders import Cluster, devices, recipe

from stoker.manager.core import report
from stoker.manager.core.ending import MOST_SLOW
from stoker.protocol import wire

Make = Callable[..., Cluster]


def test_status_names_the_slowest_ended_calls(cluster: Make) -> None:
    c = cluster(pilots=1).call("x").ready().end("x", run_s=0.5)
    for number in range(MOST_SLOW + 5):
        c.call(f"n{number}").end(*[c.names[id] for id in c.core.state.calls], run_s=1.0 + number % 7)
    c.wait(3)
    slowest = c.status().slowest
    assert len(slowest) == MOST_SLOW
    assert [run.run_s for run in slowest] == sorted((run.run_s for run in slowest), reverse=True)
    first = slowest[0]
    assert (first.run_s, first.function, first.context, first.pilot) == (7.0, "f", "bare", "p1")
    assert first.ended_s >= 3.0


def test_status_has_groups_of_failures_and_the_longest_runs(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready()
    c.end("1", ok=False, raised="ValueError: no\n  at prog.py:3 in f").call("2").wait(5)
    status = c.status()
    (group,) = status.failure_groups
    assert (group.function, group.error, group.place, group.count) == ("f", "ValueError", "prog.py:3 in f", 1)
    (running,) = status.longest
    assert (running.call, running.since_s, running.where) == ("c-2", 5.0, ("p1/lib-1",))


@pytest.mark.slow
def test_status_of_a_large_session_is_small_and_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "validate", lambda _state: None)  # validation would take minutes
    c = Cluster().define(recipe("llm"))
    c.join(*[f"p{number}" for number in range(200)], of=devices(1))
    for _ in range(10):
        c.calls(10_000, context="llm")
    c.ready()
    for number, library in enumerate(list(c.core.state.libraries.values())):
        name = c.names[next(iter(library.held))]
        c.end(name, ok=False, raised=f"ValueError: no\n  at prog.py:{number} in f")
    began = time.process_time()
    status = report.session_status(c.core.state)
    assert time.process_time() - began < 0.2
    assert (len(status.failure_groups), len(status.longest)) == (20, 10)
    assert len(wire.encode([status])) < 500_000
