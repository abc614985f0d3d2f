"""Set-up for all tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from pathlib import Path
from tempfile import gettempdir

import pytest
import suite_compiling
import suite_guard
import suite_limits
import suite_long
from hypothesis import settings
from suite_order import LongestFirst

from stoker.contexts.folders import snapshot_folder

_STARTED = Path(__file__).parent / "started"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-seconds", action="store_true", help="write what files take into tests/file_seconds.json")
    suite_long.add_options(parser)


def pytest_xdist_auto_num_workers() -> int:
    """Two workers for each core of this process: many tests wait for other processes."""
    return 2 * len(os.sched_getaffinity(0))


def pytest_configure(config: pytest.Config) -> None:
    """Programs that tests start behave alike wherever the tests run.

    Ctrl-C works in them: a shell starts `pytest &` with SIGINT ignored, and children inherit that. So does a
    terminal that closes, although `nohup pytest` itself ignores it (a handler of Python's is not inherited). They
    do not think that make started them: `make test` says so in the environment, and hints are worded by it. They
    keep what Python compiles, also where the environment says otherwise, and so does pytest: hundreds of processes
    start, and compiling the same sources anew was half of what many of them cost. And converting the demo's model
    takes most of a minute: they share one snapshot, kept from run to run, which begins as the user's, or as that of
    the user's pilots here. Several tests share the cores: a thread of PyTorch that waits for work sleeps rather than
    spins, which took a quarter of the time of tests with models. They import Parsl without its monitoring
    (`started/sitecustomize.py`). While tests are
    collected, nothing becomes garbage. A random example has no time limit of its own: on a busy machine it would judge
    the machine.
    """
    gc.disable()
    settings.register_profile("stoker", deadline=None)
    settings.load_profile("stoker")
    os.environ.pop("MAKELEVEL", None)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_STARTED), os.environ.get("PYTHONPATH")]))
    sys.dont_write_bytecode = False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)
    if not hasattr(config, "workerinput"):  # xdist's workers inherit the run of the process that starts them
        guard = suite_guard.Guard()
        config.pluginmanager.register(guard)
        config.add_cleanup(guard.close)
    config.pluginmanager.register(suite_compiling)
    config.pluginmanager.register(suite_limits)
    config.pluginmanager.register(suite_long)
    config.pluginmanager.register(LongestFirst(config))
    cache = getattr(config, "cache", None)
    if cache is not None and "STOKER_SNAPSHOTS" not in os.environ:
        shared, pilots = Path(cache.mkdir("stoker-snapshots")), Path(gettempdir()) / f"stoker-{os.getuid()}"
        for folder in (snapshot_folder(), pilots / "snapshots"):
            for snapshot in folder.glob("[!.]*") if folder.is_dir() else ():
                if snapshot.is_dir() and not (shared / snapshot.name).exists():
                    shutil.copytree(snapshot, shared / snapshot.name)
        os.environ["STOKER_SNAPSHOTS"] = str(shared)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the site suite, which needs a site: `pytest --site SITE.toml tests/site`."""
    if collection_path == Path(__file__).parent / "site":
        return config.getoption("site_file", None) is None or None
    return None


def pytest_collection_finish(session: pytest.Session) -> None:
    """The collector looks at what tests make, and not at the modules and items of the whole suite each time."""
    gc.freeze()
    gc.enable()
