"""Test the default policy on devices of different speeds: an A10 with 1 s per call and a CPU with 4 s per call."""

from __future__ import annotations

import pytest
from core.builders import Cluster, Make, devices, recipe
from core.test_core_maps import report

from stoker.manager.core.events import ContextAdvice
from stoker.protocol import to_manager as say
from stoker.protocol.calls import Objective
from stoker.protocol.ids import format_call_id


def two_kinds(cluster: Make, *, run_s: float = 10.0, speed: float = 0.25, ends_in_s: float = 0.0) -> Cluster:
    """Return an idle cluster that knows the run time of a function on the A10 and the speed of the CPU."""
    c = cluster().join("fast", of=devices(1, kind="A10"), ends_in_s=ends_in_s).join("slow", ends_in_s=ends_in_s)
    c.advise("bare", {"A10": ContextAdvice(speed=1.0), "cpu": ContextAdvice(speed=speed)})
    c.call("on fast", "on slow").ready()
    for name in ("on fast", "on slow"):
        c.end(name, run_s=run_s / (speed if c.holders(name)[0].kind == "cpu" else 1.0))
    for _ in range(4):  # the mean of a device kind counts after three runs
        names = [f"{len(c.ids)}", f"{len(c.ids) + 1}"]
        c.call(*names)
        for name in names:
            c.end(name, run_s=run_s / (speed if c.holders(name)[0].kind == "cpu" else 1.0))
    return c.wait(1000.0).forget()


def test_call_goes_to_the_free_library_on_the_fastest_device(cluster: Make) -> None:
    c = two_kinds(cluster).call("a", "b").end("a", run_s=10.0).end("b", run_s=40.0)
    assert next(c.context().index.free_libraries_hottest_first()).kind == "cpu", "it was used last"
    assert c.call("one").held("fast") == ["one"]


def test_library_that_shares_its_device_counts_as_slower(cluster: Make) -> None:
    c = cluster().define(recipe("other", memory="1 GB", kinds=("A10",)))
    c.join("fast", of=devices(1, kind="A10", memory="24 GB")).join("slow")
    c.advise("bare", {"A10": ContextAdvice(speed=1.0), "cpu": ContextAdvice(speed=0.6)})
    c.call("a", "b").call("of other", context="other").ready().end("a", run_s=1.0).end("b", run_s=1.7)
    assert c.held("fast", "other") == ["of other"]
    assert c.call("one").held("slow") == ["one"]
    c.end("one", run_s=1.7).end("of other")
    assert c.call("two").held("fast") == ["two"]


def test_last_call_of_a_map_waits_for_the_faster_kind(cluster: Make) -> None:
    c = two_kinds(cluster).tell("ana", report(total=2, unsent=0)).call("first")
    c.wait(1.0).call("last")
    assert (c.held("fast"), c.held("slow"), c.waiting()) == (["first"], [], ["last"])
    why = "a library on a faster device should end the call sooner than the 1 free libraries (cpu)"
    assert why in c.story(format_call_id(c.the_call("last").id))
    c.wait(9.0).end("first", run_s=10.0)
    assert c.held("fast") == ["last"]


def test_slow_device_takes_calls_while_many_calls_remain(cluster: Make) -> None:
    c = two_kinds(cluster).tell("ana", report(total=60, unsent=40)).call("first")
    c.wait(1.0).call("second")
    assert c.held("slow") == ["second"]


def test_call_uses_a_slow_device_if_more_calls_may_follow(cluster: Make) -> None:
    c = two_kinds(cluster).call("first").wait(1.0).call("second")
    assert c.held("slow") == ["second"], "the program may submit more"


def test_call_stops_waiting_for_a_faster_library_that_hangs(cluster: Make) -> None:
    c = two_kinds(cluster).tell("ana", report(total=2, unsent=0)).call("hangs")
    c.wait(1.0).call("last")
    assert c.waiting() == ["last"]
    c.wait(90.0)
    assert (c.held("slow"), c.waiting()) == (["last"], [])


def test_call_waits_if_only_the_faster_device_meets_its_deadline(cluster: Make) -> None:
    c = two_kinds(cluster).call("first").wait(1.0)
    c.call("due", objective=Objective(deadline_at=c.now + 25.0))
    assert (c.held("slow"), c.waiting()) == ([], ["due"])
    c.call("passes it")
    assert (c.held("slow"), c.waiting()) == (["passes it"], ["due"])
    c.wait(9.0).end("first", run_s=10.0)
    assert c.held("fast") == ["due"]


def test_long_call_is_not_sent_to_a_pilot_with_too_little_walltime(cluster: Make) -> None:
    c = two_kinds(cluster, run_s=100.0, ends_in_s=3600.0).wait(3600.0 - 1000.0 - 300.0)
    c.call("a", "b")
    assert (c.held("fast"), c.held("slow"), c.waiting()) == (["a"], [], ["b"]), "400 s do not fit into 300 s there"


def test_slow_pilot_drains_earlier(cluster: Make) -> None:
    c = two_kinds(cluster, run_s=100.0, ends_in_s=3600.0)
    c.wait(3600.0 - 1000.0 - 500.0)
    assert {name: c.pilot(name).state.value for name in ("fast", "slow")} == {"fast": "here", "slow": "draining"}


def test_forecast_weights_each_device_kind_by_its_speed(cluster: Make) -> None:
    c = two_kinds(cluster).calls(52)
    assert c.status().left_s == pytest.approx(52 / (1 / 10.0 + 1 / 40.0), rel=0.01)
    for name in [c.names[call.id] for call in list(c.context().queue)]:
        c.tell("ana", say.Cancel([c.ids[name]], running=True))
    assert c.status().left_s == pytest.approx(40.0), "the last call runs on the slow device"
