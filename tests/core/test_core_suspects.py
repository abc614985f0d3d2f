"""A call that kills pilots or libraries, or outlasts walltimes, fails alone."""

from __future__ import annotations

import pytest
from core.builders import Cluster, Make, recipe

from stoker.manager.core import blame
from stoker.manager.core.blame import LOSSES_BEFORE_RUNNING_ALONE, MAX_LOSSES
from stoker.manager.core.libraries import MAX_PILOTS_LOST_WHILE_LOADING
from stoker.manager.core.nouns import CallState
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import BlockPhase, LossReason, Source
from stoker.protocol.calls import Failure, FailureKind, OutputRange
from stoker.protocol.ids import format_call_id

KILLED = Failure(FailureKind.DIED, "was killed by SIGKILL", signal=9, tail="last words")
LAB = Source("lab", first=1, most=20, walltime_s=60.0)


def kill_pilots(c: Cluster, name: str, *, times: int, spare: int = 0) -> None:
    """Lose the pilot that runs the call, `times` times; each time another pilot joins first."""
    for _ in range(times):
        lost = c.pilot_of(name)
        c.join(f"x{len(c.core.state.gone_pilots)}-{spare}").wait(1).lose(lost).ready()


def test_call_runs_alone_after_three_losses_then_fails_with_evidence(cluster: Make) -> None:
    c = cluster(pilots=1).call("bad").ready()
    kill_pilots(c, "bad", times=LOSSES_BEFORE_RUNNING_ALONE)
    assert c.the_call("bad").state is CallState.HELD, "it has one more try, alone"
    last = c.pilot_of("bad")
    kill_pilots(c, "bad", times=1)
    failure = c.failure("bad")
    assert (failure.kind, failure.pilot) == (FailureKind.POISON, last)
    assert "its pilot or library died 4 times while it ran, the last time with no other call:" in failure.message
    assert failure.message.count("unexplained, gone: silent for 15 s") == 4
    assert "p1, 1.0 s after the call was submitted" in failure.message


def test_calls_next_to_a_call_that_kills_pilots_finish(cluster: Make) -> None:
    c = cluster(pilots=1, devices_each=4).call("bad", "a", "b", "c").ready()
    for n in range(40):
        if len(c.ended) == 4:
            break
        there = [name for name in c.ids if name not in c.ended and c.the_call(name).holder]
        if "bad" in there:  # the bad call kills its pilot before any other call ends on that pilot
            lost = c.pilot_of("bad")
            beside = [name for name in there if name != "bad" and c.pilot_of(name) == lost]
            assert beside == [] or n < LOSSES_BEFORE_RUNNING_ALONE, "it runs alone"
            c.join(f"x{n}", of=c._facts["p1"].devices).wait(1).lose(lost)
        else:
            c.end(*there)
        c.ready().wait(15).ready()
    assert c.failure("bad").kind is FailureKind.POISON
    assert all(c.ended[name].ok for name in "abc")


def test_pilot_reserved_for_a_suspected_call_runs_no_other_call(cluster: Make) -> None:
    c = cluster(pilots=1).call("bad").ready()
    kill_pilots(c, "bad", times=LOSSES_BEFORE_RUNNING_ALONE - 1)
    c.join("second").call("long").ready()
    lost, other = c.pilot_of("bad"), c.pilot_of("long")
    c.lose(lost)
    assert c.the_call("bad").state is CallState.WAITING
    assert "runs alone on a pilot next: second is kept for the call" in c.story(format_call_id(c.the_call("bad").id))
    c.call("later").wait(5)
    assert c.the_call("later").state is CallState.WAITING, "the only pilot is kept"
    c.end("long")
    assert c.pilot_of("bad") == other
    c.join("third").ready()
    assert c.pilot_of("later") == "third", "nothing else runs beside the suspect"
    c.end("bad").end("later")
    assert c.pilot("second").reserved_for is None
    assert c.core.state.setbacks == {}
    c.calls(2).end(*[name for name in c.ids if name not in c.ended])
    assert all(end.ok for end in c.ended.values())


@pytest.mark.parametrize("how", ["cancelled", "died", "timed out", "stopped", "given back"])
def test_suspected_call_starts_when_its_reserved_pilot_is_free(cluster: Make, how: str) -> None:
    c = cluster(pilots=1, devices_each=2).define(recipe("a", memory="1 GB"), recipe("b", memory="1 GB"))
    c.call("bad", context="a").call("long", context="b").ready()
    for _ in range(LOSSES_BEFORE_RUNNING_ALONE):
        c.die(c.library(context="a"), "bad", failure=KILLED).ready()
    assert c.pilot("p1").reserved_for is c.the_call("bad")
    c.call("later", context="a")
    assert "p1 is kept for c-1, which must run alone" in c.story(format_call_id(c.the_call("later").id))
    library = c.library(context="b")
    if how == "cancelled":
        c.tell("ana", say.Cancel([c.ids["long"]], running=True))
        c.report(
            "p1", say.LibraryGone(library.id, Failure(FailureKind.CANCELLED, "with its call"), running=(c.ids["long"],))
        )
    elif how == "died":
        c.die(library, "long", failure=KILLED)
    elif how == "timed out":
        failure = Failure(FailureKind.TIMEOUT, "it ran too long")
        c.end("long", failure=failure).report("p1", say.LibraryGone(library.id, failure))
    elif how == "stopped":
        c.report("p1", say.LibraryGone(library.id, unstarted=(c.ids["long"],)))
    else:
        c.report("p1", say.CallsReturned(library.id, (c.ids["long"],)))
    assert c.the_call("bad").state is CallState.HELD, "it runs alone now"
    c.end("bad").ready().end("later")
    assert c.ended["later"].ok
    c.check()


@pytest.mark.parametrize("reason", [LossReason.PREEMPTED, LossReason.OUT_OF_MEMORY, None])
def test_batch_system_reason_decides_if_a_pilot_loss_counts(cluster: Make, reason: LossReason | None) -> None:
    c = cluster().sources(Source("lab", first=20, most=20)).call("bad")
    blocks = list(c.core.state.blocks)
    c.block(*blocks, phase=BlockPhase.RUNNING)
    for n, block in enumerate(blocks[: LOSSES_BEFORE_RUNNING_ALONE + 1]):
        c.join(f"q{n}", block=block).ready().lose(f"q{n}")
        if n < LOSSES_BEFORE_RUNNING_ALONE:
            c.block(block, phase=BlockPhase.ENDED, reason="OUT_OF_MEMORY", loss=LossReason.OUT_OF_MEMORY)
    c.join("spare", block=blocks[-1]).ready()
    assert c.the_call("bad").state is CallState.WAITING, "nobody has said why the last one went"
    assert "waits for the batch system's record" in c.story(format_call_id(c.the_call("bad").id))
    if reason is None:
        c.wait(61)
    else:
        c.block(blocks[LOSSES_BEFORE_RUNNING_ALONE], phase=BlockPhase.ENDED, reason=reason.value, loss=reason)
    if reason is LossReason.PREEMPTED:
        c.ready().end("bad")
        assert c.ended["bad"].ok
        return
    failure = c.failure("bad")
    assert "out of memory" in failure.message
    assert "the batch system reports OUT_OF_MEMORY" in failure.message


def test_loss_of_a_pilot_that_reconnects_is_not_held_against_its_call(cluster: Make) -> None:
    c = cluster(pilots=1).call("c").ready()
    for _ in range(MAX_LOSSES):
        c.lose("p1").come_back("p1", lib1=("c",))
    assert c.the_call("c").state is CallState.HELD
    c.end("c")
    assert c.ended["c"].ok


def test_call_that_saves_progress_survives_many_pilot_losses(cluster: Make) -> None:
    c = cluster(pilots=1).call("c").ready()
    for n in range(2 * MAX_LOSSES):
        c.progress("c", float(n), 100.0, state=b"%d" % n)
        kill_pilots(c, "c", times=1, spare=n)
    c.end("c")
    assert c.ended["c"].ok


def test_kill_while_another_call_runs_is_not_held_against_a_call(cluster: Make) -> None:
    c = cluster(pilots=1, devices_each=2).define(recipe("a", memory="1 GB"), recipe("b", memory="1 GB"))
    c.call("hog", context="a").call("good", context="b").ready()
    for _ in range(2):
        c.die(c.library(context="b"), "good", failure=KILLED).ready()
    assert "good" not in c.ended
    c.end("hog")
    c.end("good")
    assert c.ended["good"].ok


def test_two_segmentation_faults_make_a_call_a_poison_call(cluster: Make) -> None:
    c = cluster(pilots=1, devices_each=2).define(recipe("a", memory="1 GB"), recipe("b", memory="1 GB"))
    c.call("other", context="a").call("bad", context="b").ready()
    segfault = Failure(FailureKind.DIED, "was killed by SIGSEGV", signal=11)
    for _ in range(2):
        c.die(c.library(context="b"), "bad", failure=segfault).ready()
    assert c.failure("bad").kind is FailureKind.POISON


def test_calls_of_a_dead_library_are_retried_one_at_a_time(cluster: Make) -> None:
    c = cluster(pilots=1).call("x").hot(run_s=0.001).calls(4)
    c.die(c.library(), "2", "3", "4").ready()
    assert c.held() == ["2"], "also in a library of one slot nothing waits behind a suspect"
    c.end("2").die(c.library(), "3").ready()
    assert c.failure("3").kind is FailureKind.POISON
    c.end("4").end("5")
    assert all(c.ended[name].ok for name in "245")


def test_call_next_to_two_timed_out_calls_runs_alone_afterwards(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("room", slots=4)).call("long", context="room").ready()
    for n in range(2):
        hangs, library = f"hangs-{n}", c.library(context="room")
        c.call(hangs, context="room")
        assert c.held(context="room") == ["long", hangs], "they run side by side"
        failure = Failure(FailureKind.TIMEOUT, "the call ran for 1.2 s; its limit is 1 s")
        c.end(hangs, failure=failure).report(
            "p1", say.LibraryGone(library.id, failure, running=(c.ids["long"],))
        ).ready()
    assert "the call runs alone in a library from now on" in c.story(format_call_id(c.the_call("long").id))
    c.call("hangs", context="room")
    assert c.held(context="room") == ["long"], "the other one waits, or has a library of its own"
    c.end("long").end("hangs")
    assert c.ended["long"].ok
    c.check()


def test_calls_fail_if_loads_of_their_context_kill_several_pilots(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("huge")).call("c", context="huge")
    for n in range(MAX_PILOTS_LOST_WHILE_LOADING):
        assert c.ended == {}
        lost = c.lives_on("huge")[0]
        c.join(f"x{n}").lose(lost)
    failure = c.failure("c")
    assert failure.kind is FailureKind.CONTEXT
    assert "context huge could not be loaded: its pilot died 4 times meanwhile" in failure.message
    c.call("again", context="huge").ready().end("again")
    assert c.ended["again"].ok


# ---- the walltime
def cut(c: Cluster, pilot: str, *, ran_s: float, saves: bytes = b"", lost: bool = False) -> None:
    """End a pilot by its walltime; with `lost` the pilot reports nothing."""
    block = next(iter(c.core.state.blocks))
    c.block(block, phase=BlockPhase.RUNNING).join(pilot, block=block, ends_in_s=60.0).ready()
    c.wait(ran_s)
    library = c.library(pilot)
    for call in library.held if saves else ():
        c.progress(c.names[call], 1.0, 100.0, state=saves)
    if lost:
        c.lose(pilot)
    else:
        c.report(pilot, say.LibraryGone(library.id, None, False, tuple(library.held)))
        c.report(pilot, say.PilotLeaving("its walltime is over"))
    c.block(block, phase=BlockPhase.ENDED, reason="TIMEOUT").wait(1.0)


@pytest.mark.parametrize("lost", [False, True])
def test_call_cut_off_by_the_walltime_twice_fails_with_advice(cluster: Make, lost: bool) -> None:
    c = cluster().sources(LAB).call("long")
    cut(c, "q1", ran_s=57.0, lost=lost)
    assert c.ended == {}
    cut(c, "q2", ran_s=57.0, lost=lost)
    failure = c.failure("long")
    assert failure.kind is FailureKind.TIMEOUT
    assert failure.message == (
        "ran 57 s and was cut off by the 1 min walltime, twice; raise [provider] walltime, or save state with "
        "stoker.progress(state=...)"
    )


def test_call_that_saves_state_survives_many_walltime_ends(cluster: Make) -> None:
    c = cluster().sources(LAB).call("long")
    for n in range(6):
        cut(c, f"q{n}", ran_s=57.0, saves=b"%d" % n)
        assert c.ended == {}
    cut(c, "stuck", ran_s=57.0)
    assert "twice" in c.failure("long").message


def test_call_that_started_late_is_retried_with_more_walltime(cluster: Make) -> None:
    c = cluster().sources(Source("lab", first=2, most=4, walltime_s=600.0)).calls(2)
    first, second = c.core.state.blocks
    c.block(first, second, phase=BlockPhase.RUNNING)
    c.join("old", block=first, ends_in_s=600.0).ready().end("1").wait(400).call("late")
    c.end("2").mail.clear()
    assert c.pilot_of("late") == "old"
    c.wait(180)
    library = c.library("old")
    c.join("older", block=second, ends_in_s=100.0).call("short").ready()
    c.report("old", say.LibraryGone(library.id, None, False, tuple(library.held)), say.PilotLeaving("walltime"))
    c.end("short").forget().block(first, phase=BlockPhase.ENDED, reason="TIMEOUT")
    assert c.the_call("late").state is CallState.WAITING, "100 s are not enough for one that ran 180"
    assert "the call needs a pilot with more than 3 min of walltime left" in c.story(
        format_call_id(c.the_call("late").id)
    )
    c.call("other")
    assert c.pilot_of("other") == "older", "it holds nobody up"
    third = c.asked()[0]
    c.block(third, phase=BlockPhase.RUNNING).join("new", block=third, ends_in_s=600.0).call("more").ready()
    assert c.pilot_of("late") == "new"


@pytest.mark.parametrize("user", ["bad", "large"])
def test_failure_message_reports_the_memory_use_of_that_call_only(cluster: Make, user: str) -> None:
    c = cluster(pilots=1).call("large").call("bad").ready()
    for n in range(LOSSES_BEFORE_RUNNING_ALONE + 2):
        library = c.holders("bad" if n else "large")[0]
        if user == ("bad" if n else "large"):
            c.report(library.pilot.id, say.Heartbeat((say.LibraryUse(library.id, 7_500_000_000),)))
        if n:
            kill_pilots(c, "bad", times=1)
        else:
            c.wait(1).end("large").wait(1)
    assert ("used up to 7.5 GB meanwhile" in c.failure("bad").message) is (user == "bad")


def test_call_of_a_lost_pilot_shows_its_own_output(cluster: Make) -> None:
    c = cluster(pilots=1).call("bad").ready()
    kill_pilots(c, "bad", times=LOSSES_BEFORE_RUNNING_ALONE - 1)
    c.hello("q", folder="/logs/q").call("good").ready()
    library = c.holders("good")[0]
    log = blame.library_log_path(library.pilot, library.id)
    c.end("good", printed=OutputRange(log, 10, 400)).call("silent").end("silent").lose(c.pilot_of("bad")).wait(1)
    assert c.pilot_of("bad") == "q"
    c.join("last").lose("q")
    assert c.failure("bad").printed == OutputRange(log, 400, 0)
    assert f"printed {log}:400-" in c.story(format_call_id(c.ids["bad"]))
