from __future__ import annotations

import signal
import sys
import traceback
from pathlib import Path

import pytest
from parsl.monitoring import MonitoringHub

import stoker
from stoker.startup import import_deferring_interrupt

PRESSES = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
DONE = True
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "presses_ctrl_c.py").write_text(PRESSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "presses_ctrl_c", raising=False)
    return "presses_ctrl_c"


def test_import_finishes_before_ctrl_c_is_handled(module: str) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt) as caught:
        import_deferring_interrupt(module)
    assert sys.modules[module].DONE, "the import is complete"
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not any("presses_ctrl_c" in file or "importlib" in file for file in files)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_ctrl_c_is_handled_at_once(module: str, tmp_path: Path) -> None:
    text = PRESSES.replace("DONE", "os.kill(os.getpid(), signal.SIGINT)\nDONE")
    (tmp_path / "presses_ctrl_c.py").write_text(text)
    with pytest.raises(KeyboardInterrupt):
        import_deferring_interrupt(module)
    assert module not in sys.modules


def test_own_ctrl_c_handler_of_a_program_runs_during_an_import(module: str) -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        assert import_deferring_interrupt(module).DONE
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


class Pressed(MonitoringHub):  # type: ignore[misc]  # parsl is untyped
    def __init__(self) -> None:
        pass

    def start(self, *args: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def __getattr__(self, name: str) -> object:
        return lambda *args, **options: None


def test_new_session_can_be_loaded_after_an_interrupted_load(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"stoker\.load was interrupted; its processes have ended") as caught:
        stoker.load(run_dir=tmp_path / "runs", monitoring=Pressed())
    files = {Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert files == {"test_programs_interrupted_early.py", "session.py"}
    assert caught.value.__context__ is None
    with stoker.load(run_dir=tmp_path / "runs") as session:
        assert session.status().session == session.id
