"""What is remembered of a source: how long its blocks waited, how long pilots stayed, how many there were."""

from __future__ import annotations

from collections.abc import Callable

from core.builders import Cluster

from stoker.manager.core.events import RecordPilots, RecordStay, RecordWait
from stoker.protocol import to_client
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import BlockPhase, LossReason, PilotEnd, Rule, Source

Make = Callable[..., Cluster]
FIXED = Source("mine", Rule.FIXED, first=2, most=2)


def stays(c: Cluster) -> list[PilotEnd]:
    return [x.end for x in c.others if isinstance(x, RecordStay)]


def counts(c: Cluster) -> list[int]:
    return [x.pilots for x in c.others if isinstance(x, RecordPilots)]


def test_the_wait_of_a_block_is_that_of_its_first_pilot(cluster: Make) -> None:
    c = cluster().sources(FIXED)
    asked_at = c.now
    c.block("b1", phase=BlockPhase.RUNNING).join("p1", block="b1").join("p2", block="b1")
    waits = [x for x in c.others if isinstance(x, RecordWait)]
    assert len(waits) == 1
    assert (waits[0].source, waits[0].kind, waits[0].devices) == ("mine", "cpu", 1)
    assert 0.0 <= waits[0].wait_s + waits[0].boot_s <= c.now - asked_at
    assert counts(c) == [1, 2]


def test_how_a_stay_ended(cluster: Make) -> None:
    c = cluster().sources(FIXED)
    c.block("b1", "b2", phase=BlockPhase.RUNNING)
    c.join("lost", block="b1").lose("lost")
    c.join("left", block="b1").report("left", say.PilotLeaving("nothing to do"))
    c.join("timed", block="b2", ends_in_s=1000.0).wait(990.0).lose("timed")
    assert counts(c) == [1, 0, 1, 0, 1, 0]
    assert [(x.end, x.loss) for x in c.others if isinstance(x, RecordStay)] == [
        (PilotEnd.LET_GO, None),
        (PilotEnd.LOST, LossReason.UNEXPLAINED),
        (PilotEnd.WALLTIME, None),
    ]


def test_pilots_of_nobody_are_not_remembered(cluster: Make) -> None:
    c = cluster(pilots=2).lose("p1")
    assert not stays(c)
    assert not counts(c)


def test_the_end_of_a_session_ends_every_stay(cluster: Make) -> None:
    c = cluster().sources(FIXED)
    c.block("b1", "b2", phase=BlockPhase.RUNNING)
    c.join("p1", block="b1").join("p2", block="b2").tell("ana", say.EndSession("done"))
    c.hears("ana", to_client.SessionOver)
    assert stays(c) == [PilotEnd.LET_GO, PilotEnd.LET_GO]
    assert counts(c)[-1] == 0
