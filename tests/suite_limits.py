"""A test that hangs is ended, told with the stacks of all threads and the processes below it, and these are killed.

`timeout` of pyproject.toml is the limit of a test, its fixtures included; `slow` ones have `SLOW_LIMIT_S`, and
`@pytest.mark.timeout` says otherwise. pytest-timeout raises in the main thread by a signal, which prints the stacks; so
the test fails, fixtures tidy up, and the run goes on. Should that be of no use (a library in C that does not return, or
a fixture that hangs as it tidies up), `faulthandler_timeout` ends the process, and xdist starts another worker.
"""

from __future__ import annotations

from collections.abc import Generator

import psutil
import pytest

SLOW_LIMIT_S = 600.0
_TOLD = pytest.StashKey[list[psutil.Process]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that are slow on purpose may take longer."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Kill what a test that hung has started, as far as its fixtures have not."""
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
