"""End a hung test, show the stacks of all threads and its child processes, and kill these processes.

The limit of a test and its fixtures is `timeout` in pyproject.toml, `SLOW_LIMIT_S` for `slow` tests, or the test's
`@pytest.mark.timeout`. pytest-timeout raises in the main thread by a signal; the test fails, fixtures are torn down,
and the run continues. If the signal has no effect (in a hanging C library or fixture), `faulthandler_timeout` ends the
process and thereby the run.
"""

from __future__ import annotations

from collections.abc import Generator

import psutil
import pytest

SLOW_LIMIT_S = 600.0
_TOLD = pytest.StashKey[list[psutil.Process]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Kill the leftover processes of a hung test."""
    before = set(psutil.Process().children(recursive=True))
    try:
        return (yield)
    finally:
        for process in set(item.stash.get(_TOLD, [])) - before:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and str(call.excinfo.value).startswith("Timeout ("):
        below = psutil.Process().children(recursive=True)
        item.stash.setdefault(_TOLD, []).extend(below)
        report.sections.append(("processes of a test that hung", "\n".join(map(_line, below)) or "none"))
    return report


def _line(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid} is gone"
