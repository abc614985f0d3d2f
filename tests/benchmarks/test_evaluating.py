"""How an evaluation ends: with its own status, a failure, a stop, or without its data."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers.common import exit_status
from stoker.errors import StokerError


def fails() -> int:
    raise StokerError("the trace is damaged")


def stops() -> int:
    raise KeyboardInterrupt


def test_each_end_has_its_status_and_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Path("kept.json")
    assert exit_status(lambda: 0, what="It", kept=kept) == 0
    assert capsys.readouterr().err == ""
    assert exit_status(fails, what="It", kept=kept) == 1
    assert capsys.readouterr().err == "the trace is damaged\n"
    assert exit_status(stops, what="It", kept=kept) == 130
    assert "goes on with kept.json" in capsys.readouterr().err


def test_without_its_data_it_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(fails, what="It", kept=Path("kept.json"), missing="no trace") == 2
    assert capsys.readouterr().err == "no trace: It is skipped\n"
    assert exit_status(fails, what="It", kept=Path("kept.json"), missing="no trace", skip=True) == 0
