from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from batch.condor import needs
from batch.condor.machines import gpu, machine

if TYPE_CHECKING:
    from batch.condor.pool import Pool


def start_pool(folder: Path, *machines: dict[str, Any], **options: Any) -> Pool:
    """Start a pool of real daemons if they are on PATH, else the stand-in."""
    if needs.daemons() is not None:
        from batch.condor.real import RealPool

        return RealPool(folder, *machines, **options)  # type: ignore[return-value]  # it has the same methods
    from batch.condor.pool import Pool

    return Pool(folder, *machines, **options)


@pytest.fixture(scope="package")
def condor() -> None:
    if why := needs.missing():
        pytest.skip(why)


@pytest.fixture(scope="package")
def bindings() -> None:
    if importlib.util.find_spec("htcondor") is None:
        pytest.skip(needs.NO_BINDINGS)


@pytest.fixture
def make_pool(condor: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(*machines: dict[str, Any], **options: Any) -> Pool:
        pool = start_pool(tmp_path / f"pool{len(made)}", *machines, **options)
        made.append(pool)
        monkeypatch.setenv("PATH", str(pool.bin), prepend=":")
        return pool

    yield make
    for pool in made:
        pool.close()


@pytest.fixture(scope="package")
def shared_pool(condor: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    a10s = gpu("GPU-aaaa0001", "NVIDIA A10"), gpu("GPU-bbbb0002", "NVIDIA A10")
    titan = gpu("GPU-cccc0003", "NVIDIA TITAN X (Pascal)", memory_mb=12_000)
    machines = machine("n1", *a10s), machine("n2", titan), machine("n3", HasScratch="true"), machine("n4")
    pool = start_pool(tmp_path_factory.mktemp("condor") / "pool", *machines)
    yield pool
    pool.close()


@pytest.fixture
def pool(shared_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Put a shared pool on PATH and empty the pool after the test. The pool has two A10s, a TITAN X, and a machine with
    `HasScratch`.
    """
    monkeypatch.setenv("PATH", str(shared_pool.bin), prepend=":")
    yield shared_pool
    shared_pool.clear()
