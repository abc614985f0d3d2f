"""Slots: what is left of a machine, which of it a job is given, and what the job finds in its environment."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import htcondor  # gives ClassAds the functions of HTCondor's own, `countMatches` among them  # noqa: F401
from batch.condor.ads import Ad, gpu_ad, is_true, machine_ad, value

_AMOUNTS = ("Cpus", "Memory", "Disk")
OWN_DOMAIN = "submit.pool"
"""The domain of users, and of files, that the access point is in."""
Start = dict[str, Any]
"""What `start.json` says of a job that runs: `machine`, `claimed` amounts, `gpus`, and how it was started."""


class Claim(NamedTuple):
    """A part of a machine, for one job. `gpus` are UUIDs."""

    machine: str
    slot: str
    claimed: dict[str, int]
    gpus: list[str]
    ad: Ad
    has_gpus: bool
    is_of_other_users: bool


def find(job: Ad, machines: Sequence[dict[str, Any]], running: Sequence[Start]) -> Claim | None:
    """The first part of a machine that suits the job, and that the job suits."""
    for machine in machines:
        taken = [start for start in running if start["machine"] == machine["name"]]
        free = {"Cpus": machine["cpus"], "Memory": machine["memory_mb"], "Disk": machine["disk_mb"] * 1024}
        free = {name: amount - sum(start["claimed"][name] for start in taken) for name, amount in free.items()}
        used = {uuid for start in taken for uuid in start["gpus"]}
        gpus = [gpu for gpu in machine["gpus"] if gpu["uuid"] not in used]
        if job.symmetricMatch(machine_ad(machine, name=f"slot1@{machine['name']}", free=free, gpus=gpus)):
            return _claim(job, machine, gpus, number=_number(taken))
    return None


def _claim(job: Ad, machine: dict[str, Any], gpus: Sequence[dict[str, Any]], *, number: int) -> Claim:
    mine = [gpu for gpu in gpus if "RequireGPUs" not in job or is_true(gpu_ad(gpu), str(job.lookup("RequireGPUs")))]
    mine = mine[: int(value(job, "RequestGPUs", 0))]
    claimed = {name: int(value(job, f"Request{name}", 1)) for name in _AMOUNTS}
    claimed["Memory"] = -(-claimed["Memory"] // 128) * 128  # as MODIFY_REQUEST_EXPR_REQUESTMEMORY does
    slot = f"slot1_{number}@{machine['name']}"
    uuids = [gpu["uuid"] for gpu in mine]
    ad = machine_ad(machine, name=slot, free=claimed, gpus=mine)
    ad["AssignedGPUs"] = ",".join(uuids)
    return Claim(machine["name"], slot, claimed, uuids, ad, bool(machine["gpus"]), machine["user_domain"] != OWN_DOMAIN)


def sends_files(job: Ad, claim: Claim) -> bool:
    """Whether a job's files are sent to its machine, and those that it writes back."""
    how = value(job, "ShouldTransferFiles", "IF_NEEDED")
    return how == "YES" or (how == "IF_NEEDED" and claim.ad["FileSystemDomain"] != OWN_DOMAIN)


def _number(taken: Sequence[Start]) -> int:
    used = {start["slot"] for start in taken}
    return next(n for n in range(1, len(taken) + 2) if not any(slot.startswith(f"slot1_{n}@") for slot in used))


def environment(job: Ad, claim: Claim, sandbox: Path) -> dict[str, str]:
    """What a job finds in its environment: little. Neither PATH nor HOME."""
    given = dict(word.split("=", 1) for word in shlex.split(value(job, "Environment", "")))
    if claim.gpus:
        names = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "_CONDOR_AssignedGPUs")
        given |= dict.fromkeys(names, ",".join(claim.gpus))
    elif claim.has_gpus:  # what HTCondor says to a job that was given none of them
        given |= {"CUDA_VISIBLE_DEVICES": "10000", "NVIDIA_VISIBLE_DEVICES": "none", "_CONDOR_AssignedGPUs": "10000"}
    folders = dict.fromkeys(("TMPDIR", "TMP", "TEMP", "_CONDOR_SCRATCH_DIR", "_CONDOR_JOB_IWD"), str(sandbox))
    return {
        **given,
        **folders,
        "BATCH_SYSTEM": "HTCondor",
        "OMP_NUM_THREADS": str(claim.claimed["Cpus"]),
        "_CONDOR_SLOT": claim.slot.partition("@")[0],
        "_CONDOR_JOB_AD": str(sandbox / ".job.ad"),
        "_CONDOR_MACHINE_AD": str(sandbox / ".machine.ad"),
    }
