from __future__ import annotations

import pytest
from core.builders import Cluster, Make

from stoker.protocol import to_client
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallOptions, CallSpec, FailureKind, Objective


def due(c: Cluster, seconds: float, *, drop: bool = False) -> Objective:
    return Objective(deadline_at=c.now + seconds, drop_late=drop)


def test_nearest_deadline_runs_first_within_a_priority(cluster: Make) -> None:
    c = cluster(pilots=1).call("running").ready().forget()
    c.call("none").call("far", objective=due(c, 90)).call("near", objective=due(c, 60)).call("none too")
    c.call("urgent", priority=1).call("nearest, of less weight", priority=-1, objective=due(c, 10))
    order = []
    for name in ["running"] + ["?"] * 6:
        c.end(name if name != "?" else order[-1], run_s=0.5)
        order += c.runs("p1") if c.mail.get("p1") else []
    assert order == ["urgent", "near", "far", "none", "none too", "nearest, of less weight"]


def test_waiting_call_is_dropped_at_its_deadline(cluster: Make) -> None:
    c = cluster(pilots=1).call("running").ready().forget()
    c.call("late", objective=due(c, 5, drop=True)).call("also", objective=due(c, 9, drop=True)).wait(5.5)
    assert set(c.ended) == {"late"}
    failure = c.failure("late")
    assert failure.kind is FailureKind.DROPPED
    assert failure.message == "dropped: 1.0 ms past its deadline"
    c.wait(4.0).end("running")
    assert set(c.ended) == {"late", "also", "running"}


def test_call_past_its_deadline_runs_unless_drop_late_is_set(cluster: Make) -> None:
    c = cluster(pilots=1)
    c.call("no", objective=due(c, -0.022, drop=True)).call("yes", objective=due(c, -1))
    assert c.failure("no").message == "dropped: 22 ms past its deadline"
    c.hears("ana", to_client.Forecasts)
    c.ready().end("yes")
    assert c.ended["yes"].ok


def test_call_that_would_end_late_is_dropped_if_run_times_are_known(cluster: Make) -> None:
    c = cluster(pilots=1).call("a").ready().end("a", run_s=10.0)
    c.call("first", objective=due(c, 5, drop=True)).end("first", run_s=10.0)
    assert c.ended["first"].ok, "one slow run may have been the first one's fault"
    c.call("b").end("b", run_s=8.0)
    c.call("hopeless", objective=due(c, 5, drop=True))
    why = "dropped: its deadline is in 5.0 s, and no call of its function took less than 8.0 s"
    assert c.failure("hopeless").message == why
    c.call("hopeful", objective=due(c, 8.5, drop=True)).end("hopeful", run_s=8.0)
    assert c.ended["hopeful"].ok


def test_late_call_is_reported_and_runs_after_calls_still_in_time(cluster: Make) -> None:
    c = cluster(pilots=1).call("running").ready().forget()
    c.call("lost", objective=due(c, 5)).call("good", objective=due(c, 60)).call("none").wait(6)
    [said] = c.hears("ana", to_client.Forecasts).forecasts
    assert (c.names[said.call], said.in_time) == ("lost", False)
    order = []
    for name in ("running", "good", "lost", "none"):
        c.end(name)
        order += c.runs("p1") if c.mail.get("p1") else []
    assert order == ["good", "lost", "none"], "it waited before the last one"
    assert all(end.ok for end in c.ended.values())


DROP = Objective(drop_late=True)


def deadline_of(c: Cluster, name: str) -> float:
    return c.core.state.calls[c.ids[name]].group.options.objective.deadline_at


def test_due_in_s_counts_from_the_arrival_at_the_manager(cluster: Make) -> None:
    c = cluster().wait(1000)
    c.call("near", objective=DROP, due_in_s=5.0).call("far", objective=DROP, due_in_s=60.0).call("none")
    assert (deadline_of(c, "near"), deadline_of(c, "far"), deadline_of(c, "none")) == (1005.0, 1060.0, 0.0)
    c.wait(5.5)
    assert set(c.ended) == {"near"}
    c.wait(60)
    assert set(c.ended) == {"near", "far"}


def test_zero_seconds_left_is_a_passed_deadline(cluster: Make) -> None:
    c = cluster()
    assert c.now == 0.0
    c.call("due", objective=DROP, due_in_s=0.0).call("past", objective=DROP, due_in_s=-0.022).wait(0.001)
    assert c.failure("past").message == "dropped: 22 ms past its deadline"
    assert set(c.ended) == {"due", "past"}


def test_resubmitted_call_keeps_its_first_deadline(cluster: Make) -> None:
    c = cluster().call("c", objective=DROP, due_in_s=5.0).wait(3)
    again = CallSpec(c.ids["c"], b"arguments")
    c.tell("ana", say.Submit("f", "bare", [again], CallOptions(objective=DROP), 5.0))
    assert deadline_of(c, "c") == 5.0
    c.wait(2.5)
    assert set(c.ended) == {"c"}


@pytest.mark.parametrize("due_in_s", [float("nan"), float("inf"), -float("inf"), 1e11])
def test_call_with_an_implausible_due_in_s_is_refused(cluster: Make, due_in_s: float) -> None:
    c = cluster().call("c", objective=DROP, due_in_s=due_in_s)
    assert c.failure("c").message.startswith("due_in_s is ")


def test_forecast_contains_the_time_of_its_creation(cluster: Make) -> None:
    c = cluster(pilots=1).wait(500).call("late", due_in_s=-1.0)
    said = c.hears("ana", to_client.Forecasts)
    assert said.said_at == 500.0
    assert said.forecasts[0].ends_at >= said.said_at
