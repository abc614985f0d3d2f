"""Processes of a session that pause until a test releases them."""

from __future__ import annotations

import os
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

    take, lease.take = lease.take, take_and_wait
elif MODULE in sys.orig_argv:
    wait()
"""


class Held:
    """Stops processes that run `python -m MODULE` with `environ`: a manager after it has its lease, others at their
    start."""

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
        Path(self._go).touch()
