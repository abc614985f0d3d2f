"""What the lab needs of this machine, and what to say where it is missing."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

PATH = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
"""Daemons lie where a user's PATH does not look."""


def missing_for_slurm() -> str:
    """Why no cluster can be started here; empty: one can."""
    return _missing(["slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "munged"], "slurm-wlm munge")


def missing_for_accounting() -> str:
    """Why a cluster here cannot have accounting; empty: it can."""
    packages = "slurmdbd slurm-wlm-mysql-plugin mariadb-server-core"
    why = missing_for_slurm() or _missing(["slurmdbd", "mariadbd"], packages)
    if not why and not list(Path("/usr/lib").glob("*/slurm-wlm/accounting_storage_mysql.so")):
        why = f"Slurm's plugin for MariaDB is missing; {_advice(packages)}"
    return why


@functools.cache
def missing_for_namespaces() -> str:
    """Why nodes here cannot have namespaces of their own; empty: they can."""
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
