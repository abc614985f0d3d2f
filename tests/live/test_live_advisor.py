from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live.peers import until

from stoker.manager.core.events import AdviceArrived, AskAdvice, OfFailure, OfPace, VerdictAdvice
from stoker.manager.live import advisor
from stoker.manager.live.advisor import AdvisorLink
from stoker.protocol.ids import CallId, LibraryId, PilotId
from stoker.protocol.session import SessionFolder

FULL = "OSError: [Errno 28] No space left on device: '/scratch/out.pt'\nat /home/ana/run.py:7 in save"
ODD = """
import argparse, os, socket, sys, time
options = argparse.ArgumentParser()
options.add_argument("--session"); options.add_argument("--channel", type=int)
channel = socket.socket(fileno=options.parse_args().channel)
what = open(os.path.join(os.path.dirname(__file__), "what")).read()
with open(os.path.join(os.path.dirname(__file__), "began"), "a") as file:
    file.write("x")
while data := channel.recv(65536):
    if what == "dies":
        os._exit(3)
    if what == "nonsense":
        channel.send(b"\\xff\\x00 nonsense")
    if what == "hangs":
        time.sleep(1000)
"""


Made = tuple[AdvisorLink, set[int]]


def question(call: int, *, said: str = FULL) -> AskAdvice:
    return AskAdvice(OfFailure(PilotId("p1"), LibraryId(1), CallId(call)), "f", said=said)


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Made]:
    folder, watched = SessionFolder(tmp_path / "session"), set[int]()
    folder.create_folders()
    made = AdvisorLink(folder, watch=watched.add, unwatch=watched.remove)
    yield made, watched
    made.close()
    assert watched == set()


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def be(what: str) -> None:
        (tmp_path / "odd_advisor.py").write_text(ODD)
        (tmp_path / "what").write_text(what)
        monkeypatch.setattr(advisor, "ADVISOR", "odd_advisor")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return be


def found(link: AdvisorLink, count: int, *, now: float) -> list[AdviceArrived]:
    have: list[AdviceArrived] = []
    until(lambda: have.extend(link.receive_answers(now)) or len(have) >= count, what="answers")
    return have


def ask_at_once(link: AdvisorLink) -> None:
    link.queue_question(question(1), -advisor.GATHER_S)
    link.start_or_kill_advisor(0.0)


def test_advisor_starts_with_the_first_question(link: Made) -> None:
    made, watched = link
    made.start_or_kill_advisor(0.0)
    assert made.receive_answers(0.0) == []
    assert (watched, made.due_in_s) == (set(), float("inf"))
    for call in range(40):  # more questions than the channel can buffer
        made.queue_question(question(call), 1.0)
    assert watched == set()
    made.start_or_kill_advisor(1.0 + advisor.GATHER_S)
    assert len(watched) == 1
    told = found(made, 40, now=4.0)
    assert {answer.about.call for answer in told if isinstance(answer.about, OfFailure)} == set(range(40))
    verdict = told[0].advice
    assert isinstance(verdict, VerdictAdvice)
    assert (verdict.kind, verdict.component) == ("infrastructure", "disk")
    assert any("No space left" in line for line in verdict.proof)
    assert made.due_in_s == float("inf")


def test_killed_advisor_is_restarted_and_asked_again(
    link: Made, odd: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    itself = advisor.ADVISOR
    odd("hangs")  # the advisor has not answered when it is killed
    made, _ = link
    ask_at_once(made)
    before = made._process.pid
    os.kill(before, signal.SIGKILL)
    made._process.wait()
    monkeypatch.setattr(advisor, "ADVISOR", itself)
    assert made.receive_answers(1.0) == []
    (answer,) = found(made, 1, now=1.0 + advisor.LONGEST_PAUSE_S / 10)
    assert made._process.pid != before
    assert answer.about == question(1).about


def test_question_that_kills_the_advisor_twice_is_dropped(
    link: Made, odd: Callable[[str], None], tmp_path: Path
) -> None:
    odd("dies")
    made, _ = link
    ask_at_once(made)
    now = 0.0

    def given_up() -> bool:
        nonlocal now
        if made._process is not None and made._process.poll() is not None:
            now += 10.0  # advance the time only while no advisor runs, so a slow start is no timeout
        assert made.receive_answers(now) == []
        return made.due_in_s == float("inf")

    until(given_up, what="the end of the question")
    assert (tmp_path / "began").read_text() == "xx"


def test_unreadable_answer_counts_as_no_answer(link: Made, odd: Callable[[str], None]) -> None:
    odd("nonsense")
    made, watched = link
    ask_at_once(made)
    until(
        lambda: not made.receive_answers(1.0) and (made._folder.path.parent / "began").exists(),
        what="the advisor's start",
    )
    assert made.receive_answers(2.0) == []
    assert len(watched) == 1


def test_surplus_and_oversized_questions_are_not_asked(link: Made, odd: Callable[[str], None]) -> None:
    odd("hangs")
    made, _ = link
    made.queue_question(question(0, said="x" * 100_000), 0.0)
    assert made.due_in_s == float("inf")
    for call in range(advisor.MOST_OPEN + 100):
        made.queue_question(question(call), 0.0)
        made.queue_question(question(call), 0.0)
    assert made.open_question_count == advisor.MOST_OPEN


def test_dead_idle_advisor_does_not_wake_the_loop(link: Made) -> None:
    made, watched = link
    ask_at_once(made)
    found(made, 1, now=1.0)
    os.kill(made._process.pid, signal.SIGKILL)
    made._process.wait()
    assert made.receive_answers(2.0) == []
    assert (watched, made.due_in_s) == (set(), float("inf"))


def test_advisor_start_is_retried_after_a_lack_of_descriptors(link: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = link

    def none_left(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(advisor.socket, "socketpair", none_left)
        ask_at_once(made)
        assert made.due_in_s == 1.0
    made.start_or_kill_advisor(100.0)
    assert found(made, 1, now=101.0)


def test_pace_questions_leave_room_for_other_questions(link: Made, odd: Callable[[str], None]) -> None:
    odd("hangs")
    made, _ = link
    for call in range(1000):
        made.queue_question(AskAdvice(OfPace(LibraryId(1), CallId(call)), "f", "/nowhere"), 0.0)
    assert made.open_question_count == advisor.MOST_PACES
    made.queue_question(question(1), 0.0)
    assert made.open_question_count == advisor.MOST_PACES + 1
