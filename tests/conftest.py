"""What every test may rely on."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from stoker.contexts.state import snapshot_folder


def pytest_configure(config: pytest.Config) -> None:
    """Programs that tests start behave alike wherever the tests run.

    Ctrl-C works in them: a shell starts `pytest &` with SIGINT ignored, and children inherit that. They do not think
    that make started them: `make test` says so in the environment, and hints are worded by it. And converting the
    demo's model takes most of a minute: they share one snapshot, kept from run to run, which begins as the user's.
    """
    os.environ.pop("MAKELEVEL", None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cache = getattr(config, "cache", None)
    if cache is not None and "STOKER_SNAPSHOTS" not in os.environ:
        shared, users = Path(cache.mkdir("stoker-snapshots")), snapshot_folder()
        for snapshot in users.glob("[!.]*") if users.is_dir() else ():
            if snapshot.is_dir() and not (shared / snapshot.name).exists():
                shutil.copytree(snapshot, shared / snapshot.name)
        os.environ["STOKER_SNAPSHOTS"] = str(shared)
