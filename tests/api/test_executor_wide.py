from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import stoker
from stoker.contexts import ambient
from stoker.errors import ContextError


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("wide")
    (folder / "two.toml").write_text('[provider]\nkind = "local"\n[pilot]\ndevices = "cpu:2"\nmax_blocks = 1\n')
    with stoker.load(str(folder / "two.toml"), run_dir=str(folder)) as session:
        yield session


class Sized:
    """A context that records the memory limits it receives."""

    def __init__(self) -> None:
        self.seen = [ambient.device_memory_bytes()]

    def slots(self, device_memory_bytes: int) -> int:
        self.seen.append(device_memory_bytes)
        return 1


@stoker.context(devices=2, device_memory="600 MB", slots="auto")
def over_two() -> Sized:
    return Sized()


def test_library_on_two_cpu_devices_receives_their_cores_and_memory(two_devices: Any) -> None:
    def describe(sized: Sized) -> tuple[tuple[str, ...], list[int], int]:
        return ambient.devices(), sized.seen, len(os.sched_getaffinity(0))

    devices, seen, cores = stoker.app(describe, context=over_two())().result(timeout=120)
    assert devices == ("cpu", "cpu")
    assert seen == [1_200_000_000, 1_200_000_000]  # the `cpu` of PyTorch has the memory of both devices
    assert cores == len(os.sched_getaffinity(0))
    (library,) = two_devices.status().libraries
    assert library.devices == ("cpu:0", "cpu:1")


def test_context_that_needs_more_devices_than_a_node_has_fails(two_devices: Any) -> None:
    @stoker.context(devices=3)
    def over_three() -> int:
        return 1

    future = stoker.app(lambda one: one, context=over_three())()
    with pytest.raises(ContextError, match=r'devices = "cpu:3" in the site file.*\(devices=2\)'):
        future.result(timeout=120)
