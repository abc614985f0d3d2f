"""Record the output of failing jobs on a real Slurm and a real Open MPI.

Slurm's daemons run on loopback, each node in its own namespaces (`tests/batch/lab`; root, slurm-wlm, munge). Faults are
real: a node loses power or network, a daemon is killed, a limit is exceeded. The label is the first unusual line of
the program (see `ORDINARY`).
"""

from __future__ import annotations

import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks import corpora
from benchmarks.harness import ROOT
from benchmarks.papers.schedmate.failures.corpus import MPI, RECORDED_ON_CLUSTERS, Run
from benchmarks.papers.schedmate.failures.recording import ON_CLUSTERS, USERS

if TYPE_CHECKING:
    from batch.lab.cluster import Cluster

ORDINARY = re.compile(r"\s*$|(?:.{0,60}INFO.{0,12})?step \d+ rank \d+ |finished$|resuming from ")
TIMES = 3
"""Runs of each failure with different steps, ranks and line formats."""
_OVER_S = 100.0


class Scenario(msgspec.Struct, frozen=True):
    """A failing job. `script`: template with `{run}` for the program. Without `fault` the job succeeds."""

    fault: str
    program: str
    script: str
    options: tuple[str, ...] = ()
    mode: str = "none"
    steps: int = 24
    strike: str = ""
    mend: str = ""


def _strike(what: str, cluster: Cluster, job: str) -> None:
    match what:
        case "crash":
            cluster.crash("n2")
        case "cut":
            cluster.cut("n2")
        case "kill_slurmd":
            cluster.kill("n2")
        case "kill_slurmctld":
            cluster.kill("slurmctld")
            time.sleep(45)  # Wait longer than srun retries.
            cluster.start("slurmctld")
        case "kill_orted":
            inside = cluster.machines["n2"].inside
            found = subprocess.run(inside("pgrep", "-x", "orted"), capture_output=True, text=True, check=True)
            subprocess.run(inside("kill", "-9", *found.stdout.split()), check=True)
        case "push":
            cluster.submit("sleep 3", "--partition=main", "--exclusive", "--nodelist=n3")
        case "cancel":
            cluster.cancel(job)
        case _:
            raise ValueError(what)


SCENARIOS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, tuple[Scenario, ...]])[
    "scenario"
]


def record(mpi_python: str) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from batch.lab.cluster import Cluster
    from batch.lab.shape import Shape

    settings = {
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "task=1",
        "JobAcctGatherParams": "OverMemoryKill",
    }
    runs: list[Run] = []
    shape = Shape(gpus=("", "", ""), memory_mb=3000, namespaces=True, settings=settings)
    with tempfile.TemporaryDirectory() as folder, Cluster(shape) as cluster:
        place = Path(folder)
        (place / "train.py").write_text(ON_CLUSTERS["slurm"])
        (place / "solver.py").write_text(ON_CLUSTERS["mpi"])
        for at, scenario in enumerate(SCENARIOS):
            for number in range(TIMES):
                runs.append(_run(cluster, place, scenario, f"{at} {number}", mpi_python))
                print(scenario.fault or "good", scenario.program, runs[-1].truth, len(runs[-1].lines), flush=True)
    corpora.write(RECORDED_ON_CLUSTERS, msgspec.msgpack.encode(runs))


def _run(cluster: Cluster, place: Path, scenario: Scenario, name: str, mpi_python: str) -> Run:
    chance = random.Random(name)
    user, project = chance.choice(USERS), chance.choice(("project", "cfd", "thesis/code"))
    steps, form = scenario.steps + chance.randrange(scenario.steps // 2 + 1), chance.choice(("dated", "bare", "level"))
    python = f"{mpi_python} -m mpi4py {place}/solver.py" if scenario.program == MPI else f"python3 {place}/train.py"
    script = scenario.script.format(run=f"{python} {scenario.mode} {steps} {form}")
    if scenario.program == MPI:
        script = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; " + script
    out = place / f"{name.replace(' ', '-')}.out"
    out.touch()
    command = ["sbatch", "--parsable", f"--chdir={place}", f"--output={out}", *scenario.options, f"--wrap={script}"]
    job = cluster.run(*command).strip()
    if scenario.strike:
        cluster.wait(job, "RUNNING")
        time.sleep(1.0 if "sleep" in scenario.script else 3.0 + 3.0 * chance.random())
        _strike(scenario.strike, cluster, job)
    deadline = time.monotonic() + _OVER_S
    while cluster.job(job).get("JobState", "RUNNING") in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
        if time.monotonic() > deadline:
            cluster.cancel(job)
            break
        time.sleep(0.5)
    time.sleep(0.5)  # Wait for srun's last lines.
    text = out.read_text("utf-8", "replace")
    if scenario.mend == "heal":
        cluster.heal("n2")
    cluster.clear(limit_s=60.0)
    masks = {str(place): f"/home/{user}/{project}", socket.gethostname(): "n1", "(root)": f"({user})"}
    real = Path(mpi_python).resolve().parent.parent
    masks |= {str(Path(mpi_python).parent.parent): "/opt/conda", str(real): "/opt/conda"}
    for name, other in masks.items():
        text = text.replace(name, other)
    return labelled(scenario.fault, scenario.program, text.split("\n"))


def labelled(fault: str, program: str, lines: list[str]) -> Run:
    while lines and not lines[-1]:
        lines.pop()
    truth = next((at for at, line in enumerate(lines) if not ORDINARY.match(line)), -1)
    return Run(fault, program, truth, lines)
