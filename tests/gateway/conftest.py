"""One gateway and one session for the tests of a file."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from faults.world import World
from gateway.running import LIMIT_S, RunningGateway

_NEEDED = ("torch", "transformers", "openai", "httpx", "starlette", "uvicorn", "prometheus_client")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    with (
        pytest.MonkeyPatch.context() as patch,
        World(tmp_path_factory.mktemp("world")).entered(limit_s=LIMIT_S) as world,
    ):
        patch.delenv("STOKER_SESSION", raising=False)
        yield world


@pytest.fixture(scope="module")
def gateway(world) -> Iterator[RunningGateway]:
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    running = RunningGateway(world.path / "work")
    running.start()
    try:
        yield running
    finally:
        running.end()
