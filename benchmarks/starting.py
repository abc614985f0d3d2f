"""Start what experiments measure: sides in new processes, the `stoker` command, and sessions of local pilots."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import stoker
from stoker.site import Pilot, Policy, Site

STOKER = [sys.executable, "-m", "stoker.manager.cli.main"]
ONE_PILOT = '[pilot]\ndevices = "cpu:{devices}"\ninit_blocks = 1\nmax_blocks = 1\n[policy]\nname = "{policy}"\n'
"""A site file with one local pilot."""


def keep_state_in(place: Path | str) -> None:
    """Keep state and scratch files of the sessions of this process in a folder."""
    os.environ |= {"STOKER_HOME": f"{place}/home", "STOKER_SCRATCH": f"{place}/scratch"}


@contextmanager
def local_session(*, policy: Policy | None = None, **pilot: Any) -> Iterator[stoker.Session]:
    """Load a session without Parsl's log in a new folder. `pilot`: settings of the pilots, by default one device."""
    site = Site(pilot=Pilot(**{"devices": "cpu:1", **pilot}), policy=policy or Policy())
    with (
        tempfile.TemporaryDirectory(prefix="session-") as folder,
        stoker.load(site, run_dir=folder, strategy="none", initialize_logging=False) as session,
    ):
        yield session


def cpu_s(process: psutil.Process) -> float:
    """Return the processor seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


class Every(threading.Thread):
    """Calls `do` every `seconds` seconds until the end of a `with` block."""

    def __init__(self, seconds: float, do: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._seconds, self._do, self._over = seconds, do, threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._seconds):
            self._do()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
