"""`python -m benchmarks.papers.schedmate.faults`: infrastructure faults among similar user mistakes.

A session of three pilots, each with its own disk (tmpfs), memory (cgroup) and GPU (a stand-in), gets every kind of
fault and mistake twenty times. *Retried*: a call with a fault completed on another pilot, or a call with a mistake ran
more than once. *At once*: the first pilot did not try the call again. *Lost budget*: Parsl or Stoker counted a failure.

Real: libraries that raise, full file systems, ESTALE, EIO and EDQUOT (by ptrace), a killed Gloo rank, and the
out-of-memory killer. Simulated: a torch operator raises the texts of CUDA and NCCL; the driver and the probe read
files.
"""

from __future__ import annotations

import os
import platform
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import stoker
from benchmarks.harness import ROOT, Clock, machine, side_options, until
from benchmarks.papers.schedmate.faults_lab import files, surroundings
from benchmarks.papers.schedmate.faults_lab.kinds import BOUNDED, FAULTS, MISTAKES, Case, device, run_case
from stoker.manager.executor.futures import AppCallFuture
from stoker.sessions import sent_call
from stoker.site import Pilot, Provider, Site

PILOTS, TIMES, SEED = 3, 20, 11
LIMIT_S = 1800.0
_COUNTED = re.compile(r"of 2 before it is given up|may have run when|it ended its library \d+ times")
"""Pattern of explanation lines which show that a death counts against the call."""


def main() -> int:
    side_options(__doc__)
    if reason := surroundings.why_not():
        print(f"skipped: {reason}")
        return 0
    clock = Clock("python -m benchmarks.papers.schedmate.faults")
    record = measure()
    for kind, row in record["kinds"].items():
        print(f"{kind:42}", row)
    print(f"{record['seconds']} s, met: {all_kinds_as_expected(record)}")
    clock.write("schedmate-faults", record)
    return 0 if all_kinds_as_expected(record) else 1


def measure() -> dict[str, Any]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        folder = Path(temporary)
        with surroundings.nodes(folder) as (worker_init, probe), surroundings.neighbours(folder / "requests") as beside:
            files.make_data_files(folder / "data")
            site = Site(
                provider=Provider(worker_init=worker_init),
                pilot=Pilot(
                    devices="gpu", init_blocks=PILOTS, max_blocks=PILOTS, scratch=str(folder / "scratch"),
                    probe=probe, probe_every_s=0,  # type: ignore[arg-type]
                ),
            )  # fmt: skip
            rows, ended = _run(site, folder)
            count = len(beside)
    return {
        "machine": f"{machine()}, Linux {platform.release().partition('-')[0]}", "seed": SEED, "times": TIMES,
        "seconds": round(time.monotonic() - started, 1), "pilots_at_the_end": ended, "neighbours": count,
        "kinds": rows,
    }  # fmt: skip


def _run(site: Site, folder: Path) -> tuple[dict[str, Any], int]:
    cases = []
    for name, kind in (FAULTS | MISTAKES).items():
        cases += [Case(name, kind.variants[turn % len(kind.variants)], 0, str(folder)) for turn in range(TIMES)]
    random.Random(SEED).shuffle(cases)
    cases = [case._replace(number=number) for number, case in enumerate(cases)]
    operator = _compile_operator(folder)
    sys.path[:0] = [str(ROOT / "tests" / "driver"), str(ROOT / "tests"), str(ROOT)]  # Pilots inherit this path.
    app = stoker.app(context=device(operator))(run_case)
    with stoker.load(site, run_dir=str(folder / "runs"), strategy="none") as session:
        until(lambda: len(session.status().pilots) >= PILOTS, 180, f"{PILOTS} pilots", every_s=0.1)
        futures = [(case, app(case)) for case in cases]
        rows: dict[str, Any] = {}
        for case, future in futures:
            _count_call(rows.setdefault(case.kind, _empty_row(case.kind)), case, future, session)
        return rows, len(session.status().pilots)


def _empty_row(kind: str) -> dict[str, Any]:
    counts = ("calls", "retried_elsewhere", "at_once", "ran_more_than_once", "lost_budget", "most_runs")
    return {
        "is_fault": kind in FAULTS,
        "bounded": kind in BOUNDED,
        **dict.fromkeys(counts, 0),
        "other_than_expected": [],
    }


def _count_call(row: dict[str, Any], case: Case, future: AppCallFuture, session: Any) -> None:
    error = future.exception(LIMIT_S)
    ran = Path(case.folder, "ran", str(case.number)).read_text().split()
    call = sent_call(future)
    story = str(session.explain(call.parsl_executor_task_id)) if call is not None else ""
    parsls = dict(getattr(future, "task_record", {}) or {}).get("fail_count", 0) if error is None else 0
    is_fault = case.kind in FAULTS
    elsewhere = error is None and ran[-1] != ran[0]
    row["calls"] += 1
    row["retried_elsewhere"] += is_fault and elsewhere
    row["at_once"] += is_fault and elsewhere and len(ran) == 2
    row["ran_more_than_once"] += len(ran) > 1
    row["lost_budget"] += is_fault and bool(parsls or _COUNTED.search(story))
    row["most_runs"] = max(row["most_runs"], len(ran))
    as_expected = elsewhere if is_fault else error is not None and (len(ran) == 1 or case.kind in BOUNDED)
    if not as_expected:
        said = f"{type(error).__name__}: {str(error)[:300]}" if error is not None else "completed"
        row["other_than_expected"].append({"variant": case.variant, "ran": ran, "said": said, "story": story[-3000:]})


def all_kinds_as_expected(record: dict[str, Any]) -> bool:
    return all(
        row["retried_elsewhere"] == row["calls"] and not row["lost_budget"]
        if row["is_fault"]
        else row["bounded"] or not row["ran_more_than_once"]
        for row in record["kinds"].values()
    )


def _compile_operator(folder: Path) -> str:
    from torch.utils import cpp_extension

    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # Python's folder may contain ninja.
    build = folder / "operator"
    build.mkdir()
    source = Path(__file__).parent / "faults_lab" / "op.cpp"
    made: Any = cpp_extension.load("faults_op", [str(source)], is_python_module=False, build_directory=str(build))
    return str(made)


if __name__ == "__main__":
    sys.exit(main())
