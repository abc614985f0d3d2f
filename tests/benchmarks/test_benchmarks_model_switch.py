"""The report of `model_switch` from its sides' numbers."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.serving import model_switch
from benchmarks.serving.model_switch import first_piece
from benchmarks.tables import Verdict


@pytest.mark.parametrize(("copied_s", "verdict"), [(1.0, Verdict.MET), (2.0, Verdict.MISSED)])
def test_a_model_that_sleeps_is_judged_with_its_weights_copied(
    copied_s: float, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = {
        "asleep": {"asleep": [0.1, 0.1, 0.1], "copied": [copied_s, copied_s, 99.0], "weights_bytes": 5 * 10**8},
        "snapshot": {"seconds": [4.0], "hot": [0.05]},
        "nothing": {"seconds": [16.0], "hot": [0.05]},
    }

    def run_side(_module: str, way: str, *_: str) -> dict[str, Any]:
        return sides[way]

    monkeypatch.setattr(model_switch, "run_side", run_side)
    monkeypatch.setattr(model_switch, "missing", lambda *_: "")
    copied, asleep, snapshot, hot = model_switch.measure(lambda _: None).lines
    assert copied.verdict() is verdict
    assert copied.cells["ratio"] == [16.0 / copied_s] * 3
    assert asleep.cells["ratio"] == [160.0] * 3
    assert snapshot.cells["ratio"] == [4.0] * 3
    assert {line.verdict() for line in (asleep, snapshot, hot)} == {Verdict.NO_BAR}


def test_the_first_piece_counts_and_the_others_are_read() -> None:
    pieces = iter(["a", "b", "c"])
    assert first_piece(pieces, since=0.0) > 0
    assert next(pieces, None) is None
