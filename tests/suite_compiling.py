"""Workers share the work of compiling the tests: each compiles every n-th file, and reads what the others have written.

pytest rewrites the assertions of each file of tests as it is imported: ten seconds for all of them. Where no earlier
run has left the result (a fresh clone), every worker would do all of it, and all of them at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each worker of xdist compiles its share before it collects, and then the files that others have not reached."""
    told = getattr(session.config, "workerinput", None)
    if told is None:
        return
    number, workers = int(told["workerid"].removeprefix("gw")), told["workercount"]
    with suppress(Exception):  # these are pytest's own functions: without them, each worker does everything
        compile_share(session.config, number=number % workers, workers=workers)


def compile_share(config: pytest.Config, *, number: int, workers: int) -> None:
    for file in files_of_tests(config.args)[number::workers]:
        folder = rewrite.get_cache_dir(file)
        compiled = folder / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(folder):
            digest, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, compiled)


def files_of_tests(arguments: Iterable[str]) -> list[Path]:
    """The files whose assertions pytest rewrites, in the files and folders that a command line names."""
    return sorted({file for argument in arguments for file in _below(Path(argument.partition("::")[0]).absolute())})


def _below(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    else:
        yield from place.rglob("test_*.py")
        yield from place.rglob("conftest.py")
