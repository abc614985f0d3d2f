from __future__ import annotations

import pytest

from benchmarks.baselines.infless import Traffic


def test_keep_alive_combines_a_long_and_a_short_histogram() -> None:
    traffic = Traffic(long_s=1000.0, short_s=100.0)
    assert traffic.keep_s(0.0, gamma=0.5, tail=0.99) is None
    for n in range(10):
        traffic.add_arrival(40.0 * n)
    for n in range(10):
        traffic.add_arrival(400.0 + 5.0 * n)
    assert traffic.keep_s(450.0, gamma=1.0, tail=0.99) == 40.0
    assert traffic.keep_s(450.0, gamma=0.0, tail=0.99) == pytest.approx(40.0)
    assert traffic.keep_s(500.0, gamma=0.0, tail=0.99) == 5.0
    assert traffic.keep_s(500.0, gamma=0.5, tail=0.99) == pytest.approx(22.5)
