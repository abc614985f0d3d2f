"""Test the transfer plan in virtual time: its duration, and its completion under any loss."""

from __future__ import annotations

import sys

from core.builders import SESSION
from core.swarm import PART_BYTES, Swarm

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core.events import FromPilot, PilotLost
from stoker.manager.core.reactor import Core
from stoker.manager.policies import default_policies
from stoker.protocol import to_manager as say
from stoker.protocol import wire

MODEL = ObjectRef("file-model", 64 * PART_BYTES, "/models/model")
ONE_COPY_S = MODEL.size_bytes / 125e6


def names(count: int) -> list[str]:
    return [f"p{n}" for n in range(count)]


def ends(swarm: Swarm, ref: ObjectRef = MODEL) -> list[float]:
    assert not swarm.waiting()
    return [pilot.done[ref.name] for pilot in swarm.pilots.values()]


def copies(swarm: Swarm, ref: ObjectRef = MODEL) -> float:
    return swarm.origin_bytes[ref.name] / ref.size_bytes


def test_forty_pilots_get_an_object_in_little_over_two_copy_times() -> None:
    count = 40
    swarm = Swarm().join(*names(count)).want(*names(count), refs=[MODEL]).run()
    assert max(ends(swarm)) <= 2.25 * ONE_COPY_S
    assert copies(swarm) == 1.0
    assert swarm.most_readers[MODEL.name] == 1
    assert sum(pilot.told for pilot in swarm.pilots.values()) <= 2 * count
    swarm.check()


def test_loss_of_readers_and_sources_delays_transfers_little() -> None:
    swarm = Swarm().join(*names(24)).want(*names(24), refs=[MODEL])
    for at, name in ((0.4, "p0"), (0.8, "p1"), (0.9, "p5"), (1.2, "p2"), (1.5, "p9")):
        swarm.run(until=at)
        swarm.kill(name)
    swarm.run()
    assert max(ends(swarm)) <= 3 * ONE_COPY_S
    assert copies(swarm) <= 1.5  # parts that only the lost pilot had are read again
    assert swarm.most_readers[MODEL.name] == 1


def test_two_network_partitions_read_the_origin_at_most_six_times() -> None:
    here, there = names(16)[:8], names(16)[8:]
    swarm = Swarm(fail_s=0.2).join(*here, *there)
    for one in here:
        for other in there:
            swarm.wall(one, other)
    swarm.want(*here, *there, refs=[MODEL]).run()
    ends(swarm)
    assert copies(swarm) <= 6.0


def calls_of_a_crowd(count: int) -> int:
    """Count Python calls of the core while `count` pilots join, fetch an object and leave."""
    core = Core(SESSION, default_policies())
    hellos = [say.PilotHello(wire.VERSION, SESSION, name, 7, (), peer=f"{name}:1") for name in names(count)]
    want = say.WantObjects((MODEL,))
    here = say.ObjectsCached((say.ObjectArrival(MODEL.name, MODEL.size_bytes),))
    made = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event == "call"

    sys.setprofile(counted)
    try:
        for messages in ([[hello] for hello in hellos], [[want]] * count, [[here]] * count):
            for name, said in zip(names(count), messages, strict=True):
                core.handle(FromPilot(name, 0, list(said)), 0.0)
        for name in names(count):
            core.handle(PilotLost(name, "over"), 1.0)
    finally:
        sys.setprofile(None)
    return made


def test_planning_work_of_transfers_grows_linearly_with_pilots() -> None:
    assert calls_of_a_crowd(400) < 2.5 * calls_of_a_crowd(200)
