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


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers per core, because many tests wait for other processes. Three for long tests, which wait more."""
    return (3 if config.getoption("--long") else 2) * len(os.sched_getaffinity(0))


def pytest_configure(config: pytest.Config) -> None:
    """Make programs of tests behave alike on every machine.

    The programs import Parsl without monitoring (`started/sitecustomize.py`). Runs share one snapshot of the demo
    model, because its conversion takes most of a minute.
    """
    # Collect no garbage while tests are collected.
    gc.disable()
    # Random examples have no time limit, because their times depend on the machine load.
    settings.register_profile("stoker", deadline=None)
    settings.load_profile("stoker")
    # `make test` sets this variable, which changes the text of hints.
    os.environ.pop("MAKELEVEL", None)
    # Keep compiled files, because compilation was half of the start time of many test processes.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Spinning PyTorch threads took a quarter of the time of tests with models.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_STARTED), os.environ.get("PYTHONPATH")]))
    sys.dont_write_bytecode = False
    # A shell starts `pytest &` with SIGINT ignored, and children inherit ignored signals. `nohup pytest` must ignore
    # SIGHUP. A Python handler ignores the signal only in pytest, because children inherit no handlers.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)
    # xdist workers use the guard of the pytest process that starts them
    if not hasattr(config, "workerinput"):
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
    """Ignore the site suite, which requires a site: `pytest --site SITE.toml tests/site`."""
    if collection_path == Path(__file__).parent / "site":
        return config.getoption("site_file", None) is None or None
    return None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude collected modules and items from garbage collection."""
    gc.freeze()
    gc.enable()
