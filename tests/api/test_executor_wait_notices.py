"""A waiting program prints a notice, repeats it after a minute, and prints changed reasons."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from parsl.providers import LocalProvider
from polling import PATIENCE_S
from rich.console import Console

import stoker
from stoker import StokerExecutor
from stoker.manager.executor import progress
from stoker.manager.executor.progress import FIRST_S, SAME_REASON_S, WaitNoticeLogger
from stoker.protocol.status import ContextStatus, DeviceStatus, LibraryStatus, PilotStatus
from stoker.protocol.to_client import Status

PRIORITY = "no pilot has joined yet (block b1: pending: Priority, expected to start in {})"
RESOURCES = "no pilot has joined yet (block b1: pending: Resources)"
FULL = "the journal cannot be written (No space left on device): the disk of /runs is full; make room there"
ALONE = "Pilots cannot reach each other: p1, p2 read the files from their origin, which is slower."


def status(why: str = "", *, pilots: int = 0, hot: int = 0, **more: object) -> Status:
    """Return a session status in which calls wait for the reason `why`."""
    context = ContextStatus("k", "llm", hot, 0, 5, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0, why)
    device = DeviceStatus("cpu:0", "cpu", 8_000_000_000, 0, ())
    here = tuple(PilotStatus(f"p{n}", f"n{n}", "b1", "here", (device,), "", 0, 0.0, 0.0) for n in range(pilots))
    made = Status("k3v9", 0.0, 5, 0, 0, 0, 0.0, 0.0, here, (), (context,), {}, 0, 0, {})
    return msgspec.structs.replace(made, **more)


class WaitingProgram:
    """A program with waiting calls and a test clock."""

    def __init__(self, *, faults_only: bool = False) -> None:
        self.now = 1000.0
        self.here: Status | None = status(PRIORITY.format("11 min"))
        self.waits = True
        self.asked = 0
        self.said: list[str] = []
        self.journal = ""
        self.ours = {"k"}
        self.silence = ""
        self.wait_notices = WaitNoticeLogger(
            ask=self._ask,
            has_open_calls=lambda: self.waits,
            journal_trouble=lambda: self.journal,
            is_own_context=self.ours.__contains__,
            why_silent=lambda: self.silence,
            say=self.said.append,
            faults_only=faults_only,
        )

    def _ask(self) -> Status | None:
        self.asked += 1
        return self.here

    def look(self, seconds: float) -> list[str]:
        """Let the program check once a second for `seconds`; return the new lines."""
        before = len(self.said)
        until = self.now + seconds
        while self.now < until:
            self.wait_notices.report_wait_reason_if_due(self.now)
            self.now += 1.0
        return self.said[before:]


def test_long_wait_is_reported_each_minute_and_new_reasons_sooner() -> None:
    desk = WaitingProgram()
    assert desk.look(FIRST_S) == []
    assert desk.look(1) == [f"{PRIORITY.format('11 min')}; more: stoker status k3v9"]
    desk.here = status(PRIORITY.format("9.5 min"))
    assert desk.look(SAME_REASON_S - 1) == [], "a changed number causes no notice"
    assert desk.look(1) == [f"{PRIORITY.format('9.5 min')}; more: stoker status k3v9"]
    desk.here = status(RESOURCES)
    assert desk.look(FIRST_S - 1) == []
    assert desk.look(1) == [f"{RESOURCES}; more: stoker status k3v9"]
    said = []
    for n in range(40):  # each of two alternating reasons is printed once a minute
        desk.here = status(PRIORITY.format("1 h") if n % 2 else RESOURCES)
        said += desk.look(2)
    assert len(said) <= 3


def test_wait_notices_stop_while_calls_wait_for_a_busy_library() -> None:
    desk = WaitingProgram()
    desk.look(FIRST_S + 1)
    desk.here = status("5 calls of llm are queued, its hot library is busy", pilots=1, hot=1)
    assert desk.look(2 * SAME_REASON_S) == []
    desk.here = status("no pilot is connected any more (no block was submitted)")
    assert len(desk.look(progress.CHECK_SELDOM_S + FIRST_S + 1)) == 1


NO_DISK = "1 of 1 connected pilots cannot load llm: n0 has 5.0 GB free on its scratch disk, and llm wants 9.0 TB"


def test_calls_that_no_pilot_accepts_are_reported() -> None:
    desk = WaitingProgram()
    desk.here = status(pilots=1)
    assert desk.look(2) == []
    desk.here = status(NO_DISK, pilots=1)
    assert desk.look(2 * FIRST_S) == [f"{NO_DISK}; more: stoker status k3v9"]
    assert len(desk.look(SAME_REASON_S)) == 1
    desk.here = status("5 calls of llm are queued, its hot library is busy", pilots=1, hot=1)
    assert desk.look(2 * SAME_REASON_S) == []


def test_waits_of_other_programs_are_not_reported() -> None:
    desk = WaitingProgram()
    desk.look(FIRST_S - 1)
    desk.waits = False  # time without calls does not count as waiting
    desk.look(600)
    desk.waits = True
    assert desk.look(FIRST_S - 1) == []
    desk.ours.clear()
    desk.here = status(NO_DISK, pilots=1)
    assert desk.look(3 * SAME_REASON_S) == []
    desk.here = None  # a missing status causes no notice
    assert desk.look(300) == []
    desk.waits, desk.journal = False, FULL
    assert desk.look(2 * SAME_REASON_S) == []


def test_pilots_that_cannot_reach_each_other_are_reported_once() -> None:
    desk = WaitingProgram()
    desk.here = status(pilots=2, trouble={"peers": ALONE})
    assert desk.look(300) == [ALONE]
    desk.here = status(pilots=3, trouble={"peers": ALONE.replace("p2", "p2, p3")})
    assert desk.look(300) == []


def test_silent_connected_manager_is_reported_each_minute() -> None:
    desk = WaitingProgram()
    desk.here, desk.silence = None, "its manager does not answer"
    assert desk.look(FIRST_S) == []
    assert desk.look(SAME_REASON_S) == ["its manager does not answer"]
    assert desk.look(2) == ["its manager does not answer"]
    desk.here = status(pilots=1, hot=1)
    assert desk.look(SAME_REASON_S) == []
    desk.here = None
    assert desk.look(FIRST_S / 2) == []


# ---- where notices are printed


def loading(seconds: float, line: str, *, hot: int = 0) -> Status:
    library = LibraryStatus(1, "llm", "loading", "loading", "p0", ("cpu:0",), 0, 0, 0, 0, seconds, line)
    context = ContextStatus("k", "llm", hot, 1, 5, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0, "")
    return status(pilots=1, libraries=(library,), contexts=(context,))


def test_long_load_is_reported_with_its_last_log_line() -> None:
    desk = WaitingProgram()
    desk.here = loading(2.0, "")
    assert desk.look(5) == []
    desk.here = loading(12.0, "Loading weights 61 %")
    assert desk.look(1) == ["context llm is loading (12 s); the last line of its log: Loading weights 61 %"]
    desk.here = loading(25.0, "Loading weights 73 %")
    assert desk.look(SAME_REASON_S - 5) == []  # only a number changed, so no notice is printed
    assert desk.look(10) == ["context llm is loading (25 s); the last line of its log: Loading weights 73 %"]
    desk.here = loading(90.0, "Retrying in 8 s")
    assert desk.look(FIRST_S + 1) == ["context llm is loading (1 min 30 s); the last line of its log: Retrying in 8 s"]
    desk.here = loading(120.0, "slow", hot=1)
    assert desk.look(40) == [], "the context is hot elsewhere"


def test_wait_notice_is_printed_above_the_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert not progress.print_above_progress_bar("nobody")
    console = Console(stderr=True, force_terminal=True, width=200)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    bar = progress.MapProgress("verify", 10, lambda _: None)
    assert progress.print_above_progress_bar("block [b1]: pending")
    bar(1, 10)
    bar.close()
    assert "block [b1]: pending\n" in capsys.readouterr().err.replace("\r\n", "\n")
    assert not progress.print_above_progress_bar("nobody")


def test_wait_notice_without_a_bar_goes_to_the_named_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        progress._show_notice("no pilot yet")
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("stoker.news", "no pilot yet")]


PROGRAM = """
import sys, time
import stoker
from parsl.providers import LocalProvider
from stoker.manager.executor import progress

progress.FIRST_S = progress.CHECK_S = 0.2
provider = LocalProvider(init_blocks=0, min_blocks=0, max_blocks=1)
with stoker.load(provider=provider, run_dir=sys.argv[1], strategy="none"):
    stoker.app()(abs)(-1)
    sys.stdin.readline()
    time.sleep(1.5)
"""


def test_program_without_pilots_reports_the_reason(tmp_path) -> None:
    command, wanted = [sys.executable, "-c", PROGRAM, str(tmp_path)], "no pilot has joined yet (no block was"
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stderr is not None
    line = next(line for line in program.stderr if wanted in line)
    assert line.startswith("stoker: ")
    assert "stoker status" in line
    assert wanted not in program.communicate("go on\n", timeout=PATIENCE_S)[1], "the notice is printed once"
    assert program.returncode == 0


@pytest.mark.long
def test_program_prints_no_wait_notice_if_progress_is_false(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 0.1)
    asked, ask = threading.Event(), StokerExecutor.ask_status
    monkeypatch.setattr(StokerExecutor, "ask_status", lambda executor, *limit: (asked.set(), ask(executor, *limit))[1])
    provider = LocalProvider(init_blocks=0, min_blocks=0, max_blocks=1)
    with stoker.load(provider=provider, run_dir=tmp_path, strategy="none", progress=False):
        asked.clear()
        stoker.app()(abs)(-1)
        assert asked.wait(PATIENCE_S), "the notices query the status"
        time.sleep(0.3)
    assert "no pilot has joined" not in caplog.text


def test_full_disk_is_reported_at_once_and_each_minute() -> None:
    desk = WaitingProgram()
    desk.journal = FULL
    assert desk.look(1) == [FULL]
    assert desk.look(SAME_REASON_S - 1) == []
    assert desk.look(1) == [FULL]
    assert desk.asked == 0
    desk.journal = ""
    assert desk.look(1) == ["the session's journal can be written again: calls and results continue"]
    assert desk.look(FIRST_S) == [f"{PRIORITY.format('11 min')}; more: stoker status k3v9"]


def test_only_faults_are_reported_without_a_progress_display() -> None:
    desk = WaitingProgram(faults_only=True)
    desk.journal = FULL
    assert desk.look(1) == [FULL]
    desk.journal = ""
    assert len(desk.look(1)) == 1
    assert desk.look(3 * SAME_REASON_S) == [], "a missing pilot does not count as a fault"
    desk.here, desk.silence = None, "its manager does not answer"
    assert desk.look(SAME_REASON_S) == ["its manager does not answer"]
