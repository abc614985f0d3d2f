"""Run the test suite of Parsl's wheel with Stoker's executor as its `--config`; arguments go to pytest.

    python tests/parsl/run_suite.py              all tests
    python tests/parsl/run_suite.py -k memoize   selected tests

DESELECTED lists the omitted tests with reasons.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

import parsl

SUITE = Path(parsl.__file__).parent / "tests"
CONFIG = Path(__file__).with_name("stoker_config.py")

DESELECTED = {
    "test_error_handling/test_resource_spec.py::test_resource": (
        "it lists by class the executors that may refuse a specification; ours refuses too, and "
        "tests/api/test_programs_in_session.py says which error it gives"
    ),
    "test_bash_apps/test_apptimeout.py::test_walltime": (
        "it asks that the 10 ms of a call are noticed before a shell that sleeps for 50 ms has ended, which a machine "
        "that is busy cannot promise; tests/api/test_programs_in_session.py has a call whose walltime is over"
    ),
    "test_python_apps/test_timeout.py::test_timeout_after_exception": (
        "it uses no executor: it asks that a call of Parsl's own timer ends within 5 ms of the timer's start, which a "
        "machine that is busy cannot promise"
    ),
}

WANTS_MODULE = {"test_regression/test_226.py": "pandas"}
"""Test files that import a module which neither Parsl nor Stoker requires."""


def command(arguments: list[str]) -> list[str]:
    selection = [] if "-k" in arguments else ["-k", "not cleannet"]
    return [
        *(sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", f"--rootdir={SUITE.parent.parent}"),
        *("-p", "no:randomly", "-p", "no:cacheprovider", *selection),
        *(("-m", "not unix_filesystem_permissions_required") if os.geteuid() == 0 else ()),
        *("--noconftest", "-p", "parsl_conftest", "--config", str(CONFIG)),
        *(f"--deselect=parsl/tests/{name}" for name in DESELECTED),
        *(f"--ignore={SUITE / name}" for name, module in WANTS_MODULE.items() if find_spec(module) is None),
        *arguments,
        str(SUITE),
    ]


def run(arguments: list[str], *, folder: str, limit_s: float | None = None) -> subprocess.CompletedProcess[str]:
    scripts = sysconfig.get_path("scripts")
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(CONFIG.parent), os.environ.get("PYTHONPATH")])),
        "PARSL_TESTING": "true",
        "STOKER_TESTS_MONITORING": "1",
    }
    return subprocess.run(
        command(arguments), cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=limit_s, check=False,
    )  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        done = run(sys.argv[1:], folder=scratch)
    sys.stdout.write(done.stdout)
    sys.exit(done.returncode)
