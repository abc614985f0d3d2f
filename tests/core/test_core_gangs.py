from __future__ import annotations

import pytest
from core.builders import DIED, Cluster, Make, devices
from core.builders import cluster as make_cluster

from stoker.manager.core import gangs
from stoker.manager.core.events import ContextAdvice, RecordPace
from stoker.manager.core.nouns import CallState, Gang
from stoker.manager.core.per_context import Paces, amount_of_work
from stoker.manager.core.seams import Forecast, PolicyError
from stoker.protocol import to_client, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import Source
from stoker.protocol.calls import CallEnd, CallProgress, Failure, FailureKind, Features, GangPlace, Objective
from stoker.protocol.ids import format_call_id

ALONE = Failure(FailureKind.GANG, "connection reset by peer")


@pytest.fixture
def three() -> Cluster:
    made = make_cluster(pilots=3).calls(3).ready().end("1", "2", "3").forget()
    return made.call("g", gang=(2, 3))


def places(made: Cluster) -> dict[str, GangPlace | None]:
    said = {}
    for name in ("p1", "p2", "p3"):
        mail = made.mail.get(name)
        if mail and isinstance(mail[0], to_pilot.RunCalls):
            said[name] = made.hears(name, to_pilot.RunCalls).gang
    return said


def ranks(made: Cluster) -> list[str]:
    return [library.pilot.id for library in made.holders("g")]


def lost(made: Cluster, pilot: str) -> Cluster:
    library = made.library(pilot)
    end = CallEnd(made.ids["g"], False, b"", 2.0, ALONE)
    return made.report(pilot, say.CallsEnded(library.id, [end]))


def test_gang_members_get_ranks_and_the_address_of_rank_0(three: Cluster) -> None:
    order = ranks(three)
    assert places(three) == {name: GangPlace(rank, 3) for rank, name in enumerate(order)}
    three.report(order[1], say.GangMeets(three.library(order[1]).id, three.ids["g"], "10.0.0.2:4000"))
    three.nothing_else_was_said()
    assert three.refused == {"address of rank 0 for a call that is not a gang call": 1}
    three.report(order[0], say.GangMeets(three.library(order[0]).id, three.ids["g"], "10.0.0.1:4000"))
    for name in order[1:]:
        said = three.hears(name, to_pilot.MeetGang)
        assert (said.library, said.call, said.address) == (three.library(name).id, three.ids["g"], "10.0.0.1:4000")
    three.nothing_else_was_said()
    three.cut(order[1]).come_back(order[1], **{f"lib{three.library(order[1]).id}": ("g",)})
    assert three.hears(order[1], to_pilot.MeetGang).address == "10.0.0.1:4000", "it may have missed the first message"


def test_gang_restarts_if_a_member_never_received_the_call(three: Cluster) -> None:
    """The manager was killed after the decision to start the gang, before the message to this member."""
    order = ranks(three)
    three.forget().cut(order[1])
    three.come_back(order[1], **{f"lib{three.library(order[1]).id}": ()})
    told = three.hears(order[0], to_pilot.CancelCalls)
    assert (told.calls, told.running) == ((three.ids["g"],), True)
    assert told.grace_s > 0, "a library is not ended for what is no fault of it"


def test_rank_that_loses_its_connection_does_not_fail_the_gang(three: Cluster) -> None:
    order = ranks(three)
    three.progress("g", 5.0, 10.0, state=b"five done").forget()
    lost(three, order[2])
    assert "g" not in three.ended
    three.let_go()  # each member of the gang stops separately
    call = three.the_call("g")
    assert isinstance(call.holder, Gang)
    assert len(call.holder.members) >= 2
    assert call.spec.progress == b"five done"
    assert "lost its connection to the other ranks: connection reset by peer" in three.story(format_call_id(call.id))


@pytest.mark.parametrize("others_notice_first", [False, True])
def test_gang_that_repeatedly_runs_out_of_node_memory_fails(three: Cluster, others_notice_first: bool) -> None:
    runs = 0
    for _ in range(200):
        if "g" in three.ended:
            break
        if three.the_call("g").holder is None:
            three.wait(60).ready().wait(1)
            continue
        first, *_, last = three.holders("g")
        runs += 1
        text = f"lib-{last.id} was killed by SIGKILL (the node had no memory left: …)"
        failure = Failure(FailureKind.PILOT, text, last.pilot.id, last.id, signal=9)
        gone = say.LibraryGone(last.id, failure, running=(three.ids["g"],))
        if others_notice_first:
            lost(three, first.pilot.id)
        three.report(last.pilot.id, gone)
        three.let_go()
    failure = three.failure("g")
    assert runs == gangs.MAX_BROKEN_RUNS
    said = "connection reset by peer" if others_notice_first else "no memory left"  # the failure that was reported last
    assert said in failure.message
    assert failure.message.startswith("its ranks failed or lost their connection 10 times")
    assert not three.core.state.broken_run_counts


def test_gang_whose_ranks_repeatedly_lose_each_other_fails(three: Cluster) -> None:
    for _ in range(100):
        if "g" in three.ended:
            break
        if three.the_call("g").holder is None:
            three.let_go()
            continue
        lost(three, ranks(three)[0])
    failure = three.failure("g")
    assert failure.kind is FailureKind.GANG
    assert failure.message.startswith("its ranks failed or lost their connection 10 times")
    assert not three.core.state.broken_run_counts


def test_connection_loss_caused_by_a_lost_pilot_is_not_counted(three: Cluster) -> None:
    order = ranks(three)
    lost(three, order[0])
    assert three.core.state.broken_run_counts == {three.ids["g"]: 1}
    three.lose(order[1])
    assert three.core.state.broken_run_counts == {}


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_gang_that_kills_a_library_twice_is_a_poison_call(cluster: Make, rank: int, noticed: bool) -> None:
    """Either the other rank or the pilot reports the library's death first."""
    c = cluster(pilots=1, devices_each=2).call("g", gang=(2, 2)).ready()
    for _ in range(2):
        members = c.holders("g")
        if noticed:
            other = members[1 - rank]
            c.report("p1", say.CallsEnded(other.id, [CallEnd(c.ids["g"], False, b"", 0.1, ALONE)]))
        c.report("p1", say.LibraryGone(members[rank].id, DIED, running=(c.ids["g"],)))
        c.let_go().ready()
    assert c.failure("g").kind is FailureKind.POISON


def test_ranks_that_die_together_count_as_one_death(cluster: Make) -> None:
    c = cluster(pilots=1, devices_each=2).call("g", gang=(2, 2)).ready()
    peer_loss_end = CallEnd(c.ids["g"], False, b"", 0.1, ALONE)
    c.wait(1).report("p1", say.CallsEnded(c.holders("g")[1].id, [peer_loss_end]))
    c.let_go()
    for member in c.holders("g"):
        c.report("p1", say.LibraryGone(member.id, DIED, running=(c.ids["g"],)))
    assert c.the_call("g").get_or_create_history().library_deaths == 1


def test_evicted_gang_resumes_from_its_checkpoint(three: Cluster) -> None:
    order = ranks(three)
    first = three.library(order[0])
    three.forget().report(order[0], say.CallEvicted(first.id, CallProgress(three.ids["g"], 3.0, 9.0, 0.0, b"three")))
    assert three.hears(order[1], to_pilot.CancelCalls).calls == (three.ids["g"],)
    assert three.the_call("g").spec.progress == b"three"


# ---- paces
def test_pace_of_a_gang_is_learned_from_reports_of_rank_0(three: Cluster) -> None:
    for done, rank in ((10.0, 0), (500.0, 1), (30.0, 0)):
        three.wait(5.0).progress("g", done, 100.0, rank=rank)
    paces = three.context().paces
    # The ranks need 2 of the first 5 s to connect. So 10 items take 3 s; the next 20 items take 10 s.
    mean = 0.3 + 0.5 * (0.5 - 0.3)
    assert paces.measured[3][0] == pytest.approx(mean)
    assert three.core.state.reports[three.ids["g"]].done == 30.0


@pytest.mark.parametrize(("done", "state"), [(0.0, b""), (40.0, b"forty done")])
def test_call_is_timed_from_its_first_progress_report(three: Cluster, done: float, state: bytes) -> None:
    three.wait(60.0).progress("g", done, 100.0, state=state).wait(4.0).progress("g", done + 10.0, 100.0)
    assert three.context().paces.max_seconds(3, 100) == pytest.approx(40.0 + three.context().paces.meet_s)


def test_measured_gang_size_is_not_extrapolated_from_other_sizes() -> None:
    paces = Paces()
    paces.use_advised_paces({1: 1.0, 4: 0.5}, meet_s=1.5)
    assert paces.max_seconds(4, 10) == 5.0 + 1.5
    assert paces.max_seconds(3, 10) == pytest.approx(5.0 * (0.05 + 0.95 / 3) / (0.05 + 0.95 / 4) + 1.5)


def test_share_of_items_done_is_learned_per_kind_of_call() -> None:
    paces, plain, searched = Paces(), Features(items=100), Features(items=200, shared_s=5.0)
    for done in (20.0, 60.0, 30.0, 30.0, 30.0, 30.0, 30.0):
        paces.record_processed_share(plain, done)
    assert paces.max_share_left(plain) == 1.0, "too few have ended to tell"
    paces.record_processed_share(plain, 30.0)
    assert paces.max_share_left(plain) == 0.6
    assert paces.max_share_left(plain, 0.5) == pytest.approx(0.1)
    assert paces.max_share_left(plain, 0.7) == pytest.approx(0.3), "it has done more than any before: it may do all"
    assert paces.max_share_left(plain, 0.5, uses_ended_calls=False) == 0.5
    assert paces.max_share_left(searched) == 1.0, "none that looked for a good start has ended"
    assert paces.max_share_left(Features(items=100, kind="all")) == 1.0, "they are told apart"
    assert paces.max_share_left(None) == 1.0
    for _ in range(64):
        paces.record_processed_share(plain, 10.0)
    assert paces.max_share_left(plain) == 0.1, "the one that did 60 was long ago"


def test_work_of_a_call_is_its_items_times_tokens_per_item() -> None:
    assert (amount_of_work(None), amount_of_work(Features(items=5)), amount_of_work(Features(5, 100))) == (
        1.0,
        5.0,
        500.0,
    )


# ---- forecasts
def test_client_gets_another_forecast_only_if_the_forecast_changes() -> None:
    made = make_cluster()
    made.calls(1).forget()
    made.apply([Forecast(made.ids["1"], made.now + 1, True)], seam="dispatch")
    assert not made.core.state.forecasts, "the run time of such a call is unknown"
    made.context().paces.use_advised_paces({1: 1.0})

    def say_it(ends_at: float, *, in_time: bool) -> list[to_client.Forecasts]:
        made.apply([Forecast(made.ids["1"], ends_at, in_time)], seam="dispatch")
        made.tell("ana", say.AskStatus(), numbered=False)
        mail = [x for x in made.mail.get("ana", ()) if isinstance(x, to_client.Forecasts)]
        made.forget()
        return mail

    now = made.now
    assert [(x.ends_at, x.in_time) for x in say_it(now + 100, in_time=True)[0].forecasts] == [(now + 100, True)]
    assert say_it(now + 105, in_time=True) == []
    assert say_it(now + 120, in_time=True) != []
    assert say_it(now + 121, in_time=False) != []
    assert say_it(now + 125, in_time=False) == []
    with pytest.raises(PolicyError, match="there is no call 999"):
        made.apply([Forecast(999, 1.0, True)], seam="dispatch")
    made.tell("ana", say.Cancel([made.ids["1"]]))
    assert not made.core.state.forecasts


def test_lateness_below_the_tolerance_is_not_reported() -> None:
    made = make_cluster().call("c", objective=Objective(deadline_at=60.0))
    made.context().paces.use_advised_paces({1: 1.0})
    name, heard = format_call_id(made.the_call("c").id), []
    for ends_at, in_time in ((60.09, True), (65.9, True), (67.0, False), (60.09, True)):
        made.apply([Forecast(made.ids["c"], made.now + ends_at, False)], seam="dispatch")
        made.tell("ana", say.AskStatus(), numbered=False)
        mail = [x for x in made.mail["ana"] if isinstance(x, to_client.Forecasts)]
        heard += [one.in_time for x in mail for one in x.forecasts]
        made.forget()
        assert ("about at its deadline" if in_time else "7.0 s too late for its deadline") in made.story(name)
    assert heard == [True, False, True], "65.9 s is no news after 60.09 s"


def test_explain_shows_when_a_call_is_expected_to_end() -> None:
    made = make_cluster().call("c", objective=Objective(deadline_at=60.0))
    made.context().paces.use_advised_paces({1: 1.0})
    name = format_call_id(made.the_call("c").id)
    assert "is due in 1 min" in made.story(name)
    made.apply([Forecast(made.ids["c"], made.now + 50, True)], seam="dispatch")
    made.tell("ana", say.AskStatus(), numbered=False).forget()
    assert "is expected to end in 50 s, 10 s before its deadline" in made.story(name)
    made.apply([Forecast(made.ids["c"], made.now + 90, False)], seam="dispatch")
    made.tell("ana", say.AskStatus(), numbered=False).forget()
    assert "is expected to end in 1 min 30 s, 30 s too late for its deadline" in made.story(name)
    made.wait(89.5)
    assert "is expected to end any moment, 30 s too late for its deadline" in made.story(name)


def test_speed_of_other_sessions_is_used_until_a_speed_is_measured() -> None:
    made = make_cluster(pilots=1)
    slow, fast = ContextAdvice(paces={1: 2.0, 2: 1.2}, meet_s=0.5), ContextAdvice(paces={1: 1.0})
    made.advise("bare", {"cpu": fast, "gpu": slow})
    paces = made.context().paces
    assert (paces.max_seconds(1, 10), paces.max_seconds(2, 10)) == (20.0, 12.5)
    paces.add_measurement(1, work=1, seconds=4.0)
    made.advise("bare", {"cpu": fast})
    assert paces.measured[1][0] == pytest.approx(3.0)
    made.calls(1).ready()
    made.end("1").call("g", gang=(1, 2)).end("g", run_s=5.0)
    pace = paces.measured[1][0]
    assert made.commands(RecordPace) == [RecordPace("bare", "cpu", 1, pace)]


def test_waiting_gang_shows_how_many_devices_it_needs_and_has() -> None:
    made = make_cluster(pilots=2).calls(2).ready().end("1", "2").call("g", gang=(3, 3))
    said = made.story(format_call_id(made.the_call("g").id))
    assert "the next call needs 3 devices at once; 2 are hot" in said


# ---- gangs and other calls
def test_calls_for_one_library_overtake_a_gang_that_waits(cluster: Make) -> None:
    made = cluster(pilots=2).calls(2).ready().end("1", "2").forget()
    made.call("gang", gang=(3, 3)).call("small", gang=(2, 2)).call("a").call("b").call("c")
    assert places(made).keys() >= {"p1", "p2"}
    assert made.the_call("small").state is CallState.HELD, "enough libraries are there for it"
    made.end("small")
    assert sorted(made.held("p1") + made.held("p2")) == ["a", "b"]
    made.join("p3").ready(only="p3")
    assert made.the_call("gang").state is CallState.WAITING
    assert made.waiting() == ["gang", "c"]
    made.end("a", "b")
    assert made.the_call("gang").state is CallState.HELD, "nothing else was begun, once as many were there as it needs"
    made.end("gang")
    made.end("c")
    assert all(end.ok for end in made.ended.values())
    assert len(made.ended) == 7


@pytest.mark.parametrize("called", ["before the break", "during the break", "when it was given up"])
def test_gang_that_starts_when_a_pilot_reconnects_starts_once(cluster: Make, *, called: str) -> None:
    """Each rank is sent once, even if the gang starts while the manager reads the hello."""
    made = cluster(pilots=1, devices_each=2).calls(2).ready().end("1", "2")
    here = {f"lib{library.id}": () for library in made.pilot().libraries.values()}
    if called == "before the break":
        made.call("g", gang=(2, 2)).cut("p1")
    else:
        made.cut("p1").call("g", gang=(2, 2))
    if called == "when it was given up":
        made.lose("p1")
    made.forget().come_back("p1", **here)
    orders = [made.hears("p1", to_pilot.RunCalls) for _ in here]
    assert sorted(order.gang.rank for order in orders if order.gang is not None) == [0, 1]
    made.nothing_else_was_said()
    assert [library.id for library in made.holders("g")] == [order.library for order in orders]
    assert all(set(library.held) == {made.ids["g"]} for library in made.holders("g"))


def test_reserved_libraries_of_a_cancelled_gang_are_released(cluster: Make) -> None:
    made = cluster(pilots=2).calls(2).ready().forget()
    made.call("gang", gang=(2, 2)).call("a").end("1")
    assert made.waiting() == ["gang", "a"]
    said = made.story(format_call_id(made.ids["a"]))
    assert "the next call needs 2 devices at once; 1 of 2 hot libraries are free" in said
    made.tell("ana", say.Cancel([made.ids["gang"]]))
    assert made.waiting() == []


@pytest.mark.parametrize("pilots", [1, 2])
def test_gang_that_fits_nowhere_fails_and_names_the_possible_size(cluster: Make, pilots: int) -> None:
    made = cluster().sources(Source("lab", first=1, most=2, slots=1))
    made.join(*(f"p{n}" for n in range(pilots)), block="b1")
    made.call("gang", gang=(4, 4)).call("fits", gang=(2, 2)).call("one")
    failure = made.failure("gang")
    assert failure.kind is FailureKind.NO_DEVICE
    assert "a gang of 4 can run nowhere: at most 2 libraries of context" in failure.message
    assert "or the count of session.warm), or for more devices" in failure.message
    assert set(made.ended) == {"gang"}, "what may still come could give the other one its devices"


def test_gang_waits_while_the_number_of_pilots_is_unknown(cluster: Make) -> None:
    made = cluster(pilots=1).call("gang", gang=(4, 4)).wait(100)
    assert made.ended == {}
    made.tell("ana", say.ParslBlockStates({"0": "running"}, (), 3)).wait(2)
    assert made.failure("gang").kind is FailureKind.NO_DEVICE


def test_gang_waits_for_a_faulty_device_that_may_recover(cluster: Make) -> None:
    made = cluster().sources(Source("lab", first=1, most=1, slots=2)).join("p1", of=devices(2), block="b1")
    made.report("p1", say.DeviceFault("cpu:0", "ECC")).call("gang", gang=(2, 2)).wait(5)
    assert made.ended == {}
