from __future__ import annotations

from typing import Any

import pytest
from core.builders import Cluster, Make, devices, recipe

from stoker.manager.core.events import ClientGone, FactoryTrouble, SessionDefined
from stoker.manager.core.nouns import PilotState
from stoker.protocol import to_client, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import BlockPhase, LossReason, ProvisioningRule, Source
from stoker.protocol.ids import ClientId
from stoker.protocol.show_status import describe_blocks_without_pilot

OPEN = Source("backfill", ProvisioningRule.OPPORTUNISTIC, first=0, most=4, keep_pending=2, idle_s=100.0)
FIXED = Source("mine", ProvisioningRule.FIXED, first=2, most=2)


def test_orders_are_sent_to_the_latest_factory(cluster: Make) -> None:
    """A killed factory counts as connected for some seconds; messages to it are lost."""
    c = cluster().sources(OPEN)
    c.client_hello("another", factory=True)
    assert c.hears("another", to_client.KnownBlocks).blocks == ()
    c.call("c1")
    assert [order.block for order in c.hears("another", to_client.SubmitBlocks).orders] == ["b1"]
    assert c.asked() == []
    c.event(ClientGone(ClientId("factory")))
    c.call("c2")
    assert [order.block for order in c.hears("another", to_client.SubmitBlocks).orders] == ["b2"]


def test_reports_of_a_replaced_factory_still_count(cluster: Make) -> None:
    """The manager may read the last frames of a factory after the hello of the next factory."""
    c = cluster().sources(FIXED)
    c.client_hello("another", factory=True)
    c.block("b1", phase=BlockPhase.PENDING)
    assert c.status().jobs[0].phase == "pending"


def test_block_without_a_pilot_names_the_log_to_read(cluster: Make) -> None:
    c = cluster().sources(FIXED)
    c.block("b1", phase=BlockPhase.RUNNING)
    c.call("c-1")
    c.wait(500.0)
    assert "without a pilot" not in c.story("b1")
    c.wait(220.0)
    said = "running for 12 min without a pilot: read the job output"
    assert said in c.story("b1")
    assert said in c.story("c-1")
    c.join("n1", block="b1")
    assert "without a pilot" not in c.story("b1")


def test_block_reports_are_shown_in_the_words_of_the_batch_system(cluster: Make) -> None:
    c = cluster().sources(FIXED)
    c.block("b1", phase=BlockPhase.PENDING, reason="Priority", expected_in_s=660.0)
    shown = c.status().jobs[0]
    assert (shown.block, shown.job, shown.phase, shown.reason) == ("b1", "job-b1", "pending", "Priority")
    assert shown.expected_in_s == 660.0
    assert "pending: Priority, expected to start in 11 min" in c.story("b1")
    c.call("c1")
    assert "pending: Priority" in c.story("c-1")


def test_disconnected_pilot_of_an_ended_block_is_lost_at_once(cluster: Make) -> None:
    c = cluster().sources(FIXED)
    c.block("b1", phase=BlockPhase.RUNNING).join("p1", block="b1")
    c.call("c1").ready().forget().cut("p1")
    assert c.pilot().state is PilotState.CUT
    c.block("b1", phase=BlockPhase.ENDED, reason="preempted by Slurm")
    assert not c.core.state.pilots
    assert c.waiting() == ["c1"]


def test_released_block_is_cancelled_when_its_last_pilot_leaves(cluster: Make) -> None:
    c = cluster().sources(Source("mine", ProvisioningRule.DEMAND, first=1, most=1, nodes=2, idle_s=10.0))
    c.block("b1", phase=BlockPhase.RUNNING).join("p1", "p2", block="b1").forget()
    c.wait(11.0)
    assert "nothing to do for 10 s" in c.hears("p1", to_pilot.Exit).reason
    assert c.hears("p2", to_pilot.Exit).drain
    c.report("p1", say.PilotLeaving("drained"))
    assert not c.mail.get("factory")
    c.report("p2", say.PilotLeaving("drained"))
    assert c.hears("factory", to_client.CancelBlocks).blocks == ("b1",)
    c.block("b1", phase=BlockPhase.ENDED, reason="cancelled")
    assert not c.core.state.blocks


def test_block_reports_are_accepted_only_from_the_factory(cluster: Make) -> None:
    c = cluster().sources(FIXED)
    c.tell("ana", say.BlockUpdate("b1", BlockPhase.RUNNING))
    assert c.core.state.blocks["b1"].phase is BlockPhase.ASKED
    assert c.refused == {"update of blocks from a client that is not the factory": 1}


def test_unresponsive_batch_system_is_shown(cluster: Make) -> None:
    c = cluster().sources(OPEN)
    c.tell("factory", say.SourceTrouble("backfill", "squeue has not answered for 30 s"))
    assert c.status().trouble == {"backfill": "squeue has not answered for 30 s"}
    c.call("c1")
    assert "squeue has not answered for 30 s" in c.story("c-1")
    c.tell("factory", say.SourceTrouble("backfill", ""))
    assert c.status().trouble == {}


def test_missing_factory_is_reported_to_waiting_calls(cluster: Make) -> None:
    c = cluster().event(SessionDefined((FIXED,))).call("c1")
    c.event(FactoryTrouble("blocks are not submitted: the factory has not connected"))
    assert c.status().trouble == {"factory": "blocks are not submitted: the factory has not connected"}
    assert "the factory has not connected" in c.story("c-1")
    assert "the factory has not connected" in c.story("b1")
    c.sources(FIXED)
    assert c.status().trouble == {}
    assert "hello" not in c.story("b1")


# ---- the policy
def test_calls_wait_for_the_remaining_pilots_of_a_block(cluster: Make) -> None:
    """After the first pilot of a block joined, calls wait for its other pilots instead of a second block."""
    c = cluster().sources(
        Source("backfill", ProvisioningRule.OPPORTUNISTIC, first=0, most=4, nodes=4, slots=1, idle_s=100.0)
    )
    c.calls(4)
    assert c.asked() == ["b1"]
    c.block("b1", phase=BlockPhase.RUNNING).join("p1", block="b1", of=devices(1)).ready()
    assert c.asked() == []
    c.join("p2", block="b1", of=devices(1))
    assert c.asked() == []
    c.wait(31.0)  # the two other pilots may never join
    assert c.asked() == ["b2"]


def test_failing_source_is_retried_with_doubling_pauses(cluster: Make) -> None:
    c = cluster().sources(OPEN).call("c1")
    asked: list[tuple[float, str]] = []
    for _ in range(300):
        for id in c.asked():
            asked.append((round(c.now), id))
            c.block(id, phase=BlockPhase.REFUSED, reason="Invalid account")
        if c.ended:
            break
        c.wait(0.1)
    assert [at for at, _ in asked] == [0, 2, 6]
    assert "no pilot could be started: backfill: Invalid account" in c.failure("c1").message


def test_block_without_pilots_is_replaced_though_its_job_runs(cluster: Make) -> None:
    c = cluster().sources(FIXED)
    c.block("b1", "b2", phase=BlockPhase.RUNNING, reason="on n1").join("p1", block="b1").join("p2", block="b2").forget()
    c.lose("p1").wait(59.0)
    assert c.asked() == []
    shown = c.status().jobs[0]
    assert (shown.phase, shown.pilots, shown.emptied_s, shown.leaving) == ("running", (), 59.0, False)
    c.forget().wait(2.0)
    assert c.hears("factory", to_client.CancelBlocks).blocks == ("b1",)
    assert c.asked() == ["b3"]
    assert "its pilots left 1 min ago, but the batch system still lists its job as running" in c.story("b1")
    c.block("b1", phase=BlockPhase.ENDED, reason="is being removed; n1 does not answer")
    assert c.status().losses == {"unexplained": 1}


def test_block_whose_pilot_reconnects_within_its_lease_stays(cluster: Make) -> None:
    c = cluster().sources(FIXED).block("b1", "b2", phase=BlockPhase.RUNNING).join("p1", block="b1")
    c.join("p2", block="b2").forget().lose("p1").wait(30.0).come_back("p1").wait(60.0)
    assert c.asked() == []
    assert c.status().jobs[0].pilots == ("p1",)


def test_lease_in_the_journal_sets_the_grace_time_of_a_block(cluster: Make) -> None:
    """A replay has only events of the journal, so an event must contain the lease."""
    c = cluster().sources(FIXED).event(SessionDefined((FIXED,), lease_s=30.0))
    c.block("b1", "b2", phase=BlockPhase.RUNNING).join("p1", block="b1").join("p2", block="b2").forget()
    c.lose("p1").wait(29.0)
    assert c.asked() == []
    c.wait(2.0)
    assert c.asked() == ["b3"]


def test_requeued_job_gets_its_grace_time(cluster: Make) -> None:
    c = cluster().sources(FIXED).block("b1", "b2", phase=BlockPhase.RUNNING).join("p1", block="b1")
    c.join("p2", block="b2").forget().lose("p1").block("b1", phase=BlockPhase.PENDING, reason="BeginTime").wait(100.0)
    assert list(c.core.state.sources["mine"].coming_blocks) == ["b1"]
    c.block("b1", phase=BlockPhase.RUNNING).wait(100.0)
    assert list(c.core.state.sources["mine"].coming_blocks) == ["b1"], "its new pilot may still come"
    assert c.asked() == []


def test_job_counts_as_running_once_its_pilot_joins(cluster: Make) -> None:
    c = cluster().sources(FIXED).block("b1", phase=BlockPhase.PENDING, reason="Priority").join("p1", block="b1")
    assert c.status().jobs[0].phase == "running"
    assert "running: its first pilot has joined" in c.story("b1")


def test_demand_submits_enough_blocks_for_finish_within(cluster: Make) -> None:
    rule = Source("lab", ProvisioningRule.DEMAND, first=0, most=10, finish_within_s=60.0)
    c = cluster(pilots=1).sources(rule)
    c.call("w").hot(run_s=6.0)
    c.calls(51)
    assert len(c.asked()) == 5  # fifty waiting calls are 300 s of work, due in 60 s


def test_idle_pilot_without_libraries_is_released_first(cluster: Make) -> None:
    c = cluster().sources(Source("lab", ProvisioningRule.OPPORTUNISTIC, first=2, least=1, most=2, idle_s=50.0))
    c.block("b1", "b2", phase=BlockPhase.RUNNING).join("p1", block="b1").join("p2", block="b2")
    c.call("c1").ready().end("c1").forget().wait(60.0)
    [holder] = c.lives_on()
    [other] = {"p1", "p2"} - {holder}
    assert c.hears(other, to_pilot.Exit).drain
    c.wait(220.0)
    assert not c.mail.get(holder)


def test_walltime_too_short_for_a_load_fails_with_the_numbers(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("c1", context="a").hot(context="a", load_s=100.0)
    c.end("c1", run_s=20.0).lose("p1").sources(
        Source("short", ProvisioningRule.OPPORTUNISTIC, first=0, most=2, walltime_s=60.0)
    )
    c.call("c2", context="a")
    assert "takes 1 min 40 s to load and its calls 20 s, longer than a pilot may run" in c.failure("c2").message
    assert c.asked() == []
    long = Source("long", ProvisioningRule.OPPORTUNISTIC, first=0, most=8, walltime_s=6000.0)
    c.sources(long).call("c3", context="a")
    assert [block.source.source.name for block in c.core.state.blocks.values()] == ["long"]


def test_call_fails_after_two_walltimes_end_during_its_load(cluster: Make) -> None:
    short = Source("short", ProvisioningRule.OPPORTUNISTIC, first=0, most=2, walltime_s=60.0, keep_pending=1)
    c = cluster().define(recipe("a")).sources(short).call("c1", context="a")
    asked = 0
    while not c.ended and asked < 10:
        for id in c.asked():
            asked += 1
            pilot = f"p{asked}"
            c.block(id, phase=BlockPhase.RUNNING).join(pilot, block=id, ends_in_s=60.0).wait(50.0)
            library = c.hears(pilot, to_pilot.StartLibrary).library
            assert c.hears(pilot, to_pilot.Exit).drain
            c.report(pilot, say.LibraryGone(library, loading=True)).report(pilot, say.PilotLeaving("walltime"))
            c.block(id, phase=BlockPhase.ENDED, reason="done")
        c.wait(5.0)
    assert asked == 2
    failure = c.failure("c1")
    assert (
        "was still loading after 45 s when its pilot's walltime was over (2 times), longer than a pilot may run"
        in failure.message
    )
    assert "(walltime: short 1 min;" in failure.message


def test_next_source_is_used_while_blocks_wait_long(cluster: Make) -> None:
    first, second = (Source(name, ProvisioningRule.OPPORTUNISTIC, first=0, most=8) for name in ("first", "second"))
    c = cluster().sources(first, second).call("c1")
    assert c.asked() == ["b1"]
    c.block("b1", phase=BlockPhase.PENDING, reason="PartitionDown").wait(25.0)
    assert c.asked() == []
    c.wait(10.0)
    assert c.asked() == ["b2"]
    assert [block.source.source.name for block in c.core.state.blocks.values()] == ["first", "second"]
    c.wait(600.0)
    assert c.asked() == []


def test_another_source_is_used_if_blocks_cannot_fit_a_context(cluster: Make) -> None:
    sources = [Source(name, ProvisioningRule.OPPORTUNISTIC, first=0, most=8) for name in ("small", "large")]
    c = cluster().sources(*sources).define(recipe("huge", device_memory_bytes=64 * 10**9)).calls(1)
    assert c.asked() == ["b1"]
    c.block("b1", phase=BlockPhase.RUNNING).join("p1", block="b1", of=devices(1, memory="8 GB")).ready()
    c.calls(1)
    assert c.asked() == ["b2"]
    c.call("h", context="huge")
    assert c.asked() == ["b3"]
    assert [block.source.source.name for block in c.core.state.blocks.values()] == ["small", "small", "large"]


def test_early_pilot_deaths_delay_requests_and_are_reported(cluster: Make) -> None:
    c = cluster().sources(OPEN).call("c1")
    asked: list[int] = []
    for _ in range(1200):
        for id in c.asked():
            asked.append(round(c.now))
            c.block(id, phase=BlockPhase.RUNNING).join(f"p{id}", block=id).lose(f"p{id}")
            c.block(id, phase=BlockPhase.ENDED, reason="PREEMPTED", loss=LossReason.PREEMPTED)
        c.wait(0.1)
    # no pause after the first loss; then pauses of 2, 4, 8, 16, 32 s, at most a minute
    assert asked == [0, 0, 2, 6, 14, 30, 62]
    assert not c.ended
    assert "7 blocks in a row started pilots that loaded no library" in c.status().trouble["backfill"]
    assert "PREEMPTED" in c.story("c-1")
    c.wait(10.0)
    [id] = c.asked()
    c.block(id, phase=BlockPhase.RUNNING).join("p9", block=id).ready()
    assert c.status().trouble == {}


def test_number_of_blocks_stays_constant_while_work_fluctuates(cluster: Make) -> None:
    c = cluster().sources(OPEN).call("c0")
    blocks = c.asked()
    c.block(*blocks, phase=BlockPhase.RUNNING).join("p1", block=blocks[0]).ready().end("c0")
    for n in range(1, 20):
        # each call comes shortly before the idle block would be released
        c.forget().wait(60.0).call(f"c{n}").end(f"c{n}")
        assert c.asked() == []
        assert not c.mail.get("p1") or not any(isinstance(x, to_pilot.Exit) for x in c.mail["p1"])


def cancelled(c: Cluster) -> list[str]:
    mail = c.mail.get("factory", ())
    return [id for message in mail if isinstance(message, to_client.CancelBlocks) for id in message.blocks]


@pytest.mark.parametrize("rule", [ProvisioningRule.OPPORTUNISTIC, ProvisioningRule.DEMAND])
@pytest.mark.parametrize("least", [0, 1, 2])
def test_queued_blocks_are_cancelled_when_no_call_needs_them(cluster: Make, rule: ProvisioningRule, least: int) -> None:
    source = Source("lab", rule, first=0, least=least, most=3, keep_pending=2, idle_s=600.0, finish_within_s=1.0)
    c = cluster().sources(source).call("runs", "w1", "w2")
    c.block("b1", phase=BlockPhase.RUNNING).join("p1", block="b1", of=devices(1)).ready()
    assert list(c.core.state.sources["lab"].coming_blocks) == ["b2", "b3"]
    c.block("b2", "b3", phase=BlockPhase.PENDING, reason="Priority").wait(300.0)
    assert cancelled(c) == [], "calls still wait"
    c.tell("ana", say.Cancel([c.ids["w1"], c.ids["w2"]])).wait(15.0)
    assert cancelled(c) == []
    c.wait(15.0)
    assert cancelled(c) == ["b2", "b3"][max(0, least - 1) :], "down to min_blocks, of which one runs"
    assert "no call has needed it for 20 s" in c.story("b3")


HOLD: dict[str, Any] = {
    "phase": BlockPhase.PENDING, "reason": "held: over 3072 megabytes", "loss": LossReason.OUT_OF_MEMORY,
    "cause": "memory",
    "advice": 'memory = "3 GB" is too small: the pilot used 3.4 GB; raise [provider] memory in the site file',
}  # fmt: skip
STOPPED = (
    "no more jobs are submitted: jobs were held twice in a row for the same cause: "
    f"over 3072 megabytes; {HOLD['advice']}"
)


def test_two_held_jobs_in_a_row_with_one_cause_stop_the_source(cluster: Make) -> None:
    c = cluster().sources(OPEN).calls(5)
    c.block("b1", phase=BlockPhase.RUNNING).join("p1", block="b1").asked()
    c.lose("p1").block("b1", **HOLD, holds=1).block("b1", **HOLD, holds=1)
    assert c.status().trouble == {"backfill": f"a job was held: over 3072 megabytes; {HOLD['advice']}"}
    c.block("b2", phase=BlockPhase.RUNNING).join("p2", block="b2")
    assert c.core.state.sources["backfill"].stop_reason == ""
    c.forget().lose("p2").block("b2", **HOLD, holds=1)
    assert c.asked() == []
    assert "b1" in cancelled(c)
    assert c.status().trouble["backfill"] == STOPPED
    c.block(*cancelled(c), phase=BlockPhase.ENDED, reason="cancelled").wait(700.0)
    assert c.asked() == []
    assert HOLD["advice"] in c.failure("1").message


def test_held_jobs_that_the_pool_removes_stop_the_source(cluster: Make) -> None:
    c = cluster().sources(OPEN).calls(5)
    c.block("b1", phase=BlockPhase.PENDING).asked()
    c.block("b1", **HOLD, holds=1).block("b1", **HOLD | {"phase": BlockPhase.ENDED}, holds=1)
    c.block("b2", **HOLD | {"phase": BlockPhase.ENDED}, holds=1)
    assert c.status().trouble["backfill"] == STOPPED
    assert "b2" not in cancelled(c), "it is over"


@pytest.mark.parametrize("seen", [True, False])
def test_block_that_is_held_and_released_stops_its_source(cluster: Make, seen: bool) -> None:
    """A pool may release held jobs itself, and the factory may miss a short hold."""
    c = cluster().sources(OPEN).calls(5)
    again = {"cause": "memory", "advice": HOLD["advice"]}
    c.block("b1", phase=BlockPhase.RUNNING).join("p1", block="b1").asked()
    c.lose("p1")
    if seen:
        c.block("b1", **HOLD, holds=1)
    c.block("b1", phase=BlockPhase.RUNNING, holds=1, **again).join("p2", block="b1")
    assert c.core.state.sources["backfill"].stop_reason == ""
    c.forget()
    if seen:
        c.block("b1", **HOLD, holds=2)
        assert c.status().trouble["backfill"] == STOPPED
        assert "b1" in cancelled(c), "its pilot is not waited for: the hold has ended it"
    else:
        c.block("b1", phase=BlockPhase.RUNNING, holds=2, **again)
        assert HOLD["advice"] in c.status().trouble["backfill"]
        assert c.core.state.blocks["b1"].release_reason == "its source is stopped"


def test_held_jobs_not_in_a_row_or_with_other_causes_stop_no_source(cluster: Make) -> None:
    c = cluster().sources(OPEN).calls(5)
    for n, cause in enumerate(["memory", "disk", "", "disk"], 1):
        c.block(f"b{n}", phase=BlockPhase.RUNNING).join(f"p{n}", block=f"b{n}").lose(f"p{n}")
        how = {"cause": cause, "holds": 1, "reason": "held: why"} if cause else {"reason": "preempted"}
        c.block(f"b{n}", phase=BlockPhase.ENDED, **how)
    assert c.core.state.sources["backfill"].stop_reason == ""


def test_suspended_job_is_not_reported_as_without_pilot(cluster: Make) -> None:
    c = cluster().sources(OPEN).calls(1)
    c.block("b1", phase=BlockPhase.RUNNING, reason="suspended").wait(900.0)
    assert "without a pilot" not in c.story("b1")
    assert "1 suspended by the batch system" in describe_blocks_without_pilot(c.status().jobs)


def test_blocks_of_a_source_with_rule_once_are_not_replaced(cluster: Make) -> None:
    once = Source("lab", ProvisioningRule.ONCE, first=2, most=4)
    c = cluster().sources(once)
    assert list(c.core.state.blocks) == ["b1", "b2"]
    c.block("b1", phase=BlockPhase.REFUSED, reason="Invalid account")
    c.block("b2", phase=BlockPhase.RUNNING).join("p1", block="b2").lose("p1")
    c.block("b2", phase=BlockPhase.ENDED, reason="out of walltime")
    c.call("c1").wait(2000.0)
    assert c.asked() == []
    assert "no pilot could be started: lab: out of walltime" in c.failure("c1").message
