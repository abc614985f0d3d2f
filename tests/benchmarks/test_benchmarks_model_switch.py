from __future__ import annotations

from typing import Any

import pytest

from benchmarks.serving import model_switch
from benchmarks.serving.model_switch import first_piece
from benchmarks.tables import Verdict


@pytest.mark.parametrize(
    ("asleep_s", "to_file", "to_snapshot"),
    [(0.5, Verdict.MET, Verdict.MET), (0.7, Verdict.MISSED, Verdict.MET), (1.0, Verdict.MISSED, Verdict.MISSED)],
)
def test_wake_time_is_judged_against_both_ways_to_load(
    asleep_s: float, to_file: Verdict, to_snapshot: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = {
        "asleep": {"seconds": [asleep_s, asleep_s, 99.0], "hot": [0.05]},
        "copied": {"seconds": [1.0, 1.0, 99.0], "weights_bytes": 5 * 10**8},
        "snapshot": {"seconds": [4.0], "hot": [0.05]},
        "nothing": {"seconds": [16.0], "hot": [0.05]},
    }

    def run_side(_module: str, way: str, *_: str) -> dict[str, Any]:
        return sides[way]

    monkeypatch.setattr(model_switch, "run_side", run_side)
    monkeypatch.setattr(model_switch, "missing", lambda *_: "")
    asleep, copied, snapshot, beside, hot = model_switch.measure(lambda _: None).lines
    assert (asleep.verdict(), beside.verdict(), copied.verdict()) == (to_file, to_snapshot, Verdict.MET)
    assert asleep.cells["ratio"] == [16.0 / asleep_s] * 3
    assert beside.cells["ratio"] == [4.0 / asleep_s] * 3
    assert snapshot.cells["ratio"] == [4.0] * 3
    assert {line.verdict() for line in (snapshot, hot)} == {Verdict.NO_BAR}


def test_timer_stops_at_the_first_piece_and_later_pieces_are_read() -> None:
    pieces = iter(["a", "b", "c"])
    assert first_piece(pieces, since=0.0) > 0
    assert next(pieces, None) is None
