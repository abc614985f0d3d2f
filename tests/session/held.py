"""Start session processes that pause until a test releases them, or that own the session lease; read their output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from faults.world import World, until

MANAGER = "stoker.manager.main"
_CODE = """
import os, sys, time

MODULE, HERE, GO = os.environ["STOKER_TESTS_HOLD"].split(os.pathsep)


def wait():
    open(HERE, "w").close()
    while not os.path.exists(GO):
        time.sleep(0.01)


def take_and_wait(*arguments, **options):
    held = take(*arguments, **options)
    wait()
    return held


if MODULE in sys.orig_argv and MODULE == "stoker.manager.main":
    from stoker.manager.live import lease

    take, lease.take_lease = lease.take_lease, take_and_wait
elif MODULE in sys.orig_argv:
    wait()
"""


_LEASE = """
import sys, time
from pathlib import Path
from stoker.manager.live import lease
held = lease.take_lease(Path(sys.argv[1]), renew_s=0.05)
held.start_renewing(lambda other: None)
print("held", flush=True)
time.sleep(600)
"""


def hold_lease(path: Path, *, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a process that takes and renews a lease. `within`: a prefix of the command."""
    process = subprocess.Popen([*within, sys.executable, "-c", _LEASE, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def output_of(process: subprocess.Popen[str], *, limit_s: float = 120.0) -> str:
    """Wait for a program that must succeed, and return its output."""
    out, err = process.communicate(timeout=limit_s)
    assert process.returncode == 0, err
    return out


class Held:
    """Pauses processes that run `python -m MODULE` with `environ`: a manager after it has its lease, other processes at
    their start.
    """

    def __init__(self, world: World, module: str) -> None:
        folder = world.path / "held"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_CODE)
        self._here, self._go = folder / "here", folder / "go"
        paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
        self.environ = {
            "PYTHONPATH": os.pathsep.join(paths),
            "STOKER_TESTS_HOLD": os.pathsep.join([module, str(self._here), str(self._go)]),
        }

    def wait(self) -> None:
        until(self._here.exists, why="a process that is held")

    def let_go(self) -> None:
        self._go.touch()
