"""Fault types that a real Slurm and a real Open MPI met (`clusters` records them), beyond those of the other tables.

A recording of a failure that another table has already (a walltime, a preemption, a program that is not there) joins
that table's type, and with it its side of the split.
"""

from __future__ import annotations

from benchmarks.papers.schedmate.failures.injections import INFRASTRUCTURE, USER, FaultType

TYPES = (
    FaultType("slurm_launch_failed", INFRASTRUCTURE, "node", ()),
    FaultType("mpi_daemon_lost", INFRASTRUCTURE, "network", ()),
    FaultType("mpi_bad_host", INFRASTRUCTURE, "network", ()),
    FaultType("mpi_shm_full", INFRASTRUCTURE, "memory", ()),
    FaultType("slurm_cancelled", USER, "scheduler", ()),
    FaultType("slurm_bad_request", USER, "config", ()),
    FaultType("segfault", USER, "code", ()),
    FaultType("mpi_abort", USER, "code", ()),
    FaultType("mpi_truncate", USER, "code", ()),
    FaultType("mpi_invalid_rank", USER, "code", ()),
    FaultType("mpi_exception", USER, "code", ()),
    FaultType("mpi_exited_early", USER, "code", ()),
    FaultType("mpi_slots", USER, "config", ()),
)
