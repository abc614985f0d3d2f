from __future__ import annotations

import json
from pathlib import Path

import pytest
import station_soak


@pytest.mark.long
def test_random_operations_are_answered_once(tmp_path: Path) -> None:
    record = station_soak.run(tmp_path, 200, seed=2026)
    said = json.dumps(record, indent=1)
    assert record["ok"], said
    assert set(record["issued"]) == set(station_soak.WEIGHTS), said
    assert min(record["peak_bytes"].values()) > station_soak.CAPACITY // 2, (
        f"the devices were never nearly full: {said}"
    )


def test_size_board_reports_a_device_over_its_memory_capacity(tmp_path: Path) -> None:
    board = station_soak.SizeBoard(str(tmp_path), 100)
    board.write(1, 60, ("cpu:0", "cpu:1"))
    board.write(2, 50, ("cpu:1",))
    assert board.found() == ({"cpu:0": 60, "cpu:1": 110}, ["cpu:1: 110 of 100 after lib-2"])
