"""A gateway process in front of a local session."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cli.command_line import Stoker
from faults.world import until as wait_until
from free_port import free_port
from tiny_model import write_tiny_model

T = TypeVar("T")

SERVE = [sys.executable, "-m", "stoker.manager.cli.main"]
LIMIT_S = 240
SITE = """
name = "here"
[pilot]
devices = "cpu:3"
init_blocks = 1
max_blocks = 1
"""
MODELS = """
[models.small]
path = "models/tiny"
ttft = "10 min"
cold = "wait"
max = 1

[models.vectors]
path = "models/tiny"
kind = "embedding"
max = 1

[models.gone]
path = "./models/gone"

[models.huge]
path = "models/tiny"
memory = "900 TB"

[models.shy]
path = "models/tiny"
dtype = "bfloat16"
cold = "refuse"

[models.swift]
path = "models/tiny"
memory = "1500 MB"
ttft = "1 ms"

[models.fleeting]
path = "models/tiny"
memory = "1400 MB"
max = 1
keep_alive = "1 s"
"""


def until(true: Callable[[], T], *, why: str) -> T:
    """Wait for a true value, with the limit for a busy machine; return the value."""
    return wait_until(true, limit_s=LIMIT_S, why=why)


class RunningGateway:
    """Run `stoker serve` in `folder` with the named files, by default a site file and a models file."""

    def __init__(self, folder: Path, *files: str) -> None:
        self.folder = folder
        self.files = files or ("site.toml", "models.toml")
        self.said: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        folder.mkdir(exist_ok=True)
        (folder / "site.toml").write_text(SITE)
        (folder / "models.toml").write_text(MODELS)
        if not (folder / "models").exists():
            (folder / "models").mkdir()
            write_tiny_model(folder / "models" / "tiny")

    def start(self, *options: str) -> None:
        """Start the gateway: first on a reserved port, later on the port of the first start."""
        self.said = []
        if self._process is None and not {"--port", "--uds"} & set(options):
            options = (*options, "--port", str(free_port()))
        self._process = subprocess.Popen(
            [*SERVE, "serve", *self.files, *options],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        threading.Thread(target=_read, args=(self._process, self.said), daemon=True).start()
        until(lambda: self.is_ready or self.has_ended, why="the gateway's address")
        assert not self.has_ended, "".join(self.said)

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self.said[-1:] == [""]

    @property
    def is_ready(self) -> bool:
        return "/v1" in "".join(self.said)

    @property
    def url(self) -> str:
        found = re.search(r"(https?://\S+)/v1", "".join(self.said))
        return found[1] if found else ""

    @property
    def session(self) -> str:
        found = re.search(r"session (\S+?)[,\s]", "".join(self.said))
        assert found, self.said
        return found[1]

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> str:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(LIMIT_S)
        until(lambda: self.has_ended, why="the end of its output")
        return "".join(self.said)

    def end(self) -> None:
        if self.is_alive:
            self.stop()
        stoker("down", self.session)


def _read(process: subprocess.Popen[str], said: list[str]) -> None:
    """Read all output of a process; an empty line marks the end."""
    assert process.stdout is not None
    said.extend(process.stdout)
    said.append("")


def stoker(*words: str) -> str:
    """Return what `stoker WORDS` prints. The command runs in this process with the environment of `world`."""
    return Stoker().ok(*words).stdout


def keys(*words: str) -> str:
    return stoker("serve", "keys", *words).strip()
