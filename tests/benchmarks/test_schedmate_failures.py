from __future__ import annotations

import re
import socket

import pytest

from benchmarks.papers.schedmate.failures.corpus import (
    CLUSTERS_SEED,
    INJECTED,
    MPI,
    ON_CLUSTERS,
    SLURM,
    SPLIT_SEED,
    TEST,
    TYPES,
    FailedJob,
    corpus,
    held_out,
    read_recorded_runs,
)


@pytest.fixture(scope="module")
def parts() -> dict[str, list[FailedJob]]:
    return {"training": list(corpus(test=False)), "test": list(corpus(test=True))}


def test_no_failure_type_is_in_both_training_and_test_data(parts: dict[str, list[FailedJob]]) -> None:
    training, test = ({job.fault for job in parts[part]} for part in ("training", "test"))
    assert test == TEST
    assert not training & test
    assert training | test == {fault.name for fault in TYPES}
    assert held_out(INJECTED, SPLIT_SEED) | held_out(ON_CLUSTERS, CLUSTERS_SEED) == TEST
    assert 0.3 < len(TEST) / len(TYPES) < 0.4


def test_labelled_line_number_lies_within_the_job_log(parts: dict[str, list[FailedJob]]) -> None:
    for job in (job for part in parts.values() for job in part):
        assert 1 <= job.truth <= len(job.lines)
        assert job.own


def test_recorded_cluster_logs_contain_no_machine_paths() -> None:
    text = "\n".join(line for run in read_recorded_runs() if run.program in (SLURM, MPI) for line in run.lines)
    assert not re.search(r"/(?:tmp|root|work|var/folders)/", text)
    assert socket.gethostname() not in text
