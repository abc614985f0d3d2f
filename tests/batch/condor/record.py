"""`make condor`: the tests of this folder over HTCondor's own daemons, and a record of what ran.

Runs as `python -m batch.condor.record [ARGUMENTS OF PYTEST]`. It needs HTCondor on PATH (`condor_master`,
`condor_submit`), and nothing configured: tests start daemons of their own, on loopback, with their files in the test's
folder.
HTCondor takes no jobs of root, so root's tests run as an ordinary user of a user namespace.
"""

from __future__ import annotations

import json
import os
import platform
import pwd
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path

from batch.condor.needs import daemons

_ROOT = Path(__file__).parents[3]
RECORD = _ROOT / "benchmarks" / "records" / "condor.json"


def main(arguments: list[str]) -> int:
    """Run the tests, write the record; the exit code of pytest."""
    found = daemons()
    if found is None:
        print("make condor: no HTCondor is on PATH (condor_master, condor_submit), so nothing was run or recorded")
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="condor-") as folder:
        results = Path(folder) / "results.xml"
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        words = arguments or [str(Path(__file__).parent)]
        code = subprocess.run([*_as_a_user(), *pytest, f"--junitxml={results}", *words], check=False).returncode
        outcomes = _outcomes(results) if results.exists() else {}
    version = subprocess.run([found.bin / "condor_version"], capture_output=True, text=True, check=False).stdout
    counts = {kind: list(outcomes.values()).count(kind) for kind in dict.fromkeys(outcomes.values())}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    record = {
        "what": "tests/batch/condor over HTCondor's own daemons",
        "at": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit, "condor": version.splitlines()[:1],
        "machine": {"cores": os.cpu_count(), "system": platform.platform()}, "load": list(os.getloadavg()),
        "took_s": round(time.monotonic() - began, 1), "counts": counts, "tests": outcomes,
    }  # fmt: skip
    if not arguments:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(f"make condor: {counts}; the record is {RECORD.relative_to(_ROOT)}")
    return code


def _as_a_user() -> list[str]:
    """What stands before the command of root: an ordinary user of a namespace, who owns what root owns outside."""
    if os.geteuid():
        return []
    user = next(each for each in pwd.getpwall() if 0 < each.pw_uid < 60_000 and each.pw_gid)
    return ["unshare", "--user", f"--map-user={user.pw_uid}", f"--map-group={user.pw_gid}"]


def _outcomes(results: Path) -> dict[str, str]:
    """How each test ended, by its name."""
    ends = {}
    for case in ET.parse(results).getroot().iter("testcase"):
        skipped = case.find("skipped")
        bad = case.find("failure") is not None or case.find("error") is not None
        kind = "failed" if bad else "skipped" if skipped is not None else "passed"
        ends[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = kind
    return dict(sorted(ends.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
