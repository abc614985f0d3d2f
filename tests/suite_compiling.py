"""Divide the compilation of tests: each worker compiles every n-th file and reads the other compiled files.

pytest needs ten seconds to rewrite all assertions. In a fresh clone, every worker would repeat this work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each xdist worker compiles its share of the files before collection, then files that no other worker has
    compiled.
    """
    told = getattr(session.config, "workerinput", None)
    if told is None:
        return
    number, workers = int(told["workerid"].removeprefix("gw")), told["workercount"]
    with suppress(Exception):  # if pytest lacks these internal functions, each worker compiles all files
        compile_share(session.config, number=number % workers, workers=workers)


def compile_share(config: pytest.Config, *, number: int, workers: int) -> None:
    for file in files_of_tests(config.args)[number::workers]:
        folder = rewrite.get_cache_dir(file)
        compiled = folder / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(folder):
            digest, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, compiled)


def files_of_tests(arguments: Iterable[str]) -> list[Path]:
    """Return files with rewritten assertions among the named files and folders."""
    return sorted({file for argument in arguments for file in _below(Path(argument.partition("::")[0]).absolute())})


def _below(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    else:
        yield from place.rglob("test_*.py")
        yield from place.rglob("conftest.py")
