"""Readers of bytes from outside raise only declared errors on damaged input. `make fuzz` runs millions of inputs."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.fuzz import fuzz, run_lives
from benchmarks.reliability.fuzz_files import targets
from benchmarks.reliability.fuzz_inputs import Target

COUNT, SEED = 100, 11


def readers() -> list[str]:
    """`targets` requires a folder, which stays unused."""
    with tempfile.TemporaryDirectory() as place:
        return [target.name for target in targets(Path(place), seed=SEED)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return {target.name: target for target in targets(tmp_path_factory.mktemp("inputs"), seed=SEED)}


@pytest.mark.parametrize("name", readers())
def test_readers_raise_only_declared_errors(name: str, by_name: dict[str, Target]) -> None:
    reader = by_name[name]
    for data in reader.right if reader.complete else ():
        reader.read(data)
    found: list[dict[str, Any]] = []
    counts = fuzz([reader], count=COUNT, seed=SEED, found=found.append)
    assert not found, f"{len(found)} finds, the first: {found[0]['data']}\n{found[0]['wrong']}"
    inputs, refused, _ = counts[name]
    assert inputs == COUNT
    assert refused > 0 or not reader.declared, "no damaged input was refused"


def test_pilot_cores_keep_their_invariants() -> None:
    found: list[dict[str, Any]] = []
    run_lives(count=50, seed=SEED, found=found.append)
    assert not found, found[0]


def test_fuzzer_finds_a_reader_that_raises_an_undeclared_error() -> None:
    def read(data: bytes) -> None:
        if b"\xff" in data:
            raise KeyError("not declared")

    found: list[dict[str, Any]] = []
    fuzz([Target("bad", read=read, declared=(), right=[bytes(20)])], count=500, seed=1, found=found.append)
    assert found
    assert "KeyError: 'not declared'" in found[0]["wrong"]
    with pytest.raises(KeyError):
        read(bytes.fromhex(found[0]["data"]))
