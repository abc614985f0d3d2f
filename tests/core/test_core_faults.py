"""After an infrastructure failure, a call runs elsewhere without penalty; the call fails after several tries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.builders import Cluster, Make, recipe

from stoker.manager.core import retries
from stoker.manager.core.nouns import CallState
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, Failure, FailureKind
from stoker.protocol.ids import format_call_id

EIO = "a disk or file server failed (EIO): OSError: [Errno 5] Input/output error"


def fault(c: Cluster, name: str, *, device: str = "", text: str = EIO) -> str:
    library = c.holders(name)[0]
    failure = Failure(FailureKind.INFRASTRUCTURE, text, library.pilot.id, library.id, device=device)
    c.end(name, failure=failure)
    return str(library.pilot.id)


def crowded_out(c: Cluster, name: str) -> str:
    """Let the kernel kill the library of a call because other programs use the memory; return its pilot."""
    library = c.holders(name)[0]
    text = f"lib-{library.id} was killed by SIGKILL (the node had no memory left: …)"
    failure = Failure(FailureKind.PILOT, text, library.pilot.id, library.id, signal=9)
    c.report(library.pilot.id, say.LibraryGone(library.id, failure, running=(c.ids[name],)))
    return str(library.pilot.id)


@pytest.mark.parametrize("fails", [fault, crowded_out])
def test_call_failed_by_its_pilot_runs_elsewhere_without_penalty(cluster: Make, fails: Callable[..., str]) -> None:
    c = cluster(pilots=2).calls(2).ready().end("2")
    first = fails(c, "1")
    c.ready()
    assert c.pilot_of("1") != first
    call = c.the_call("1")
    assert (
        call.get_or_create_history().library_deaths,
        call.must_run_alone,
        c.core.state.setbacks[call.id].counted_losses,
    ) == (0, False, [])
    assert c.core.state.rerun_calls == 1
    assert f"runs again, for 15 s not on {first}" in c.story(format_call_id(call.id))
    c.end("1")
    assert c.ended["1"].ok
    assert c.core.state.failures == 0
    assert c.core.state.setbacks == {}


def test_call_without_memory_on_every_pilot_fails_with_that_reason(cluster: Make) -> None:
    c = cluster(pilots=2).calls(1).ready()
    met = []
    while "1" not in c.ended and len(met) < 9:
        met.append(crowded_out(c, "1"))
        c.wait(60).ready().wait(1)
    failure = c.failure("1")
    assert max(map(met.count, met)) == retries.MAX_FAULTS_ON_ONE_PILOT
    assert (failure.kind, failure.message.count("no memory left")) == (FailureKind.INFRASTRUCTURE, len(met))


def test_only_pilot_gets_a_failed_call_again_after_a_pause(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready()
    fault(c, "1")
    subject = format_call_id(c.the_call("1").id)
    told = c.story(subject)
    assert f"lib-1 (cpu:0 of p1) failed it: {EIO}" in told
    assert "runs again, for 15 s not on p1" in told
    assert f"p1 failed the call ({EIO}); the call runs again on another pilot, or later on this one" in told
    assert f"failed {subject}: {EIO}" in c.story("p1")
    c.call("2")
    assert c.held() == ["2"], "others run there meanwhile"
    c.end("2").wait(14)
    assert c.the_call("1").state is CallState.WAITING
    c.wait(2)
    assert c.held() == ["1"]
    c.end("1")
    assert c.ended["1"].ok


def test_joining_pilot_gets_a_failed_call_at_once(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("1", context="a").ready()
    fault(c, "1")
    c.join("p2").ready()
    assert c.pilot_of("1") == "p2"


def test_call_fails_after_three_pilots_with_the_evidence(cluster: Make) -> None:
    c = cluster(pilots=5).calls(5).ready().end(*"2345")
    met = [fault(c, "1")]
    for _ in range(2):
        c.wait(11)
        met.append(fault(c, "1"))
    assert len(set(met)) == 3
    end = c.ended["1"]
    assert end.failure is not None
    assert (end.failure.kind, end.failure.pilot, end.payload) == (
        FailureKind.INFRASTRUCTURE, met[-1], b"1"
    )  # fmt: skip
    assert "failed the call 3 times, on 3 pilots:" in end.failure.message
    assert [f"{pilot}, " in end.failure.message for pilot in met] == [True] * 3
    assert end.failure.message.count(EIO) == 3


def test_call_fails_after_three_tries_on_the_only_pilot(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready()
    for _ in range(retries.MAX_FAULTS_ON_ONE_PILOT):
        assert "1" not in c.ended
        fault(c, "1")
        c.wait(60)
    assert c.ended["1"].failure is not None
    assert "3 times, on 1 pilot:" in c.ended["1"].failure.message
    assert c.core.state.setbacks == {}


def test_second_fault_pauses_the_call_on_every_pilot(cluster: Make) -> None:
    c = cluster(pilots=3).calls(3).ready().end("2", "3")
    fault(c, "1")
    fault(c, "1")
    assert c.the_call("1").state is CallState.WAITING, "one pilot has not had it, and waits too"
    assert "runs again in 10 s" in c.story(format_call_id(c.the_call("1").id))
    c.wait(11)
    assert c.the_call("1").state is CallState.HELD


def test_only_the_device_that_failed_a_call_is_avoided(cluster: Make) -> None:
    c = cluster(pilots=1, devices_each=2).calls(2).ready().end("2")
    (sick,) = c.holders("1")
    fault(c, "1", device=sick.devices[0].id, text="the device met a memory error that it cannot correct")
    (well,) = c.holders("1")
    assert well.devices != sick.devices
    assert f"for 15 s not on {sick.devices[0].id} of p1" in c.story(format_call_id(c.the_call("1").id))


def test_saved_checkpoint_resets_the_fault_count(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready()
    for n in range(6):
        c.progress("1", state=b"%d" % n)
        fault(c, "1")
        c.wait(16)
    assert c.pilot_of("1") == "p1"


def test_late_fault_of_a_pilot_declared_lost_ends_no_call(cluster: Make) -> None:
    c = cluster(pilots=2).calls(2).ready().end("2")
    lost, library = c.pilot_of("1"), c.holders("1")[0]
    c.cut(lost).wait(3)
    c.lose(lost)
    c.come_back(lost, lib1=("1",)) if library.id == 1 else c.come_back(lost, lib2=("1",))
    failure = Failure(FailureKind.INFRASTRUCTURE, EIO)
    c.report(lost, say.CallsEnded(library.id, [CallEnd(c.ids["1"], False, b"", 1.0, failure)]))
    assert "1" not in c.ended
    c.wait(30)
    c.end("1")
    assert c.ended["1"].ok
