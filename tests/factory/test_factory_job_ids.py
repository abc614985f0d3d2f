"""The id of a new job between the lines that a site's own commands print."""

from __future__ import annotations

import pytest

from stoker.manager.factory.submitting import job_id_in_sentence, job_id_on_own_line
from stoker.site import ProviderKind

SLURM, PBS, LSF, SGE = ProviderKind.SLURM, ProviderKind.PBS, ProviderKind.LSF, ProviderKind.GRID_ENGINE


@pytest.mark.parametrize(
    ("kind", "text", "id"),
    [
        (SLURM, "Welcome!\nSubmitted batch job 12 on cluster blue\n2026\n", "12"),
        (SLURM, "sbatch: lua: Submitted batch job 12\r\nbye\n", "12"),
        (SLURM, "Submitted batch job 12\nSubmitted batch job 13\n", ""),
        (SGE, 'budget ok\nYour job 303 ("stoker-k3v9-b0") has been submitted\n', "303"),
        (SGE, 'Your job-array 303.1-10:1 ("stoker-k3v9-b0") has been submitted\n', "303"),
        (LSF, "hello\nJob <201> is submitted to queue <gpu>.\nbye 12\n", "201"),
        (LSF, "Job <201> is submitted to default queue <normal>.\n", "201"),
        (LSF, "201\n", ""),
        (PBS, "11.head\n", ""),
    ],
)
def test_a_sentence_names_the_id_wherever_it_stands(kind: ProviderKind, text: str, id: str) -> None:
    assert job_id_in_sentence(kind, text) == id


@pytest.mark.parametrize(
    ("kind", "text", "id"),
    [
        (PBS, "checking your budget ... OK\n11.head.site.org\nhave a nice day\n", "11.head.site.org"),
        (PBS, "11[].head\n", "11[].head"),
        (PBS, "\x1b[32m11.head\x1b[0m\r\n", "11.head"),
        (PBS, "11.head\n12.head\n", ""),
        (PBS, "version 2.3\n", ""),
        (SGE, "qsub: checking your project budget ... OK\n101\n", "101"),
        (SGE, "101.1-10:1\n", "101"),
        (SGE, "2026\n101\n", ""),
        (SGE, "budget ok\n", ""),
        (SLURM, "12;blue\n", "12"),
        (LSF, "201\n", ""),
    ],
)
def test_a_line_counts_if_it_alone_is_an_id(kind: ProviderKind, text: str, id: str) -> None:
    assert job_id_on_own_line(kind, text) == id
