"""One gateway and one session for the tests of a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from faults.world import World
from gateway.browser import headless
from gateway.running import LIMIT_S, RunningGateway, keys


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    with (
        pytest.MonkeyPatch.context() as patch,
        World(tmp_path_factory.mktemp("world")).entered(limit_s=LIMIT_S) as world,
    ):
        patch.delenv("STOKER_SESSION", raising=False)
        yield world


@pytest.fixture(scope="module")
def gateway(world, write_models, serve_options) -> Iterator[RunningGateway]:
    running = RunningGateway(world.path / "work")
    write_models(running.folder)
    running.start(*serve_options)
    try:
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def write_models():
    """Return a function that changes the gateway's folder before it starts. A file with other models overrides this
    fixture.
    """
    return lambda _folder: None


@pytest.fixture(scope="module")
def serve_options() -> list[str]:
    """The gateway's options. A file with other options overrides this fixture."""
    return []


@pytest.fixture(scope="module")
def client(gateway):
    from gateway.asking import client_of

    with client_of(gateway) as client:
        yield client


@pytest.fixture
def key(world):
    """Return a function that makes keys; remove the keys afterwards."""
    made = itertools.count()

    def make(*options, name=""):
        return keys("add", name or f"key{next(made)}", *options)

    yield make
    (world.home / "serve" / "keys.json").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with headless(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def http(gateway):
    import httpx

    with httpx.Client(base_url=gateway.url, timeout=LIMIT_S) as client:
        yield client
