"""A lost pilot counts as lost at once; the batch system gives the reason later."""

from __future__ import annotations

import pytest
from core.builders import Cluster, Make

from stoker.manager.core import blocks
from stoker.manager.core.events import RecordPilots, RecordStay, RecordWait
from stoker.protocol import to_client
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import BlockPhase, LossReason, PilotEnd, ProvisioningRule, Source
from stoker.protocol.ids import PilotId

FIXED = Source("mine", ProvisioningRule.FIXED, first=2, most=2)
SIGTERM = say.PilotLeaving("it got SIGTERM", LossReason.SIGNALLED)


def running(cluster: Make) -> Cluster:
    return cluster().sources(FIXED).block("b1", "b2", phase=BlockPhase.RUNNING).join("p1", block="b1")


def recorded(c: Cluster) -> list[tuple[PilotEnd, LossReason | None]]:
    return [(x.end, x.loss) for x in c.commands(RecordStay)]


def gone(c: Cluster, name: str = "p1") -> bool | None:
    pilot = c.core.state.gone_pilots[PilotId(name)]
    return pilot.loss.is_explained if pilot.loss is not None and pilot.is_loss_settled else None


def test_preempted_pilot_that_exits_cleanly_counts_as_lost(cluster: Make) -> None:
    c = running(cluster).report("p1", SIGTERM)
    assert (c.status().lost_pilots, c.status().losses) == (1, {"told to end by a signal": 1})
    assert gone(c) is None, "the batch system may still say why"
    c.block("b1", phase=BlockPhase.ENDED, reason="preempted by Slurm", loss=LossReason.PREEMPTED)
    assert c.status().losses == {"preempted": 1}
    assert recorded(c) == [(PilotEnd.LOST, LossReason.PREEMPTED)]
    assert gone(c) is True


@pytest.mark.parametrize("loss", [x for x in LossReason if not x.is_unspecific])
def test_loss_reason_may_arrive_before_the_pilot_is_lost(cluster: Make, loss: LossReason) -> None:
    c = running(cluster).block("b1", phase=BlockPhase.PENDING, reason="queued again", loss=loss).lose("p1")
    assert c.status().losses == {loss.value: 1}
    assert gone(c) is loss.is_explained


def test_loss_reason_from_before_a_job_restart_is_not_reused(cluster: Make) -> None:
    c = running(cluster).block("b1", phase=BlockPhase.PENDING, loss=LossReason.PREEMPTED).lose("p1")
    c.block("b1", phase=BlockPhase.RUNNING).join("p2", block="b1").lose("p2")
    assert c.status().losses == {"preempted": 1, "unexplained": 1}
    c.wait(blocks.LOSS_REASON_WAIT_S + 1.0)
    assert (gone(c), gone(c, "p2")) == (True, False)


@pytest.mark.parametrize("ends", [False, True])
def test_pilot_loss_without_a_reason_is_recorded_as_unexplained(cluster: Make, ends: bool) -> None:
    c = running(cluster).lose("p1")
    assert (gone(c), recorded(c)) == (None, [])
    c.block("b1", phase=BlockPhase.ENDED, reason="killed by signal 9") if ends else c.wait(
        blocks.LOSS_REASON_WAIT_S + 1.0
    )
    assert (gone(c), recorded(c)) == (False, [(PilotEnd.LOST, LossReason.UNEXPLAINED)])


def test_pilot_lost_near_the_end_of_its_walltime_is_out_of_walltime(cluster: Make) -> None:
    c = cluster().sources(FIXED).block("b1", phase=BlockPhase.RUNNING).join("p1", block="b1", ends_in_s=40.0)
    c.now += 35.0
    c.lose("p1").wait(blocks.LOSS_REASON_WAIT_S + 1.0)
    assert c.status().losses == {"out of walltime": 1}
    assert recorded(c) == [(PilotEnd.WALLTIME, LossReason.WALLTIME)]


def test_reconnected_pilot_does_not_count_as_lost(cluster: Make) -> None:
    c = running(cluster).lose("p1").come_back("p1")
    assert (c.status().lost_pilots, c.status().losses) == (0, {})
    assert c.status().jobs[0].pilots == ("p1",)
    c.wait(blocks.LOSS_REASON_WAIT_S + 1.0)
    assert recorded(c) == []


def test_killed_pilot_of_a_cancelled_job_counts_as_lost(cluster: Make) -> None:
    c = running(cluster).call("c1")
    c.report("p1", say.LibraryGone(c.library().id, None, loading=True)).lose("p1")
    c.block("b1", phase=BlockPhase.ENDED, reason="cancelled", loss=LossReason.CANCELLED)
    assert c.status().losses == {"cancelled": 1}


def counts(c: Cluster) -> list[int]:
    return [x.pilots for x in c.commands(RecordPilots)]


def test_queue_wait_of_a_block_ends_with_its_first_pilot(cluster: Make) -> None:
    c = cluster().sources(FIXED)
    asked_at = c.now
    c.block("b1", phase=BlockPhase.RUNNING).join("p1", block="b1").join("p2", block="b1")
    waits = c.commands(RecordWait)
    assert len(waits) == 1
    assert (waits[0].source, waits[0].kind, waits[0].devices) == ("mine", "cpu", 1)
    assert 0.0 <= waits[0].wait_s + waits[0].boot_s <= c.now - asked_at
    assert counts(c) == [1, 2]


def test_end_of_a_pilot_is_recorded_with_its_reason(cluster: Make) -> None:
    c = cluster().sources(FIXED)
    c.block("b1", "b2", phase=BlockPhase.RUNNING)
    c.join("lost", block="b1").lose("lost")
    c.join("left", block="b1").report("left", say.PilotLeaving("nothing to do"))
    c.join("timed", block="b2", ends_in_s=1000.0).wait(990.0).lose("timed")
    assert counts(c) == [1, 0, 1, 0, 1, 0]
    assert recorded(c) == [
        (PilotEnd.RELEASED, None),
        (PilotEnd.LOST, LossReason.UNEXPLAINED),
        (PilotEnd.WALLTIME, None),
    ]


def test_end_of_a_session_records_the_end_of_every_pilot(cluster: Make) -> None:
    c = running(cluster).join("p2", block="b1").join("p3", block="b2").lose("p2").tell("ana", say.EndSession("done"))
    c.hears("ana", to_client.SessionOver)
    assert recorded(c) == [(PilotEnd.LOST, LossReason.UNEXPLAINED), *[(PilotEnd.RELEASED, None)] * 2]
    assert counts(c)[-1] == 0
