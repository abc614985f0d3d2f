"""Pytest plugin of the site suite: options, order and limits of tests, and the final page."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.contexts import state_folder
from stoker.errors import StokerError
from stoker.manager.cli.site_suite import PromiseVerdict, SiteReport, TriedPromise, format_promise, render_report
from stoker.site_tests.promise import BrokenPromiseError, limit_duration, promise_of
from stoker.site_tests.subject import Subject, add_to_import_path
from stoker.units import parse_seconds
from stoker.whole_files import write_whole

PLACE = Path(__file__).resolve().parent
ORDER = ("test_start", "test_contexts", "test_devices", "test_pairs", "test_walltime")
"""Test files in their order. Adjacent files share a session."""
_RUN = pytest.StashKey["Run"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("site", "the site suite of Stoker")
    group.addoption("--site", dest="site_file", metavar="SITE.toml", help="prove this site")
    group.addoption(
        "--site-wait", metavar="TIME", help="limit of the wait for a pilot [1 min; on a batch system 5 min]"
    )
    group.addoption("--site-json", metavar="FILE", help="write the page as JSON, too")
    group.addoption("--site-progress", action="store_true", help="print a line to stderr for each promise")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "promise(promise): the promise that a test of the site suite proves")
    file = config.getoption("site_file")
    if file is None:
        raise pytest.UsageError("the site suite needs a site file: pytest --site SITE.toml tests/site")
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("the site suite shares sessions between its tests: run it without -n")
    folder = state_folder() / "site-tests" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        wait = config.getoption("site_wait")
        subject = Subject(file, wait_s=parse_seconds(wait) if wait else None, folder=folder)
        folder.mkdir(parents=True)
    except (StokerError, OSError) as error:
        raise pytest.UsageError(str(error)) from None
    add_to_import_path(folder)
    config.stash[_RUN] = Run(subject, config)


class Run:
    """The site under test, and the outcome of each promise so far."""

    def __init__(self, subject: Subject, config: pytest.Config) -> None:
        self.subject = subject
        self.told: dict[str, TriedPromise] = {}
        self.titles: dict[str, str] = {}
        self._began = time.monotonic()
        self._json: str | None = config.getoption("site_json")
        self._progress = bool(config.getoption("site_progress"))

    def report(self) -> SiteReport:
        missing = PromiseVerdict.NOT_TRIED
        promises = [
            self.told.get(node) or TriedPromise(title, missing, why="the run was interrupted")
            for node, title in self.titles.items()
        ]
        interrupted = not self.titles.keys() <= self.told.keys()
        return SiteReport(
            self.subject.site.name, self.subject.provider, self.subject.machines, self.subject.devices,
            tuple(promises), time.monotonic() - self._began, interrupted, self.subject.troubles,
        )  # fmt: skip

    def say(self, line: str) -> None:
        if self._progress:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

    def tell(self, node: str, told: TriedPromise) -> None:
        self.told[node] = told
        self.write()
        for line in format_promise(told):
            self.say(line)

    def write(self) -> None:
        if self._json:
            write_whole(Path(self._json), msgspec.json.encode(self.report()))

    def end(self) -> None:
        try:
            self.subject.close()
        finally:
            self.write()
            failed = any(each.verdict is PromiseVerdict.FAILS for each in self.told.values())
            shutil.rmtree(self.subject.folder / "scratch", ignore_errors=True)
            if not failed:
                _remove(self.subject.folder)


def _remove(folder: Path) -> None:
    for link in (state_folder() / "sessions").glob("*"):
        with contextlib.suppress(OSError):  # another process may remove it
            if Path(os.readlink(link)).is_relative_to(folder):
                link.unlink()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.config.stash[_RUN].subject


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    yield
    items.sort(key=lambda item: (ORDER.index(item.path.stem), item.reportinfo()[1] or 0) if _is_ours(item) else (-1, 0))
    config.stash[_RUN].titles = {item.nodeid: promise_of(item).title for item in items if _is_ours(item)}


def _is_ours(item: pytest.Item) -> bool:
    return item.path.resolve().parent == PLACE


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    if not _is_ours(item):
        return (yield)
    run, promise = item.config.stash[_RUN], promise_of(item)
    if run.subject.no_pilot:
        pytest.skip("no pilot started")
    run.say(f"  ...   {promise.title}")
    queued_s = run.subject.wait_s if promise.queues else 0.0
    with limit_duration(promise.limit_s + queued_s):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _is_ours(item) and (report.when == "call" or not report.passed):
        item.config.stash[_RUN].tell(item.nodeid, _make_verdict(item, call, report))
    return report


def _make_verdict(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> TriedPromise:
    promise, subject = promise_of(item), item.config.stash[_RUN].subject
    if report.passed:
        return TriedPromise(promise.title, PromiseVerdict.HOLDS, call.duration)
    error = call.excinfo.value if call.excinfo is not None else None
    if report.skipped:
        return TriedPromise(promise.title, PromiseVerdict.NOT_TRIED, call.duration, str(error))
    why = str(error) if isinstance(error, BrokenPromiseError) else f"{type(error).__name__}: {error}"
    return TriedPromise(promise.title, PromiseVerdict.FAILS, call.duration, why, promise.remedy, subject.log)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[_RUN].end()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("collectonly") or config.getoption("site_progress"):
        return
    terminalreporter.section("site")
    for line in render_report(config.stash[_RUN].report()):
        terminalreporter.write_line(line)
