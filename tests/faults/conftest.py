"""Worlds of their own for tests that break things; what they leave behind is a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from faults.world import World, until

import stoker


def _enter(world: World) -> Iterator[World]:
    before = {name: os.environ.get(name) for name in world.environ}
    os.environ.update(world.environ)
    try:
        yield world
        world.empty()
    finally:
        world.clear()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    """A world for one test. Nothing may be left in it."""
    yield from _enter(World(tmp_path / "world"))


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory) -> Iterator[World]:
    """A world for the tests of one file."""
    yield from _enter(World(tmp_path_factory.mktemp("world")))


@pytest.fixture
def session(world):
    """A session of this machine for one test."""
    with stoker.load(run_dir=str(world.runs)) as session:
        yield session


@pytest.fixture(scope="module")
def shared(shared_world):
    """A session of this machine for the tests of one file, which must leave it as good as they found it."""
    with stoker.load(run_dir=str(shared_world.runs)) as session:
        until(lambda: session.status().pilots, why="the first pilot")
        yield session
