from __future__ import annotations

import pytest

from benchmarks.engine.transfers import side, why_not
from benchmarks.harness import run_side

SIZE = 12_000_000


pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _network() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


def test_object_is_read_from_its_source_only_once_for_all_pilots() -> None:
    found = run_side(side, pilots=3, size=SIZE, rate="100mbit", timeout_s=300)
    assert SIZE <= found["origin_bytes"] <= 1.1 * SIZE
    assert found["origin_bytes"] + found["peer_bytes"] >= 3 * SIZE
    assert found["link_bytes"] <= 1.25 * SIZE  # includes messages between manager and pilots


def test_pilots_that_cannot_reach_each_other_use_the_source() -> None:
    found = run_side(side, pilots=2, size=SIZE, rate="1gbit", parted=True, timeout_s=200)
    assert found["origin_bytes"] == 2 * SIZE
    assert found["peer_bytes"] == 0
    said = " ".join(found["status"].split())
    assert "Pilots cannot reach each other" in said
    assert "cannot be reached" in said
    assert "[session] interface" in said  # the advice
