"""Give each test private folders and processes; leftovers of a session fail the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.world import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.delenv("STOKER_SESSION", raising=False)
    monkeypatch.chdir(tmp_path)
    with World(tmp_path / "world").entered() as world:
        yield world
