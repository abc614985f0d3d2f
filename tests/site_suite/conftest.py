from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """An isolated folder for one run of the suite, which must leave no file or process."""
    with World(tmp_path / "world").entered(limit_s=20) as world:
        yield world
