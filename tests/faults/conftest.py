"""Give each fault test isolated folders and processes; a leftover process or file fails the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults.world import World, until

import stoker


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    """The folders and processes of one test, which must leave no file or process."""
    with World(tmp_path / "world").entered() as world:
        yield world


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world")).entered() as world:
        yield world


@pytest.fixture
def session(world):
    with stoker.load(run_dir=str(world.runs), strategy_period=0.2) as session:  # a lost block is replaced soon
        yield session


@pytest.fixture(scope="module")
def shared(shared_world):
    """A session that the tests of one file share and must not change."""
    with stoker.load(run_dir=str(shared_world.runs)) as session:
        until(lambda: session.status().pilots, why="the first pilot")
        yield session
