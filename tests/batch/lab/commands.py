"""Check the requirements of the lab, and query Slurm through its commands."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from batch.lab.shape import LabError, Place
from polling import PATIENCE_S, polls

# ---- needs


PATH = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
"""PATH of the user plus the folders of daemons."""


def missing_for_slurm() -> str:
    """Return the reason why no cluster can start here, or ""."""
    return _missing(["slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "munged"], "slurm-wlm munge")


def missing_for_accounting() -> str:
    """Return the reason why a cluster cannot have accounting here, or ""."""
    packages = "slurmdbd slurm-wlm-mysql-plugin mariadb-server-core"
    why = missing_for_slurm() or _missing(["slurmdbd", "mariadbd"], packages)
    if not why and not list(Path("/usr/lib").glob("*/slurm-wlm/accounting_storage_mysql.so")):
        why = f"Slurm's plugin for MariaDB is missing; {_advice(packages)}"
    return why


@functools.cache
def missing_for_namespaces() -> str:
    why = missing_for_slurm() or _missing(["ip", "unshare", "nsenter"], "iproute2 util-linux")
    if why or os.getuid():
        return why or "nodes with networks of their own need root"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True, check=False
    )
    return f"this root may make no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def _missing(programs: list[str], packages: str) -> str:
    absent = [program for program in programs if shutil.which(program, path=PATH) is None]
    return f"no {', '.join(absent)} here; {_advice(packages)}" if absent else ""


def _advice(packages: str) -> str:
    who = "install with" if os.getuid() == 0 else "you are not root: ask somebody who is for"
    return f"{who}: apt-get install -y --no-install-recommends {packages}"


# ---- commands


T = TypeVar("T")

OVER = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
)
"""Final job states."""


def until(true: Callable[[], T], *, limit_s: float = PATIENCE_S, what: str = "it") -> T:
    for _ in polls(limit_s, longest_s=0.1):
        if value := true():
            return value
    raise LabError(f"{what}: not within {limit_s:g} s")


class Commands:
    """Slurm commands for one cluster. `inside` makes a command that runs on the head node."""

    def __init__(self, place: Place, *, inside: Callable[..., list[str]]) -> None:
        self._inside = inside
        self.environ = {"SLURM_CONF": str(place.conf), "PATH": PATH}

    def ask(self, *command: str, limit_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Run a command on the head node; return the result, also of a failed command."""
        environ = {**_clean(), **self.environ}
        return subprocess.run(
            self._inside(*command), capture_output=True, text=True, env=environ, timeout=limit_s, check=False
        )

    def run(self, *command: str, limit_s: float = PATIENCE_S) -> str:
        done = self.ask(*command, limit_s=limit_s)
        if done.returncode:
            raise LabError(f"{' '.join(command)}: {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def submit(self, script: str, *options: str) -> str:
        """Submit a line of shell; return the job's id. The output is discarded unless `options` change that. Raises
        LabError.
        """
        command = ["sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}"]
        return self.run(*command).strip().partition(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """Return Slurm's record of a job (`JobState`, `Reason`, `NodeList`, ...); empty for an unknown job."""
        done = self.ask("scontrol", "show", "job", job)
        return dict(re.findall(r"(\w+)=(\S*)", done.stdout)) if done.returncode == 0 else {}

    def wait(self, job: str, *states: str, limit_s: float = PATIENCE_S) -> dict[str, str]:
        def found() -> dict[str, str]:
            facts = self.job(job)
            return facts if facts.get("JobState") in states else {}

        try:
            return until(found, limit_s=limit_s)
        except LabError:
            raise LabError(f"job {job}: not {' or '.join(states)} within {limit_s:g} s, but {self.job(job)}") from None

    def queue(self, *options: str) -> list[list[str]]:
        shape = "JobID:|,Name:|,State:|,Partition:|,ReasonList:|,RestartCnt:"
        lines = self.run("squeue", "-h", "-O", shape, *options).splitlines()
        return [[word.strip() for word in line.split("|")] for line in lines]

    def cancel(self, *jobs: str) -> None:
        self.run("scancel", *jobs)

    def nodes(self) -> dict[str, str]:
        """Return each node's state: idle, mixed, drained, down*, ..."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)

    def update_node(self, nodes: Sequence[str] | str, state: str) -> None:
        names = nodes if isinstance(nodes, str) else ",".join(nodes)
        self.run("scontrol", "update", f"NodeName={names}", f"State={state}", "Reason=asked")


def _clean() -> dict[str, str]:
    """Return the environment of this process without variables of Slurm and of sessions."""
    pattern = re.compile(r"(SLURM|SLURMD|SBATCH|SQUEUE|SINFO|SCANCEL|SACCT|SALLOC|SRUN|STOKER)_")
    return {name: value for name, value in os.environ.items() if not pattern.match(name)}
