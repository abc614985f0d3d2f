"""Blocks are Slurm jobs: what a site asks for is what its jobs have, and what their pilots get."""

from __future__ import annotations

from batch.lab.commands import OVER
from batch.sessions import status_when, write_site

import stoker


@stoker.context
def nothing():
    return None


@stoker.app(context=nothing())
def whereabouts(_, seconds=0.0):
    """What the pilot's job was given."""
    import time

    import psutil

    time.sleep(seconds)
    pilot = next(process for process in psutil.Process().parents() if "SLURM_JOB_ID" in process.environ())
    return {name: value for name, value in pilot.environ().items() if name.startswith(("SLURM", "CUDA"))}


def test_what_a_site_asks_for_is_what_its_pilots_get(slurm, world):
    """A type of GPU, a walltime (Slurm 22.05 does not tell its jobs), shell and options; from an odd folder."""
    folder = world.path / 'it\'s a "path"'
    folder.mkdir()
    provider = {
        "gpus": "titanx:1",
        "walltime": "3 min",
        "worker_init": "export SLURM_TEST_WORDS='two words'",
        "options": ["--comment=asked", "--nodelist=n4"],
    }
    with stoker.load(write_site(folder, provider=provider), run_dir=str(folder)) as session:
        given = whereabouts().result(60)
        assert given["CUDA_VISIBLE_DEVICES"] == "0"
        assert given["SLURMD_NODENAME"] == "n4"
        assert given["SLURM_TEST_WORDS"] == "two words"
        assert "SLURM_JOB_END_TIME" not in given
        status = session.status()
        [pilot], [block] = status.pilots, status.jobs
        assert 60 < pilot.ends_in_s <= 180
        job = slurm.job(block.job)
        assert job["JobName"] == f"stoker-{session.id}-{block.block}"
        wanted = {
            "TresPerNode": "gres:gpu:titanx:1",
            "TimeLimit": "00:03:00",
            "Partition": "backfill",
            "Comment": "asked",
        }
        assert {name: job[name] for name in wanted} == wanted
    slurm.wait(block.job, *OVER)


def test_a_block_of_two_nodes_brings_two_pilots(slurm, world):
    site = write_site(world.path, provider={"nodes": 2, "gpus": "a10:1"})
    with stoker.load(site, run_dir=str(world.runs)) as session:
        status = status_when(session, lambda status: len(status.pilots) == 2, what="two pilots")
        [block] = status.jobs
        assert {pilot.block for pilot in status.pilots} == {block.block}
        given = [call.result(60) for call in [whereabouts(0.3) for _ in range(4)]]
        assert {facts["SLURMD_NODENAME"] for facts in given} == {"n1", "n2"}
        assert {facts["SLURM_JOB_ID"] for facts in given} == {block.job}
        assert {facts["CUDA_VISIBLE_DEVICES"] for facts in given} == {"0"}
    slurm.wait(block.job, *OVER)
