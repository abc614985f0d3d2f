from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from batch.lab import commands
from batch.lab.cluster import Cluster
from batch.lab.shape import Shape
from faults.world import World


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """A cluster of four nodes with one GPU each, of two types. Tests use the fixture `slurm`."""
    if why := commands.missing_for_slurm():
        pytest.skip(why)
    with Cluster(Shape()) as cluster:
        yield cluster


@pytest.fixture
def slurm(shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return the idle shared cluster, with its Slurm commands in the environment of this process."""
    for name, value in shared_cluster.environ.items():
        monkeypatch.setenv(name, value)
    yield shared_cluster
    shared_cluster.clear()


@pytest.fixture
def make_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Shape], Cluster]]:
    """Return a function that starts a cluster of any shape and selects its Slurm commands."""
    with contextlib.ExitStack() as all_of_them:

        def make(shape: Shape) -> Cluster:
            checks = [commands.missing_for_slurm()]
            checks += [commands.missing_for_namespaces()] if shape.namespaces else []
            checks += [commands.missing_for_accounting()] if shape.accounting else []
            if why := next(filter(None, checks), ""):
                pytest.skip(why)
            cluster = all_of_them.enter_context(Cluster(shape))
            for name, value in cluster.environ.items():
                monkeypatch.setenv(name, value)
            return cluster

        yield make


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A folder for the session of a test; a process that outlives the test is an error."""
    with World(tmp_path / "world").entered(limit_s=20, folders=False) as world:
        yield world
