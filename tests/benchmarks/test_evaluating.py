"""How an evaluation ends: with its own status, a failure, a stop, or without its data."""

from __future__ import annotations

import pytest

from benchmarks.papers.common import exit_status
from stoker.errors import StokerError


def fails() -> int:
    raise StokerError("the trace is damaged")


def stops() -> int:
    raise KeyboardInterrupt


def test_each_end_has_its_status_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(lambda: 0, stopped="") == 0
    assert capsys.readouterr().err == ""
    assert exit_status(fails, stopped="") == 1
    assert capsys.readouterr().err == "the trace is damaged\n"
    assert exit_status(stops, stopped="the same again goes on with kept.json") == 130
    assert "goes on with kept.json" in capsys.readouterr().err


def test_evaluation_without_its_data_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(fails, stopped="", missing="no trace") == 2
    assert capsys.readouterr().err == "no trace: the evaluation is skipped\n"
    assert exit_status(fails, stopped="", missing="no trace", skip=True) == 0
