"""`cluster`, and whatever it made is replayed when its test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core import builders


@pytest.fixture
def cluster() -> Iterator[Callable[..., builders.Cluster]]:
    made: list[builders.Cluster] = []

    def make(**options: Any) -> builders.Cluster:
        made.append(builders.cluster(**options))
        return made[-1]

    yield make
    for desk in made:
        desk.check()
