"""What every test may rely on."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from stoker.contexts.state import snapshot_folder

LONGEST = (
    "test_batch_chaos.py", "test_apps_end_to_end.py", "test_faults_tuning.py", "test_batch_slurm_away.py",
    "test_apps_tuning_submit.py", "test_batch_slurm_walltime.py", "test_apps_tuning_tune.py", "test_session_up.py",
    "test_batch_slurm_probe.py", "test_apps_tuning_ranks.py", "test_session_neighbours.py",
    "test_batch_slurm_grace.py", "test_programs_alone.py", "test_live_snapshots.py", "test_faults_gangs.py",
    "test_batch_slurm_losses.py", "test_faults_interrupts.py", "test_contexts_causal_lm.py",
    "test_programs_baselines.py", "test_parsl_suite.py", "test_batch_slurm_newcomer.py", "test_benchmarks_run.py",
    "test_sim_bound.py", "test_factory_session.py", "test_study_reproduce_page.py",
)  # fmt: skip
"""Files that take twenty seconds or more, about the longest first; those that mostly wait for Slurm stand between those
that compute."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin, whatever the order of the rest: of several workers none is left alone with one. (For
    that `make test` asks xdist not to sort files by the number of their tests.)"""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def pytest_configure(config: pytest.Config) -> None:
    """Programs that tests start behave alike wherever the tests run.

    Ctrl-C works in them: a shell starts `pytest &` with SIGINT ignored, and children inherit that. They do not think
    that make started them: `make test` says so in the environment, and hints are worded by it. They keep what Python
    compiles, also where the environment says otherwise, and so does pytest: hundreds of processes start, and compiling
    the same sources anew was half of what many of them cost. And converting the demo's model takes most of a minute:
    they share one snapshot, kept from run to run, which begins as the user's.
    """
    os.environ.pop("MAKELEVEL", None)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cache = getattr(config, "cache", None)
    if cache is not None and "STOKER_SNAPSHOTS" not in os.environ:
        shared, users = Path(cache.mkdir("stoker-snapshots")), snapshot_folder()
        for snapshot in users.glob("[!.]*") if users.is_dir() else ():
            if snapshot.is_dir() and not (shared / snapshot.name).exists():
                shutil.copytree(snapshot, shared / snapshot.name)
        os.environ["STOKER_SNAPSHOTS"] = str(shared)
