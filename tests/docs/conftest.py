from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest


class Place:
    """A working folder with its own state folder and `stoker` on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environ = {
            **os.environ,
            "STOKER_HOME": str(folder / "home"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def run(self, command: str, *, limit_s: float = 120) -> str:
        done = self.try_to_run(command, limit_s=limit_s)
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def try_to_run(self, command: str, *, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=self._environ, capture_output=True, text=True, timeout=limit_s
        )

    def run_program(self, text: str, *, limit_s: float = 120) -> str:
        (self.folder / "program.py").write_text(text)
        return self.run(f"{shlex.quote(sys.executable)} program.py", limit_s=limit_s)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
