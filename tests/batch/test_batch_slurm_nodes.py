from __future__ import annotations

import os
from pathlib import Path

import pytest
from batch.sessions import block_when, status_when, write_site

import stoker
from stoker.manager.live import node_store

WHY = "the test broke it"


@stoker.app
def node():
    return os.environ["SLURMD_NODENAME"]


@pytest.fixture
def break_node(world):
    probe = world.path / "probe"
    bad = f'{world.path}/bad-"$SLURMD_NODENAME"'
    probe.write_text(f'#!/bin/sh\n[ ! -e {bad} ] && exit\necho "$1 failed: {WHY}"; exit 5\n')
    probe.chmod(0o755)

    def make(name: str) -> Path:
        file = Path(world.path / f"bad-{name}")
        file.touch()
        return file

    make.probe = str(probe)
    return make


def load(world, probe, **provider):
    settings = {"probe_nodes": "2 s", "options": ["--exclude=n4"], **provider}
    site = write_site(world.path, provider=settings, pilot={"probe": probe})
    return stoker.load(site, run_dir=str(world.runs))


def excluded(status) -> list[str]:
    return [record.node for record in status.excluded_nodes]


def test_blocks_avoid_a_bad_node_until_a_probe_clears_it(slurm, world, break_node):
    bad = break_node("n1")
    with load(world, break_node.probe, probe_nodes="1 h") as session:
        assert node().result(60) in ("n2", "n3")
        status = session.status()
        assert excluded(status) == ["n1"]
        assert WHY in status.excluded_nodes[0].why
        [job] = status.jobs
        assert slurm.job(job.job)["ExcNodeList"] in ("n4,n1", "n[1,4]")
    with load(world, break_node.probe) as session:
        [job] = status_when(session, lambda status: status.pilots, what="a pilot").jobs[:1]
        assert slurm.job(job.job)["ExcNodeList"] in ("n4,n1", "n[1,4]")  # the next session avoids n1 from the start
        failed = status_when(session, lambda status: status.excluded_nodes[0].probes, what="a probe that fails")
        assert WHY in failed.excluded_nodes[0].said
        bad.unlink()
        probe = block_when(session, lambda job: job.probes and job.job, what="another probe")
        seen = slurm.job(probe.job)
        assert (seen["ReqNodeList"], seen["TimeLimit"]) == ("n1", "00:01:00")
        status_when(session, lambda status: not status.excluded_nodes, what="n1 is cleared")
        assert node().result(60) in ("n2", "n3")
    assert node_store.excluded_nodes() == []


def test_exclude_nodes_0_lets_pilots_start_on_a_bad_node(slurm, world, break_node):
    break_node("n1")
    site = write_site(world.path, provider={"exclude_nodes": 0}, pilot={"probe": break_node.probe})
    with stoker.load(site, run_dir=str(world.runs)) as session:
        status = status_when(session, lambda status: status.pilots, what="a pilot on n1")
        assert WHY in status.pilots[0].devices[0].fault
        assert excluded(status) == []
