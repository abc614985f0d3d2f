from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from batch.lab.shape import LabError, Place

_PROGRAM = Path(__file__).with_name("machine.py")
_ALONE = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
_ANSWER_S = 20.0


class Handle:
    """A running machine. `alone`: the machine has its own namespaces."""

    def __init__(self, name: str, commands: dict[str, list[str]], *, place: Place, alone: bool) -> None:
        self.name = name
        self.daemons = tuple(commands)
        self._alone = alone
        logs = place.logs / name
        logs.mkdir()
        python = [sys.executable, "-I", "-S", str(_PROGRAM), str(place.lock), str(logs), json.dumps(commands)]
        with (logs / "machine.out").open("wb") as complaints:
            self._process = subprocess.Popen(
                [*(_ALONE if alone else []), *python],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                cwd="/",
                env=environment(place),
                start_new_session=True,
            )
        self._kept = b""

    def ready(self) -> None:
        self._answer("beginning")

    def start(self, daemon: str) -> None:
        self._ask(f"start {daemon}")

    def kill(self, daemon: str) -> None:
        self._ask(f"kill {daemon}")

    def freeze(self, daemon: str) -> None:
        self._ask(f"freeze {daemon}")

    def thaw(self, daemon: str) -> None:
        self._ask(f"thaw {daemon}")

    def crash(self) -> None:
        self._ask("crash")

    def runs(self, daemon: str) -> bool:
        return self._ask(f"look {daemon}") != "0"

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this machine. All machines see the same files."""
        if not self._alone:
            return list(command)
        namespaces = Path(f"/proc/{self._process.pid}/ns")
        pids = namespaces / "pid_for_children"
        return ["nsenter", f"--net={namespaces}/net", f"--uts={namespaces}/uts", f"--mount={namespaces}/mnt",
                f"--pid={pids}", f"--wd={os.getcwd()}", "--", *command]  # fmt: skip

    @property
    def network(self) -> str:
        return str(self._process.pid)

    def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def gone(self) -> None:
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _ask(self, line: str) -> str:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise LabError(f"{self.name}: {line}: the machine is gone ({error})") from error
        return self._answer(line)

    def _answer(self, line: str) -> str:
        assert self._process.stdout is not None
        until = time.monotonic() + _ANSWER_S
        while b"\n" not in self._kept:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            heard = os.read(self._process.stdout.fileno(), 4096) if ready else b""
            if not heard:
                raise LabError(f"{self.name}: {line}: {'the machine is gone' if ready else 'no answer'}")
            self._kept += heard
        said, _, self._kept = self._kept.partition(b"\n")
        word, _, more = said.decode().partition(" ")
        if word != "ok":
            raise LabError(f"{self.name}: {more}")
        return more


def environment(place: Place) -> dict[str, str]:
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(Path.home()),
        "LC_ALL": "C",
        "SLURM_CONF": str(place.conf),
    }
