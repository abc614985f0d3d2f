"""Who raises its limit of open files, and who keeps the one it was given; and lines of a log that strangers fill."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from polling import PATIENCE_S

from stoker.log_files import SeldomLog

PROGRAM = """
import json, os, sys
import psutil
import stoker
from stoker import app

def limits(pid):
    return list(psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE))

@app()
def mine():
    return os.getpid(), os.getppid()

with stoker.load(sys.argv[1]) as session:
    library, zygote = mine().result()
    here = {"program": limits(os.getpid()), "library": limits(library), "zygote": limits(zygote)}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(session.folder) in words:
            for name in ("stoker.manager.main", "stoker.pilot.main"):
                if name in words:
                    here[name] = limits(process.pid)
print(json.dumps(here))
"""


def test_processes_that_many_connect_to_raise_their_limit_and_user_code_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    (tmp_path / "one.toml").write_text('name = "one"\n[pilot]\ndevices = "cpu:1"\n')
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, "program.py", "one.toml"],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=2 * PATIENCE_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, 2048)),
    )  # fmt: skip
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "program": [512, 2048],
        "library": [512, 2048],
        "zygote": [512, 2048],
        "stoker.manager.main": [2048, 2048],
        "stoker.pilot.main": [2048, 2048],
    }


def test_a_subject_gets_a_line_now_and_then_and_all_subjects_get_a_few(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    lines = SeldomLog(logging.getLogger("test"), every_s=10.0, most=3, clock=lambda: now)
    assert [lines.warning("a", "first"), lines.warning("a", "second"), lines.warning("a", "third")] == [
        True, False, False,
    ]  # fmt: skip
    assert [lines.warning(subject, "other") for subject in "bcdef"] == [True, True, False, False, False]
    now = 111.0
    assert lines.warning("a", "again")
    assert caplog.messages == ["first", "other", "other", "again (and 2 more such lines)"]


def test_what_is_remembered_of_subjects_is_bounded() -> None:
    lines = SeldomLog(logging.getLogger("test"), most=1)
    for number in range(2000):
        lines.warning(f"10.0.0.{number}", "x")
    assert len(lines._seen) <= 256
