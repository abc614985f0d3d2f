"""The core asks for advice automatically and applies each answer. No call waits for advice."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from core.builders import Cluster, Make, devices, recipe

from stoker.manager.core import blame, events
from stoker.manager.core.nouns import LibraryState
from stoker.manager.core.seams import Quarantine
from stoker.manager.policies import find_shipped_policy
from stoker.protocol import to_client
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallProgress, Failure, FailureKind, OutputRange
from stoker.protocol.ids import format_call_id

DISK = events.VerdictAdvice("infrastructure", "disk", 0.92, "a disk or file server failed", ("12: OSError: [Errno 5]",))
GPU = events.VerdictAdvice("infrastructure", "gpu", 0.95, "a GPU is lost", ("3: GPU is lost",))


def asked(c: Cluster, kind: type[Any]) -> list[events.AskAdvice]:
    found = [each for each in c.commands(events.AskAdvice) if isinstance(each.about, kind)]
    c.others = [each for each in c.others if each not in found]
    return found


def failed(c: Cluster, name: str) -> events.AskAdvice:
    c.end(name, ok=False, raised="OSError: [Errno 5] Input/output error")
    (question,) = asked(c, events.OfFailure)
    return question


def expect(c: Cluster, function: str, **by_kind: float) -> None:
    costs = {kind: events.ContextAdvice(run_s=seconds) for kind, seconds in by_kind.items()}
    c.event(events.AdviceArrived(events.OfFunction(function, "bare"), events.CostAdvice(costs)))


def judge(c: Cluster, about: events.About, verdict: events.VerdictAdvice = DISK) -> None:
    c.event(events.AdviceArrived(about, verdict, "its log"))


# ---- costs
def test_advised_run_time_counts_until_a_run_is_measured(cluster: Make) -> None:
    c = cluster(pilots=1).call("1")
    expect(c, "f", cpu=4.0, gpu=9.0)
    assert c.the_call("1").group.cost.run_s == 4.0  # the advice for the device kind of the pilots
    c.ready().end("1", run_s=2.0).call("2")
    assert c.the_call("2").group.cost.run_s == 2.0
    expect(c, "f", cpu=100.0)
    assert c.the_call("2").group.cost.run_s == 2.0


def test_long_call_avoids_a_pilot_that_ends_soon(cluster: Make) -> None:
    c = cluster().join("p1", ends_in_s=1000.0).call("1").ready().end("1", run_s=1.0).define(recipe("a"))
    c.tell("ana", say.DefineFunction("slow", "slow", b"code"))
    c.call("2")  # this call occupies the library
    c.call("3", function="slow")
    expect(c, "slow", gpu=900.0)  # advice for another kind is better than none
    c.wait(200.0)
    c.end("2", run_s=200.0)
    assert c.waiting() == ["3"]


def test_advice_for_an_unknown_or_wrong_subject_changes_nothing(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready()
    cost = events.CostAdvice({"": events.ContextAdvice(run_s=5.0)})
    c.event(events.AdviceArrived(events.OfFunction("gone", "bare"), cost))
    c.advise("gone", cost.by_kind)
    c.event(events.AdviceArrived(events.OfPace(99, 7), events.PaceAdvice(1.0, 2.0, "step")))
    c.event(events.AdviceArrived(events.OfContext("bare"), DISK))
    assert c.refused == {"advice on an unknown context": 1, "VerdictAdvice does not fit the subject of the advice": 1}
    c.end("1")
    assert c.ended["1"].ok


def test_explain_shows_the_advised_load_time_and_its_source(cluster: Make) -> None:
    c = cluster().define(recipe("a"))
    c.advise("a", {"cpu": events.ContextAdvice(load_s=40.0)}, source="similar recipes")
    assert "a load is expected to take 40 s, according to similar recipes" in c.story("a")


# ---- order
def shortest(cluster: Make) -> Cluster:
    c = cluster(pilots=1, policies=find_shipped_policy("shortest-first").make)
    c.tell("ana", *(say.DefineFunction(name, name, b"code") for name in ("long", "short")))
    return c.call("0").ready()


def test_shortest_first_sorts_again_when_run_times_are_known(cluster: Make) -> None:
    c = shortest(cluster).call("l1", "l2", function="long").call("s1", "s2", function="short")
    assert c.waiting() == ["l1", "l2", "s1", "s2"]
    expect(c, "long", cpu=50.0)
    expect(c, "short", cpu=1.0)
    assert c.waiting() == ["s1", "s2", "l1", "l2"]
    c.call("urgent", function="long", priority=1)
    assert c.waiting() == ["urgent", "s1", "s2", "l1", "l2"]
    for name in ("0", "urgent", "s1", "s2", "l1"):
        c.end(name, run_s=1.0 if name.startswith("s") else 50.0)
    assert c.held() == ["l2"]


def test_restarted_core_asks_again_about_unmeasured_functions(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("1", context="a").call("2").ready().end("2")
    asked(c, events.OfContext)
    asked(c, events.OfFunction)
    c.event(events.ManagerRestarted())
    assert events.OfContext("a") not in [each.about for each in asked(c, events.OfContext)]  # loaded
    assert [each.about for each in asked(c, events.OfFunction)] == [events.OfFunction("f", "a")]


def test_short_calls_pass_a_long_call_for_ten_times_its_run_time(cluster: Make) -> None:
    c = shortest(cluster).call("long", function="long")
    expect(c, "long", cpu=50.0)
    expect(c, "short", cpu=1.0)
    c.wait(400.0).call("early", function="short")
    c.wait(200.0).call("late", function="short")
    assert c.waiting() == ["early", "long", "late"]


# ---- failures
def test_failure_is_sent_to_the_advisor_with_log_and_exception(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready()
    library = c.library()
    question = failed(c, "1")
    assert question.about == events.OfFailure("p1", library.id, c.ids["1"], ("cpu:0",))
    assert question.name == "f"
    assert question.said == "OSError: [Errno 5] Input/output error"
    assert not c.ended["1"].ok  # the client already has the result


@pytest.mark.parametrize("kind", sorted(blame.SELF_EXPLAINING_FAILURES, key=lambda each: each.value))
def test_failures_with_a_known_cause_are_not_sent_to_the_advisor(cluster: Make, kind: FailureKind) -> None:
    c = cluster(pilots=1).call("1").ready()
    c.end("1", failure=Failure(kind, "it was so"))
    assert asked(c, events.OfFailure) == []


def test_advisor_gets_only_the_log_section_of_the_failed_call(cluster: Make) -> None:
    c = printing_pilot(cluster)
    library = c.library()
    died = Failure(FailureKind.MEMORY, "it took too much", "p1", library.id, log="/logs/p1/lib-1.log")
    c.end("1", failure=died)
    (question,) = asked(c, events.OfFailure)
    assert (question.log, question.start, question.end) == ("", 0, 0)
    printed = OutputRange("/logs/x.log", 7, 9)
    c.call("2").wait(blame.SECOND_QUESTION_AFTER_S).end("2", failure=msgspec.structs.replace(died, printed=printed))
    (question,) = asked(c, events.OfFailure)
    assert (question.log, question.start, question.end) == ("/logs/x.log", 7, 9)
    assert "printed /logs/x.log:7-9" in c.story(format_call_id(c.ids["2"]))


def test_repeated_failures_ask_the_advisor_twice_then_once_a_minute(cluster: Make) -> None:
    c = cluster(pilots=1).calls(7).ready()
    failed(c, "1")
    c.end("2", ok=False)
    assert asked(c, events.OfFailure) == []
    c.wait(blame.SECOND_QUESTION_AFTER_S).end("3", ok=False)
    assert len(asked(c, events.OfFailure)) == 1
    c.wait(blame.SECOND_QUESTION_AFTER_S).end("4", ok=False)
    assert asked(c, events.OfFailure) == []
    c.wait(blame.QUESTION_INTERVAL_S).end("5", ok=False)
    assert len(asked(c, events.OfFailure)) == 1


def test_failed_load_is_sent_to_the_advisor(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("1", context="a")
    c.fail_load(c.library(context="a"))
    (question,) = asked(c, events.OfFailure)
    assert isinstance(question.about, events.OfFailure)
    assert question.about.call == blame.NO_CALL
    assert question.name.startswith("a")


def test_explain_shows_a_certain_verdict_for_its_call_and_pilot(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready()
    about = failed(c, "1").about
    judge(c, about, msgspec.structs.replace(DISK, sure=0.49))
    assert "sure" not in c.story(format_call_id(c.ids["1"])) + c.story("p1")
    judge(c, about)
    why = "infrastructure (disk), 92% sure: a disk or file server failed"
    subject = format_call_id(c.ids["1"])
    assert f"why it failed: {why}" in c.story(subject)
    assert f"why {subject} failed: {why}" in c.story("p1")


# ---- quarantine
def cluster_with_failing_pilot(cluster: Make, *, pilots: int = 3) -> tuple[Cluster, str]:
    c = cluster(pilots=pilots).calls(pilots + 4).ready()
    bad = c.pilot_of("1")
    judge(c, failed(c, "1").about)
    assert not c.pilot(bad).devices["cpu:0"].fault
    again = c.held(bad)[0]
    c.wait(blame.QUESTION_INTERVAL_S)
    judge(c, failed(c, again).about)
    return c, bad


def test_pilot_that_fails_calls_is_quarantined_for_ten_minutes(cluster: Make) -> None:
    c, bad = cluster_with_failing_pilot(cluster)
    library = c.library(bad)
    assert library.state is LibraryState.STOPPING
    running = c.held(bad)
    assert "cpu:0 quarantined for 10 min: 2 failures within 10 min: a disk or file server failed" in c.story(bad)
    c.forget().end(*running)  # calls that run on the quarantined device end there
    assert all(c.ended[name].ok for name in running)
    c.report(bad, say.LibraryGone(library.id, None, False, (), ()))
    c.calls(3).forget()
    c.wait(590.0)
    assert not c.pilot(bad).libraries
    c.wait(20.0)
    assert not c.pilot(bad).devices["cpu:0"].fault
    assert "cpu:0 may be used again" in c.story(bad)


def test_device_fault_reported_by_a_pilot_outlasts_a_quarantine(cluster: Make) -> None:
    c, bad = cluster_with_failing_pilot(cluster)
    c.report(bad, say.DeviceFault("cpu:0", "ECC"))
    c.wait(700.0)
    assert c.pilot(bad).devices["cpu:0"].fault == "ECC"
    c.report(bad, say.DeviceFault("cpu:0", ""))
    assert not c.pilot(bad).devices["cpu:0"].fault


def test_two_quarantines_of_one_pilot_end_at_their_own_times(cluster: Make) -> None:
    c = cluster(pilots=1, devices_each=2)
    c.by_hand = True
    both = c.pilot().devices.values()
    for device in both:
        c.apply([Quarantine(c.pilot().id, device.id, "it fails", 600.0)], seam="residency")
        c.wait(500.0).status()
    assert [bool(device.fault) for device in both] == [False, True]
    c.wait(200.0)
    assert [bool(device.fault) for device in both] == [False, False]


def test_calls_wait_for_a_quarantine_if_no_other_pilot_can_run_them(cluster: Make) -> None:
    c = cluster(pilots=2).join("gpu", of=devices(1, kind="A100")).define(recipe("a", kinds=("A100",)))
    c.call("1", context="a").ready()
    library, c.by_hand = c.library("gpu", "a"), True
    c.apply([Quarantine(c.pilot("gpu").id, None, "it fails", 600.0)], seam="residency")
    c.end("1").report("gpu", say.LibraryGone(library.id, None, False, (), ()))
    c.call("2", context="a").wait(300.0)
    assert "2" not in c.ended
    c.wait(310.0).ready().end("2")
    assert c.ended["2"].ok


def test_only_pilot_is_not_quarantined(cluster: Make) -> None:
    c, bad = cluster_with_failing_pilot(cluster, pilots=1)
    assert not c.pilot(bad).devices["cpu:0"].fault


def test_calls_that_fail_on_every_pilot_quarantine_no_pilot(cluster: Make) -> None:
    c = cluster(pilots=3).calls(9).ready()
    for name in ("1", "2", "3"):
        judge(c, failed(c, name).about)
    c.wait(blame.QUESTION_INTERVAL_S)
    for pilot in ("p1", "p2", "p3"):
        judge(c, failed(c, c.held(pilot)[0]).about)
    assert not any(device.fault for pilot in c.core.state.pilots.values() for device in pilot.devices.values())


def test_user_errors_and_uncertain_verdicts_quarantine_nothing(cluster: Make) -> None:
    c = cluster(pilots=2).calls(8).ready()
    bad = c.pilot_of("1")
    for verdict in (
        events.VerdictAdvice("user", "code", 0.99, "it raised"),
        events.VerdictAdvice("infrastructure", "disk", 0.6, "?"),
    ):
        for _ in range(3):
            judge(c, failed(c, c.held(bad)[0]).about, verdict)
            c.wait(blame.QUESTION_INTERVAL_S)
    assert not c.pilot(bad).devices["cpu:0"].fault


def test_only_the_lost_gpu_is_quarantined(cluster: Make) -> None:
    c = cluster(pilots=1, devices_each=2).calls(6).ready()
    library = c.holders("1")[0]
    judge(c, failed(c, "1").about, GPU)
    c.wait(blame.QUESTION_INTERVAL_S)
    judge(c, failed(c, next(c.names[id] for id in library.held)).about, GPU)
    faults = {device.id: bool(device.fault) for device in c.pilot().devices.values()}
    assert faults == {device.id: device in library.devices for device in c.pilot().devices.values()}


# ---- paces
def printing_pilot(cluster: Make) -> Cluster:
    c = cluster()
    c.hello("p1", folder="/logs/p1")
    return c.call("1").ready()


def test_silent_long_running_call_is_sent_to_the_advisor(cluster: Make) -> None:
    c = printing_pilot(cluster)
    library = c.library()
    c.wait(2 * blame.OUTPUT_QUESTION_INTERVAL_S + 1)
    question = asked(c, events.OfPace)[0]
    assert question.about == events.OfPace(library.id, c.ids["1"])
    assert question.log == f"/logs/p1/lib-{library.id}.log"
    c.forget().event(events.AdviceArrived(question.about, events.PaceAdvice(90.0, 200.0, "step", 3.0, 36.0)))
    told = c.hears("ana", to_client.ProgressReports)
    assert told.reports == [CallProgress(c.ids["1"], 90.0, 200.0)]
    assert "90 of 200 done" in c.story(format_call_id(c.ids["1"]))
    c.end("1")
    assert c.core.state.printed_progress == {}


def test_call_that_reports_progress_is_not_sent_to_the_advisor(cluster: Make) -> None:
    c = printing_pilot(cluster)
    c.progress("1", 1.0, 2.0).wait(5 * blame.OUTPUT_QUESTION_INTERVAL_S)
    assert asked(c, events.OfPace) == []


def test_advisor_question_skips_the_output_of_the_previous_call(cluster: Make) -> None:
    c = printing_pilot(cluster)
    library = c.library()
    c.end("1", printed=OutputRange("/logs/p1/lib-1.log", 10, 400)).call("2").wait(3 * blame.OUTPUT_QUESTION_INTERVAL_S)
    question = asked(c, events.OfPace)[0]
    assert (question.about, question.start) == (events.OfPace(library.id, c.ids["2"]), 400)
    c.tell("ana", say.AskStory(format_call_id(c.ids["2"])), numbered=False)
    assert c.hears("ana", to_client.Story).runs_from == 400


def test_progress_advice_with_impossible_numbers_is_ignored(cluster: Make) -> None:
    c = printing_pilot(cluster)
    for done, total in ((float("nan"), 200.0), (1.0, float("inf")), (0.0, 0.0)):
        c.event(events.AdviceArrived(events.OfPace(c.library().id, c.ids["1"]), events.PaceAdvice(done, total, "step")))
    assert c.core.state.printed_progress == {}


def test_advisor_timer_runs_only_while_calls_with_logs_run(cluster: Make) -> None:
    c = cluster(pilots=1).call("1").ready()
    assert blame.OUTPUT_TIMER not in c.core.state.timers, "its pilot has no logs"
    c = printing_pilot(cluster)
    assert blame.OUTPUT_TIMER in c.core.state.timers
    c.end("1").wait(2 * blame.OUTPUT_QUESTION_INTERVAL_S)
    assert blame.OUTPUT_TIMER not in c.core.state.timers
