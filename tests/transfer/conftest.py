from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# make `benchmarks` importable for its network namespaces
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transfer.hosts import KEY, FaultyRelay, Host, Original

from stoker.contexts.manifest import PART_BYTES


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(*held: Original, **more: Any) -> Host:
        made.append(Host(tmp_path / f"host-{len(made)}", key=KEY, **more))
        for original in held:
            made[-1].hold(original)
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def relay() -> Iterator[Callable[..., FaultyRelay]]:
    """Return a function that makes a relay in front of a host. The relays end with the test."""
    made: list[FaultyRelay] = []

    def make(host: Host, **more: object) -> FaultyRelay:
        made.append(FaultyRelay(host.server.address, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.frozen.clear()
        one.close()


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """A constant file of a little more than eleven parts."""
    path = tmp_path_factory.mktemp("big") / "big.gguf"
    path.write_bytes(os.urandom(11 * PART_BYTES + 1234))
    return Original(path)


@pytest.fixture
def folder(tmp_path: Path) -> Original:
    root = tmp_path / "model"
    (root / "deep" / "empty").mkdir(parents=True)
    (root / "weights").write_bytes(os.urandom(PART_BYTES + 7))
    (root / "deep" / "nothing").write_bytes(b"")
    (root / "run me").write_bytes(b"#!/bin/sh\n")
    (root / "run me").chmod(0o755)
    (root / "deep" / "again").symlink_to("../weights")
    for number in range(50):
        (root / "deep" / f"small-{number}").write_bytes(os.urandom(number))
    return Original(root)
