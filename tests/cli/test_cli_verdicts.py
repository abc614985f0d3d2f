"""`stoker explain` says whose fault a failure is, by what the session's folder holds, and how far a call is."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.manager.advice.logs import FaultKind
from stoker.manager.cli import logged_progress, verdicts
from stoker.manager.protocol.session import SessionFolder
from stoker.manager.protocol.status import StoryLine
from stoker.manager.protocol.to_client import Story

RAISED = (
    "raised an exception in your code after 0.100 s: KeyError: 'claim'\n"
    "at /home/ana/program.py:12 in outer\nat /home/ana/program.py:5 in inner"
)
TRAINING = [f"epoch 1 step {step} loss {2.0 - step / 100:.2f}" for step in range(50)]


@pytest.fixture
def folder(tmp_path: Path) -> SessionFolder:
    (tmp_path / "pilots" / "n1").mkdir(parents=True)
    (tmp_path / "submit_scripts").mkdir()
    return SessionFolder(tmp_path)


def story(subject: str, *texts: str, headline: str = "f  ended", runs_in: tuple[str, ...] = ()) -> Story:
    lines = tuple(StoryLine(float(at), text) for at, text in enumerate(texts))
    return Story(subject, True, headline, lines, runs_in=runs_in)


def log(folder: SessionFolder, name: str, lines: list[str]) -> Path:
    path = folder.path / "pilots" / "n1" / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_an_exception_of_the_program_is_its_own_and_its_lines_are_shown(folder: SessionFolder) -> None:
    fault = verdicts.verdict_of(folder, story("c-1", "submitted", RAISED))
    assert fault is not None
    assert fault.kind is FaultKind.USER
    shown = "\n".join(verdicts.show(fault))
    assert "KeyError: 'claim'" in shown
    assert shown.startswith("  verdict   the program")


def test_what_the_call_printed_counts(folder: SessionFolder) -> None:
    sick = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    path = log(folder, "lib-1.log", [*TRAINING, sick, *TRAINING[:3]])
    printed = f"printed {path}:0-{path.stat().st_size}"
    died = "ended without a result (poison): its library died: signal 6"
    fault = verdicts.verdict_of(folder, story("c-1", printed, died))
    assert fault is not None
    assert (fault.kind, fault.component) == (FaultKind.INFRASTRUCTURE, "gpu")
    assert any("ECC" in line.text for line in fault.proof)


@pytest.mark.parametrize(
    "texts",
    [
        ("submitted", "ended with a result after 1.000 s in its function"),
        ("submitted", "ended without a result (cancelled): cancelled by its program"),
        ("submitted", "waits for 3 s: its 2 hot libraries are busy"),
    ],
)
def test_where_nothing_has_failed_there_is_no_verdict(folder: SessionFolder, texts: tuple[str, ...]) -> None:
    assert verdicts.verdict_of(folder, story("c-1", *texts)) is None


def test_a_log_that_lies_elsewhere_costs_the_verdict_of_it_alone(folder: SessionFolder) -> None:
    away = "printed /no/such/place/lib-1.log:0-100"
    fault = verdicts.verdict_of(folder, story("c-1", away, RAISED))
    assert fault is not None
    assert fault.kind is FaultKind.USER
    assert verdicts.verdict_of(folder, story("c-1", away, "ended without a result (died): it died")) is None


def test_how_far_a_running_call_is_is_told_by_what_it_prints(folder: SessionFolder) -> None:
    log(folder, "lib-3.log", [f"step {step}/200 loss {3.0 - step / 100:.2f}" for step in range(1, 91)])
    progress = logged_progress.progress_of(folder, story("c-1", "submitted", runs_in=("lib-3",)))
    assert progress is not None
    assert logged_progress.show(progress).startswith("  progress  90 of 200 steps")
    assert "loss" in logged_progress.show(progress)


def test_a_call_that_waits_or_prints_nothing_of_the_kind_has_no_progress(folder: SessionFolder) -> None:
    log(folder, "lib-3.log", ["loading", "ready"])
    assert logged_progress.progress_of(folder, story("c-1", runs_in=("lib-3",))) is None
    assert logged_progress.progress_of(folder, story("c-1", runs_in=("lib-4",))) is None
    assert logged_progress.progress_of(folder, story("c-1")) is None
    assert logged_progress.progress_of(folder, story("lib-3", runs_in=("lib-3",))) is None
