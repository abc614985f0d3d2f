"""Which GPUs a batch system granted to this job, read from the environment. Pure.

`CUDA_VISIBLE_DEVICES` says it everywhere: indices among the GPUs that the job sees, or `GPU-` and `MIG-` identifiers,
or beginnings of these. Where it is unset, Slurm's `SLURM_STEP_GPUS` and `SLURM_JOB_GPUS` count the GPUs of the node,
whatever the job sees of them, and HTCondor's `_CONDOR_AssignedGPUs` has names such as `CUDA0` or `GPU-1a2b`. A job of
a batch system that says none of this was granted no GPU: those of its node belong to other jobs. Outside of a job
(a workstation, a container) every GPU may be used.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

JOB_VARIABLES = {
    "SLURM_JOB_ID": "Slurm",
    "_CONDOR_SLOT": "HTCondor",
    "_CONDOR_MACHINE_AD": "HTCondor",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "SGE_TASK_ID": "Grid Engine",
}
"""Variables that a batch system sets in each of its jobs, and its name (`ProviderKind.title`)."""


class Grant(msgspec.Struct, frozen=True):
    """The GPUs that were granted.

    `variable` names where it was read; empty = no batch system is involved, all GPUs may be used. `names` are indices
    or identifiers. `of_node`: indices count the GPUs of the node, not those that this process sees. `refusal` says why
    there is none.
    """

    variable: str = ""
    names: tuple[str, ...] = ()
    of_node: bool = False
    refusal: str = ""


def read_grant(environ: Mapping[str, str]) -> Grant:
    """What the environment says of the GPUs of this job."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        empty = "" if visible.strip() else "CUDA_VISIBLE_DEVICES is set to nothing"
        return Grant("CUDA_VISIBLE_DEVICES", _names(visible), refusal=empty)
    if "SLURM_JOB_ID" in environ:
        for variable in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
            names = tuple(name.rpartition(":")[2] for name in _names(environ.get(variable, "")))  # "gpu:0" is index 0
            if names:
                return Grant(variable, names, of_node=True)
    assigned = tuple(name.removeprefix("CUDA") for name in _names(environ.get("_CONDOR_AssignedGPUs", "")))
    if assigned:
        return Grant("_CONDOR_AssignedGPUs", assigned)
    for variable, system in JOB_VARIABLES.items():
        if variable in environ:
            return Grant(
                variable,
                refusal=f"{system} granted no GPU to this job (CUDA_VISIBLE_DEVICES is not set); ask for some in"
                " [provider] gpus, or have worker_init export CUDA_VISIBLE_DEVICES where jobs own whole nodes",
            )
    return Grant()


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text.strip() else ()
