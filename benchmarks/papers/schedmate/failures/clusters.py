"""Record what a real Slurm and a real Open MPI print when jobs fail on them.

A Slurm of four daemons comes up on loopback, each node in namespaces of its own (`tests/batch/lab`; root, slurm-wlm,
munge). Jobs run on it: a program under `srun`, or an MPI program under `mpirun` (openmpi-bin, and a Python that has
mpi4py). Faults are real: a node loses its power or its network, a daemon is killed, a limit is passed, a file system is
full. What the job's output holds is the log.

The truth is found without a look at words of failure: it is the first line that the program did not write as an
ordinary one (`ORDINARY`). Paths and users are replaced as in `recording`; nodes are called n1, n2, n3.
"""

from __future__ import annotations

import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from benchmarks import corpora
from benchmarks.harness import ROOT
from benchmarks.papers.schedmate.failures.recording import RECORDED_ON_CLUSTERS, USERS, Run

if TYPE_CHECKING:
    from batch.lab.cluster import Cluster

SLURM, MPI = "slurm", "mpi"
ORDINARY = re.compile(r"\s*$|(?:.{0,60}INFO.{0,12})?step \d+ rank \d+ |finished$|resuming from ")
TIMES = 3
"""Each failure is recorded so often, with other steps, ranks and forms of lines."""
_OVER_S = 100.0

_PROGRAM = """
import os, sys, time
mode, steps, form = sys.argv[1], int(sys.argv[2]), sys.argv[3]
FORMS = {"dated": "2026-11-26 04:%02d:%02d INFO train: ", "bare": "", "level": "INFO:train:"}
def say(step, rank, text):
    mark = FORMS[form]
    print((mark % (step // 60, step % 60) if "%" in mark else mark) + f"step {step} rank {rank} {text}", flush=True)
"""
_ON_SLURM = (
    _PROGRAM
    + """
rank, held = os.environ.get("SLURM_PROCID", "0"), []
def read_shard(step):
    return open(f"/data/shards/shard-{step:05d}.tar", "rb")
def crash(step):
    import ctypes
    return ctypes.string_at(0)
def main():
    for step in range(steps):
        say(step, rank, f"loss {1 / (step + 1):.4f} val_error={0.1 / (step + 1):.4f} images/s {900 + step}")
        time.sleep(0.25)
        if step < min(steps // 2, 12): continue
        if mode == "memory":
            held.append(b"1" * (40 << 20))
        if mode == "segfault" and rank == "1":
            crash(step)
        if mode == "file" and rank == "1":
            read_shard(step)
    print("finished", flush=True)
main()
"""
)
_ON_MPI = (
    _PROGRAM
    + """
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
one = 1 % size
def exchange(step):
    field = np.zeros(100)
    if mode == "truncate" and rank == 0: comm.Send(field, dest=one)
    if mode == "truncate" and rank == one: comm.Recv(np.zeros(10), source=0)
    if mode == "neighbour" and rank == one: comm.Send(field, dest=size)
def advance(step):
    if mode == "segfault" and rank == one:
        import ctypes
        ctypes.string_at(0)
    if mode == "shapes" and rank == one: return np.zeros(3) + np.zeros(4)
    if mode == "key" and rank == one: return {"mesh": 1}["boundary"]
    if mode == "diverged" and rank == one:
        print(f"rank {rank}: residual 3.1e+12 at step {step}, giving up", flush=True)
        comm.Abort(7)
    if mode == "quiet" and rank == one: comm.Abort(1)
    if mode == "exit" and rank == one: os._exit(0)
    if mode == "code" and rank == one: os._exit(3)
def main():
    for step in range(steps):
        say(step, rank, f"residual {1 / (step + 1):.6f} errors=0")
        comm.allreduce(step)
        time.sleep(0.04)
        if step >= min(steps // 2, 30):
            exchange(step)
            advance(step)
    print("finished", flush=True)
main()
"""
)


class Scenario(NamedTuple):
    """A job that fails. `script` has `{run}` for the program with its steps and form; `strike` breaks something while it
    runs; `fault` is empty for a job that goes well."""

    fault: str
    program: str
    script: str
    options: tuple[str, ...] = ()
    mode: str = "none"
    steps: int = 24
    strike: Callable[[Cluster, str], object] | None = None
    mend: Callable[[Cluster], object] | None = None


def _crash(cluster: Cluster, _job: str) -> None:
    cluster.crash("n2")


def _cut(cluster: Cluster, _job: str) -> None:
    cluster.cut("n2")


def _kill_slurmd(cluster: Cluster, _job: str) -> None:
    cluster.kill("n2")


def _kill_slurmctld(cluster: Cluster, _job: str) -> None:
    cluster.kill("slurmctld")
    time.sleep(45)  # longer than srun asks for it
    cluster.start("slurmctld")


def _kill_orted(cluster: Cluster, _job: str) -> None:
    found = subprocess.run(
        cluster.machines["n2"].inside("pgrep", "-x", "orted"), capture_output=True, text=True, check=True
    )
    subprocess.run(cluster.machines["n2"].inside("kill", "-9", *found.stdout.split()), check=True)


def _push(cluster: Cluster, _job: str) -> None:
    cluster.submit("sleep 3", "--partition=main", "--exclusive", "--nodelist=n3")


def _cancel(cluster: Cluster, job: str) -> None:
    cluster.cancel(job)


def _mend(cluster: Cluster) -> None:
    cluster.heal("n2")


_TWO = ("--nodes=2", "--nodelist=n1,n2", "--no-requeue")
_SMALL_SHM = "mount -t tmpfs -o size=4m tmpfs /dev/shm; "
_ALONE = "unset SLURM_JOB_ID SLURM_JOBID SLURM_NODELIST SLURM_JOB_NODELIST; "
SCENARIOS = (
    Scenario("", SLURM, "srun {run}", ("--ntasks=2",)),
    Scenario("", MPI, "mpirun {run}", ("--ntasks=4", "--nodes=2")),
    # ---- the batch system and the nodes
    Scenario("walltime", SLURM, "srun {run}", ("--ntasks=2", "--time=1"), steps=4000),
    Scenario("walltime", MPI, "mpirun {run}", ("--ntasks=2", "--time=1"), steps=9000),
    Scenario("host_memory_own", SLURM, "srun {run}", ("--ntasks=1", "--mem=150"), mode="memory", steps=40),
    Scenario("host_memory_own", SLURM, "{run}", ("--ntasks=1", "--mem=150"), mode="memory", steps=40),
    Scenario("preemption", SLURM, "srun {run}", ("--ntasks=2", "--nodelist=n3", "--mem=2000", "--no-requeue"), steps=400, strike=_push),
    Scenario("preemption", SLURM, "{run}", ("--ntasks=1", "--nodelist=n3", "--mem=2000", "--no-requeue"), steps=400, strike=_push),
    Scenario("node_failure", SLURM, "srun {run}", ("--ntasks=2", *_TWO), steps=400, strike=_crash),
    Scenario("node_failure", SLURM, "srun {run}", ("--ntasks=4", *_TWO), steps=400, strike=_cut, mend=_mend),
    Scenario("slurm_launch_failed", SLURM, "{run}; sleep 3; srun {run}", ("--ntasks=2", *_TWO), steps=4, strike=_kill_slurmd),
    Scenario("batch_services", SLURM, "{run}; sleep 5; srun {run}", ("--ntasks=2", *_TWO), steps=4, strike=_kill_slurmctld),
    Scenario("slurm_cancelled", SLURM, "srun {run}", ("--ntasks=4",), steps=400, strike=_cancel),
    Scenario("slurm_cancelled", SLURM, "{run}", ("--ntasks=1",), steps=400, strike=_cancel),
    Scenario("slurm_cancelled", MPI, "mpirun {run}", ("--ntasks=2",), steps=900, strike=_cancel),
    Scenario("slurm_bad_request", SLURM, "{run}; srun --ntasks=64 {run}", ("--ntasks=1",), steps=4),
    Scenario("slurm_bad_request", SLURM, "{run}; srun --mem=900000 {run}", ("--ntasks=1",), steps=4),
    Scenario("slurm_bad_request", SLURM, "{run}; unset SLURM_JOB_ID; srun --partition=gpuu {run}", ("--ntasks=1",), steps=4),
    Scenario("slurm_bad_request", SLURM, "{run}; sbatch --nodes=9 next.sh", ("--ntasks=1",), steps=4),
    Scenario("script_not_there", SLURM, "srun ./trainer --lr 0.1", ("--ntasks=2",)),
    Scenario("script_not_there", MPI, "mpirun ./solver --input mesh.h5", ("--ntasks=4",)),
    # ---- the program
    Scenario("segfault", SLURM, "srun --kill-on-bad-exit=1 {run}", ("--ntasks=4", *_TWO), mode="segfault"),
    Scenario("segfault", MPI, "mpirun {run}", ("--ntasks=4",), mode="segfault", steps=60),
    Scenario("file_not_found", SLURM, "srun --kill-on-bad-exit=1 {run}", ("--ntasks=4",), mode="file"),
    Scenario("mpi_exception", MPI, "mpirun {run}", ("--ntasks=4",), mode="shapes", steps=60),
    Scenario("mpi_exception", MPI, "mpirun {run}", ("--ntasks=6", *_TWO), mode="key", steps=60),
    Scenario("mpi_abort", MPI, "mpirun {run}", ("--ntasks=4",), mode="diverged", steps=60),
    Scenario("mpi_abort", MPI, "mpirun {run}", ("--ntasks=6", *_TWO), mode="quiet", steps=60),
    Scenario("mpi_truncate", MPI, "mpirun {run}", ("--ntasks=4",), mode="truncate", steps=60),
    Scenario("mpi_invalid_rank", MPI, "mpirun {run}", ("--ntasks=4",), mode="neighbour", steps=60),
    Scenario("mpi_exited_early", MPI, "mpirun {run}", ("--ntasks=4",), mode="exit", steps=60),
    Scenario("mpi_exited_early", MPI, "mpirun {run}", ("--ntasks=4",), mode="code", steps=60),
    Scenario("mpi_slots", MPI, "mpirun -n 16 {run}", ("--ntasks=4",)),
    # ---- MPI's network and memory
    Scenario("mpi_daemon_lost", MPI, "mpirun {run}", ("--ntasks=4", *_TWO), steps=900, strike=_kill_orted),
    Scenario("mpi_daemon_lost", MPI, "mpirun {run}", ("--ntasks=4", *_TWO), steps=900, strike=_crash),
    Scenario("mpi_bad_host", MPI, _ALONE + "mpirun -n 2 --host node017,node018 {run}", ("--ntasks=4",)),
    Scenario("mpi_bad_host", MPI, _ALONE + "mpirun -n 2 --host 10.77.0.99 {run}", ("--ntasks=4",)),
    Scenario("mpi_shm_full", MPI, _SMALL_SHM + "mpirun --mca btl vader,self {run}; umount /dev/shm", ("--ntasks=4",), steps=60),
)  # fmt: skip


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
        (place / "train.py").write_text(_ON_SLURM)
        (place / "solver.py").write_text(_ON_MPI)
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
    if scenario.strike is not None:
        cluster.wait(job, "RUNNING")
        time.sleep(1.0 if "sleep" in scenario.script else 3.0 + 3.0 * chance.random())
        scenario.strike(cluster, job)
    deadline = time.monotonic() + _OVER_S
    while cluster.job(job).get("JobState", "RUNNING") in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
        if time.monotonic() > deadline:
            cluster.cancel(job)
            break
        time.sleep(0.5)
    time.sleep(0.5)  # the last words of srun
    text = out.read_text("utf-8", "replace")
    if scenario.mend is not None:
        scenario.mend(cluster)
    cluster.clear(limit_s=60.0)
    masks = {str(place): f"/home/{user}/{project}", socket.gethostname(): "n1", "(root)": f"({user})"}
    return labelled(scenario.fault, scenario.program, _masked(text, masks, mpi_python).split("\n"))


def labelled(fault: str, program: str, lines: list[str]) -> Run:
    while lines and not lines[-1]:
        lines.pop()
    truth = next((at for at, line in enumerate(lines) if not ORDINARY.match(line)), -1)
    return Run(fault, program, truth, lines)


def _masked(text: str, masks: dict[str, str], mpi_python: str) -> str:
    real = Path(mpi_python).resolve().parent.parent
    for name, other in {**masks, str(Path(mpi_python).parent.parent): "/opt/conda", str(real): "/opt/conda"}.items():
        text = text.replace(name, other)
    return text
