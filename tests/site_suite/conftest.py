from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A corner of the machine for one run of the suite; nothing of it may be left."""
    with World(tmp_path / "world").entered(limit_s=20) as world:
        yield world
