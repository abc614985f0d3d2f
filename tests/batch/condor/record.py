"""`make condor`: run the tests of this folder with real HTCondor daemons and record the run."""

from __future__ import annotations

import json
import os
import platform
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from batch.condor.needs import daemons

_ROOT = Path(__file__).parents[3]
_RESULTS = "STOKER_CONDOR_RESULTS"
RECORD = _ROOT / "benchmarks" / "records" / "condor.json"


def main(arguments: list[str]) -> int:
    found = daemons()
    if found is None:
        print("make condor: no HTCondor is on PATH (condor_master, condor_submit), so nothing was run or recorded")
        return 0
    signal.signal(signal.SIGINT, lambda *_: None)  # pytest exits normally on SIGINT, and completed tests are recorded
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="condor-") as folder:
        results = Path(folder) / "results"
        results.touch()
        program = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-p",
            "batch.condor.record",
            f"--basetemp={folder}/tests",
        ]
        words = arguments or [str(Path(__file__).parent)]
        environ = {**os.environ, _RESULTS: str(results)}
        code = subprocess.run([*_as_a_user(), *program, *words], env=environ, check=False).returncode
        outcomes = dict(sorted(line.split(" ", 1)[::-1] for line in results.read_text().splitlines()))
    version = subprocess.run([found.bin / "condor_version"], capture_output=True, text=True, check=False).stdout
    counts = {kind: list(outcomes.values()).count(kind) for kind in dict.fromkeys(outcomes.values())}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    record = {
        "what": "tests/batch/condor over HTCondor's own daemons",
        "at": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit, "condor": version.splitlines()[:1],
        "machine": {"cores": os.cpu_count(), "system": platform.platform()}, "load": list(os.getloadavg()),
        "took_s": round(time.monotonic() - began, 1), "complete": code in (0, 1), "counts": counts, "tests": outcomes,
    }  # fmt: skip
    if not arguments:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(f"make condor: {counts}; the record is {RECORD.relative_to(_ROOT)}")
    return code


def _as_a_user() -> list[str]:
    """Return a prefix that runs root's commands as an ordinary user, who owns root's files in a new namespace."""
    if os.geteuid():
        return []
    user = next(each for each in pwd.getpwall() if 0 < each.pw_uid < 60_000 and each.pw_gid)
    return ["unshare", "--user", f"--map-user={user.pw_uid}", f"--map-group={user.pw_gid}"]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of a test (pytest hook). An interrupted test has no outcome."""
    results = os.environ.get(_RESULTS)
    if results and (report.when == "call" or report.outcome != "passed"):
        with open(results, "a") as file:
            file.write(f"{report.outcome} {_name(report.nodeid)}\n")


def _name(node: str) -> str:
    file, _, test = node.partition("::")
    return f"{Path(file).name}::{test}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
