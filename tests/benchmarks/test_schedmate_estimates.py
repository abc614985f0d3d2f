from __future__ import annotations

from benchmarks.papers.schedmate.estimates import (
    BAR,
    HELD_OUT,
    collection,
    constant_estimates,
    error_shares,
    estimate_rows,
    facts_of,
)


def test_run_time_estimates_beat_every_constant_estimate():
    rows, history = collection(HELD_OUT), collection()
    assert len(rows) >= 60
    rows = rows[::3]
    seconds = [row["run_s"] for row in history]
    assert max(seconds) > 100 * min(seconds)
    said = estimate_rows(rows, history, facts_of([*rows, *history]))
    truth = {row["name"]: row["run_s"] for row in rows}
    under, near, _ = error_shares(truth, {name: each["run_s"] for name, each in said.items()})
    assert under >= BAR
    assert near > 0.8
    for constant in constant_estimates(rows, history, "run_s").values():
        assert error_shares(truth, constant)[1] < near / 2, "no constant is within a factor of two so often"
