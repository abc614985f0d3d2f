from __future__ import annotations

import pytest
from live.peers import Manager, Peers, until, welcomed

from stoker.contexts.performance import Availability
from stoker.manager.core.events import (
    AskAdvice,
    CostAdvice,
    OfContext,
    RecordLoad,
    RecordPace,
    RecordPilots,
    RecordRuns,
    RecordStay,
    RecordWait,
)
from stoker.manager.live.advisor import SessionHistory, open_availability_store, open_performance_store
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import PilotEnd
from stoker.protocol.ids import RecipeKey
from stoker.protocol.session import SessionFolder

SITE = """
name = "here"
[provider]
poll = "0.2 s"
[pilot]
devices = "cpu:1"
[policy]
provisioning = "fixed"
"""


def of(source: str) -> Availability:
    store = open_availability_store()
    try:
        return store.availability_of_source(source)
    finally:
        store.close()


def test_each_kind_of_record_is_stored_and_read_back() -> None:
    history, key = SessionHistory(session="k3v9"), RecipeKey("r")
    history.store_record(RecordLoad(key, "llm", "cpu", 1.0, 9.0, 5, 6, 0))
    history.store_record(RecordRuns(key, "verify", "cpu", 4, 8.0))
    history.store_record(RecordRuns(key, "verify", "cpu", 0, 0.0))
    for size, pace_s in ((1, 0.4), (1, 0.6), (2, 0.3)):
        history.store_record(RecordPace(key, "cpu", size, pace_s))
    history.store_record(RecordWait("pool", 60.0, 5.0, "NVIDIA A10", 2, 24_000_000_000))
    history.store_record(RecordPilots("pool", 1))
    history.store_record(RecordStay("pool", 900.0, PilotEnd.LOST))
    history.store_record(RecordPilots("pool", 0))
    advice = history.find_advice(AskAdvice(OfContext(key)))
    assert isinstance(advice.advice, CostAdvice)
    assert advice.advice.by_kind["cpu"].paces == {1: pytest.approx(0.5), 2: 0.3}
    history.close()
    store = open_performance_store()
    estimate = store.estimates("r")["cpu"]
    assert (estimate.load_s, estimate.start_s, estimate.run_s, estimate.runs) == (9.0, 1.0, 2.0, 1)
    assert estimate.calls == {"verify": 4}
    assert [found.recipe for found in store.recipes_of("verify")] == ["r"]
    assert store.list_functions() == ["verify"]
    store.close()
    seen = of("pool")
    assert [(wait.wait_s, wait.boot_s, wait.devices.count) for wait in seen.waits] == [(60.0, 5.0, 2)]
    assert [(stay.stay_s, stay.ended) for stay in seen.stays] == [(900.0, "lost")]
    assert [(counted.session, counted.pilots) for counted in seen.counts] == [("k3v9", 1), ("k3v9", 0)]


@pytest.fixture
def folder(folder: SessionFolder) -> SessionFolder:
    (folder.sites / "here.toml").write_text(SITE)
    return folder


def test_wait_and_boot_time_of_a_pilot_source_are_recorded(
    folder: SessionFolder, manager: Manager, peers: Peers
) -> None:
    [client] = welcomed(peers, "client")
    until(lambda: of("here").waits, seconds=60, what="a pilot of the source")
    client.send(say.EndSession("test is over"))
    assert manager.ended(seconds=30) == 0
    seen = of("here")
    assert [wait.devices.kind for wait in seen.waits] == ["cpu"]
    assert seen.waits[0].devices.count == 1
    assert seen.waits[0].devices.memory_bytes > 0
    assert 0.0 < seen.waits[0].wait_s + seen.waits[0].boot_s < 60.0
    assert [stay.ended for stay in seen.stays] == ["let go"]
    assert [counted.pilots for counted in seen.counts] == [1, 0]
