"""Fixtures `cluster`, `peers` and `toy`, whose events are replayed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core import builders
from core.told import Peers
from core.toy import Toy


@pytest.fixture
def cluster() -> Iterator[Callable[..., builders.Cluster]]:
    made: list[builders.Cluster] = []

    def make(**options: Any) -> builders.Cluster:
        made.append(builders.cluster(**options))
        return made[-1]

    yield make
    for desk in made:
        desk.check()


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.check()


@pytest.fixture
def toy() -> Iterator[Callable[..., Toy]]:
    made: list[Toy] = []

    def make(**options: Any) -> Toy:
        made.append(Toy(**options))
        return made[-1]

    yield make
    for desk in made:
        desk.check()
