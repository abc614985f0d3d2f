"""Provide a session for the runs of one test file, with models that stay loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_SITE = '[provider]\nkind = "local"\n[pilot]\ndevices = "cpu:2"\nmax_blocks = 1\n'
_LIMIT_S = 150


class SessionUp:
    """Run `stoker up` with a separate state folder; run `stoker down` at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environ = pytest.MonkeyPatch()
        self.name = ""

    def __enter__(self) -> SessionUp:
        self._environ.setenv("STOKER_HOME", str(self._folder / "home"))
        (self._folder / "one.toml").write_text(_SITE)
        self.name = json.loads(self.stoker("up", "one.toml", "--json"))["session"]
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stoker("down", self.name)
        finally:
            self._environ.undo()

    @property
    def joined(self) -> list[str]:
        return ["--session", self.name]

    def stoker(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "stoker.manager.cli.entry", *arguments]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, timeout=_LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
