"""Late or incomplete listings and extra output: each block has one job, and no job is left."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from batch.lab.commands import until
from batch.sessions import block_when, status_when, write_site

import stoker
from stoker.manager.factory.batch import job_prefix

SQUEUE = """#!/bin/sh
# Prints nothing while `hide` exists, and its first output for equal arguments while `cache` exists.
cd {folder}
echo asked >>asked
[ -e hide ] && exit 0
[ -e cache ] || exec {real} "$@"
copy=copy-$(echo "$*" | cksum | tr ' ' -)
[ -e "$copy" ] || {real} "$@" >"$copy"
exec cat "$copy"
"""
SBATCH = """#!/bin/sh
echo 2026
echo 'checking the budget of your project ... OK'
{real} "$@" | sed 's/^Submitted batch job.*/{said}/'
while [ -e {folder}/hang ]; do sleep 0.1; done
echo '*** maintenance on 12 December ***'
"""


FACTORY, MANAGER = "stoker.manager.factory.main", "stoker.manager.main"


class Site:
    def __init__(self, world, monkeypatch: pytest.MonkeyPatch, *, said: str = "&") -> None:
        self.folder = world.path / "site"
        self.folder.mkdir()
        for name, text in {"squeue": SQUEUE, "sbatch": SBATCH}.items():
            real = next(
                file for place in os.environ["PATH"].split(":") if os.access(file := f"{place}/{name}", os.X_OK)
            )
            (self.folder / name).write_text(text.format(folder=self.folder, real=real, said=said))
            (self.folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")

    def put(self, name: str) -> None:
        (self.folder / name).touch()

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()

    def wait_for_looks(self, count: int) -> None:
        asked = self.folder / "asked"
        before = asked.read_text().count("\n") if asked.exists() else 0
        until(lambda: asked.exists() and asked.read_text().count("\n") >= before + count, what="looks at the list")


@stoker.app()
def double(number):
    return 2 * number


def load(world, **provider):
    site = write_site(world.path, provider={"poll": "0.2 s", **provider})  # the tests wait for queries of the list
    return stoker.load(site, run_dir=str(world.runs))


def fill(slurm) -> list[str]:
    for node in slurm.shape.nodes:
        slurm.submit("sleep 1000", "--partition=main", "--exclusive", f"--nodelist={node}", "--time=7")
    until(lambda: all(line[2] == "RUNNING" for line in slurm.queue()), what="a full cluster")
    return [line[0] for line in slurm.queue()]


def jobs_of(session, slurm) -> list[str]:
    """Return every remembered job of a session, except cancelled jobs."""
    shown = slurm.run("scontrol", "show", "job", "-o").splitlines()
    name = f"JobName={job_prefix(session.id)}"
    return [line.split()[0] for line in shown if name in line and "JobState=CANCELLED" not in line]


@pytest.mark.parametrize(
    ("how", "full"),
    [
        ("hide", True),
        ("cache", False),
        pytest.param("hide", False, marks=pytest.mark.long),
        pytest.param("cache", True, marks=pytest.mark.long),
    ],
)
def test_delayed_job_listing_loses_no_job(slurm, world, monkeypatch, how, full):
    others = fill(slurm) if full else []
    site = Site(world, monkeypatch)
    site.put(how)
    with load(world) as session:
        call = double(21)
        block_when(session, lambda block: block.job, what="a job")
        site.wait_for_looks(6)
        if full:
            assert [(block.block, block.phase) for block in session.status(20).jobs] == [("b1", "pending")]
            slurm.cancel(*others)
        assert call.result(80) == 42
        site.wait_for_looks(6)
        status = session.status(20)
        assert (len(status.jobs), status.lost_pilots, status.ended_blocks) == (1, 0, {})
    until(lambda: slurm.queue() == [], what="an empty queue")
    assert len(jobs_of(session, slurm)) <= 1


def test_pending_job_missing_from_the_list_is_cancelled_at_the_end(slurm, world, monkeypatch):
    others = fill(slurm)
    site = Site(world, monkeypatch)
    with load(world) as session:
        double(1)
        block_when(session, lambda block: block.phase == "pending" and block.reason, what="a waiting job")
        site.put("hide")
    until(lambda: [line[0] for line in slurm.queue() if line[0] not in others] == [], what="the end of our job")


@pytest.mark.parametrize(
    ("victim", "said"),
    [
        pytest.param(FACTORY, "thank you", id="factory-no id"),
        pytest.param(MANAGER, "&", id="manager-sentence"),
        pytest.param(FACTORY, "&", id="factory-sentence", marks=pytest.mark.long),
        pytest.param(MANAGER, "thank you", id="manager-no id", marks=pytest.mark.long),
    ],
)
def test_factory_killed_during_sbatch_submits_nothing_twice(slurm, world, monkeypatch, victim, said):
    site = Site(world, monkeypatch, said=said)
    site.put("hang")
    site.put("hide")
    with load(world, listing_lag="10 min") as session:
        call = double(21)
        until(lambda: len(jobs_of(session, slurm)) == 1, what="the job")
        for process in processes_of(session.folder, victim):
            os.kill(process.pid, signal.SIGKILL)
        until(lambda: processes_of(session.folder, victim), what="another process of this kind")
        site.remove("hang")
        site.wait_for_looks(3)
        assert call.result(80) == 42, "the block's pilot needs no listing"
        site.remove("hide")
        status_when(session, lambda status: [block.job for block in status.jobs if block.job], what="the job's id")
        site.wait_for_looks(3)
        assert len(jobs_of(session, slurm)) == 1
    until(lambda: slurm.queue() == [], what="an empty queue")
    assert len(jobs_of(session, slurm)) <= 1


def processes_of(folder, module: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if module in words and str(folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found
