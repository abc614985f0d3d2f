"""Pilots in network namespaces of their own, a real manager and a real seed: the bytes really cross a network."""

from __future__ import annotations

import pytest

from benchmarks.network import why_not
from benchmarks.paired import run_side

SIZE = 12_000_000


@pytest.mark.slow
def test_an_object_leaves_its_host_once() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    found = run_side(
        "benchmarks.transfers_side", "--pilots", "3", "--bytes", str(SIZE), "--rate", "100mbit", timeout_s=300
    )
    assert SIZE <= found["origin_bytes"] <= 1.1 * SIZE
    assert found["origin_bytes"] + found["peer_bytes"] >= 3 * SIZE
    assert found["link_bytes"] <= 1.25 * SIZE  # with all that manager and pilots say to each other
