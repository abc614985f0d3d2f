"""Events of a simulated session are those of a real one: they can be written into its journal, and read again."""

from __future__ import annotations

from typing import Any

import msgspec
from sim.worlds import calls, model, source, world

from stoker.manager.core.events import Event
from stoker.manager.policies import default_policies
from stoker.manager.sim.run import Simulation
from stoker.manager.sim.world import Files, Links, Rate
from stoker.site import Duration, Size

GB = 1_000_000_000


class Recorded(Simulation):
    """A simulation that keeps its events as a journal does."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.records: list[bytes] = []
        super().__init__(*args, **more)

    def handle(self, event: Event) -> None:
        self.records.append(msgspec.msgpack.encode((self.agenda.now, event)))
        super().handle(event)


def test_every_event_can_be_written_and_read_again() -> None:
    files = (Files("weights", Size(10 * GB), operations=3),)
    context = model(files=files, start_s=Duration(1.0), slots=2, load_cv=0.2, item_cv=0.3)
    pool = source(
        [(0.0, 3), (60.0, 1), (70.0, 3)], walltime_s=Duration(150.0), wait_s=Duration(3.0), boot_s=Duration(2.0)
    )
    links = Links(shared=Rate(1.0 * GB), network=Rate(2.0 * GB), shared_operations=10.0)
    run = Recorded(world(pool, context, links=links), calls(300, every_s=0.5), default_policies())
    assert run.run().complete
    decoder = msgspec.msgpack.Decoder(tuple[float, Event])
    read = [decoder.decode(record) for record in run.records]
    assert [msgspec.msgpack.encode(each) for each in read] == run.records
    seen = {type(message).__name__ for _, event in read for message in getattr(event, "messages", ())}
    assert {"ClientHello", "Submit", "PilotHello", "LibraryReady", "CallsEnded", "BlockUpdate", "ObjectsHere"} <= seen
