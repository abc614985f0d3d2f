"""What Slurm prints, read. The texts are those of a real Slurm 22.05, with names changed."""

from __future__ import annotations

import time

import pytest

from stoker.manager.factory.batch import block_of, job_name
from stoker.manager.factory.slurm_output import (
    AccountedJob,
    due_to,
    gone,
    job_status,
    lost_nodes,
    read_preempted,
    read_sacct,
    read_scontrol,
    read_squeue,
    requeued,
)
from stoker.protocol.blocks import BlockPhase, LossReason

NOW = time.mktime(time.strptime("2026-11-21T10:31:00", "%Y-%m-%dT%H:%M:%S"))

SQUEUE = """\
88123|PENDING|Priority|2026-11-21T10:42:00||stoker-k3v9-b0|/home/ana/submit
88124|PENDING|BeginTime|N/A||stoker-k3v9-b1|/home/ana/submit
88125|RUNNING|None|2026-11-21T10:20:11|n014|stoker-k3v9-b2|/home/ana/submit
88126|COMPLETING|None|2026-11-21T10:20:11|n[014-015]|stoker-k3v9-b3|/home/ana/submit
88127|PENDING|ReqNodeNotAvail, UnavailableNodes:n3|N/A||stoker-k3v9-b4|/home/ana/submit
88128|PREEMPTED|None|2026-11-21T10:20:11|n014|stoker-k3v9-b5|/home/ana/submit
88129|TIMEOUT|TimeLimit|2026-11-21T09:20:11|n014|stoker-k3v9-b6|/home/ana/submit
88130|NODE_FAIL|NodeDown|2026-11-21T09:20:11|n014|stoker-k3v9-b7|/home/ana/submit
88131|COMPLETED|None|2026-11-21T09:20:11|n014|stoker-k3v9-b8|/home/ana/submit
88132|RUNNING|None|2026-11-21T10:20:11|n014|other|job|/home/ana
slurm_load_jobs: warning that is no job
"""


def test_squeue() -> None:
    rows = read_squeue(SQUEUE)
    assert len(rows) == 10
    looks = {job: job_status(row, now=NOW) for job, row in rows.items()}
    assert looks["88123"].phase is BlockPhase.PENDING
    assert (looks["88123"].reason, looks["88123"].expected_in_s) == ("Priority", 660.0)
    assert (looks["88124"].reason, looks["88124"].expected_in_s) == ("BeginTime", 0.0)
    assert (looks["88125"].phase, looks["88125"].reason) == (BlockPhase.RUNNING, "on n014")
    assert (looks["88126"].phase, looks["88126"].reason) == (BlockPhase.RUNNING, "completing on n[014-015]")
    assert looks["88127"].reason == "ReqNodeNotAvail, UnavailableNodes:n3"
    ends = {job: looks[job].reason for job in ("88128", "88129", "88130", "88131")}
    assert ends == {
        "88128": "preempted by Slurm",
        "88129": "out of walltime",
        "88130": "node failed: n014",
        "88131": "done",
    }
    assert all(looks[job].phase is BlockPhase.ENDED for job in ends)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("PENDING", "launch failed requeued held"),
        ("PENDING", "launch_failed_requeued_held"),
        ("PENDING", "job requeued in held state"),
        ("PENDING", "JobHoldMaxRequeue"),
        ("REQUEUE_HOLD", "job_requeued_in_held_state"),
        ("SPECIAL_EXIT", "None"),
    ],
)
def test_a_job_that_slurm_holds_until_somebody_releases_it_is_over(state: str, reason: str) -> None:
    [row] = read_squeue(f"7|{state}|{reason}|N/A||stoker-k3v9-b0|/home/ana/submit\n").values()
    assert row.is_held_for_good
    look = job_status(row, now=NOW)
    assert look.phase is BlockPhase.ENDED
    words = reason.replace("_", " ") if reason != "None" else "special exit"
    assert look.reason == f"held by Slurm: {words}"


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin"])
def test_a_job_that_a_person_holds_waits_and_says_how_it_is_released(reason: str) -> None:
    [row] = read_squeue(f"7|PENDING|{reason}|N/A||stoker-k3v9-b0|/home/ana/submit\n").values()
    look = job_status(row, now=NOW)
    assert (look.phase, look.reason) == (BlockPhase.PENDING, f"{reason}, until `scontrol release 7`")


def test_the_tasks_of_an_array_are_one_job() -> None:
    def look(*states: str) -> tuple[BlockPhase, str]:
        rows = read_squeue("".join(f"7|{state}|stoker-k3v9-b0|/home/ana/submit\n" for state in states))
        assert list(rows) == ["7"]
        found = job_status(rows["7"], now=NOW)
        return found.phase, found.reason

    done, failed, waits = "COMPLETED|None|N/A|n1", "TIMEOUT|TimeLimit|N/A|n1", "PENDING|Resources|N/A|"
    one, two = "RUNNING|None|N/A|n[1,3]", "RUNNING|None|N/A|n2"
    assert look(waits, one, done, two, one) == (BlockPhase.RUNNING, "on n[1,3],n2")
    assert look(done, failed, waits) == (BlockPhase.PENDING, "Resources")
    assert look(done, failed, done) == (BlockPhase.ENDED, "out of walltime")


def test_a_strange_name_is_none_of_ours() -> None:
    rows = read_squeue(SQUEUE)
    assert block_of(rows["88132"].name, session="k3v9") is None
    assert (rows["88131"].name, rows["88131"].folder) == ("stoker-k3v9-b8", "/home/ana/submit")


def test_sacct() -> None:
    rows = read_sacct("88140|CANCELLED by 1000|0:0|n014\n88141|FAILED|1:0|n015\n88142|OUT_OF_MEMORY|0:125|n1\n")
    assert [rows[job].state for job in rows] == ["CANCELLED", "FAILED", "OUT_OF_MEMORY"]
    assert job_status(rows["88142"], now=NOW).reason == "out of memory"


def test_scontrol() -> None:
    rows = read_scontrol(
        "JobId=5 JobName=stoker-k3v9-b1 UserId=ana(1000) GroupId=ana(1000) Priority=1 Nice=0 Account=(null) "
        "QOS=(null) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
        "ExitCode=3:0 RunTime=00:00:01 TimeLimit=00:10:00 NodeList=n1 BatchHost=n1 NumNodes=1 \n"
    )
    row = rows["5"]
    assert (row.state, row.exit_code, row.nodes, row.name) == ("FAILED", "3:0", "n1", "stoker-k3v9-b1")
    assert read_scontrol("slurm_load_jobs error: Invalid job id specified") == {}


def test_scontrol_shows_an_array_as_its_liveliest_task() -> None:
    rows = read_scontrol(
        "JobId=7 ArrayJobId=7 ArrayTaskId=1 JobName=a JobState=COMPLETED NodeList=n1 \n"
        "JobId=8 ArrayJobId=7 ArrayTaskId=0 JobName=a JobState=RUNNING NodeList=n2 \n"
    )
    assert {job: (row.state, row.nodes) for job, row in rows.items()} == {"7": ("RUNNING", "n2")}


@pytest.mark.parametrize(
    ("exit_code", "output", "said"),
    [
        ("1:0", ["stoker-pilot: no room"], "exit code 1: stoker-pilot: no room"),
        ("0:9", [], "killed by signal 9"),
        ("127:0", [], "exit code 127"),
        ("", ["x", "y"], "failed: x; y"),
    ],
)
def test_a_failed_job_says_how_and_what_it_printed(exit_code: str, output: list[str], said: str) -> None:
    assert job_status(AccountedJob("1", "FAILED", exit_code=exit_code), now=NOW, output=output).reason == said


def test_slurm_writes_why_below_what_a_job_prints() -> None:
    line = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T10:00:00 DUE TO PREEMPTION ***"
    assert due_to(["loading", line]) == "preempted by Slurm"
    assert due_to([line.replace("PREEMPTION", "TIME LIMIT")]) == "out of walltime"
    assert job_status(AccountedJob("12", "CANCELLED"), now=NOW, output=[line]).reason == "preempted by Slurm"
    assert (
        job_status(AccountedJob("12", "CANCELLED"), now=NOW, output=["loading"]).reason
        == "cancelled by someone (scancel)"
    )
    assert gone([line]).reason == "preempted by Slurm"
    assert gone([]).reason == "Slurm no longer knows this job"


def test_an_unknown_state_is_an_end_with_its_word() -> None:
    """A state of a later Slurm that nobody here has heard of must not look like a job that runs."""
    assert job_status(AccountedJob("1", "LAUNCH_FAILED"), now=NOW).phase is BlockPhase.ENDED


def test_names() -> None:
    assert job_name("k3v9", "b7") == "stoker-k3v9-b7"
    assert block_of("stoker-k3v9-b7", session="k3v9") == "b7"
    assert block_of("stoker-k3v90-b7", session="k3v9") is None
    assert block_of("stoker-k3v9-b7-again", session="k3v9") is None
    assert block_of(job_name("my run/1", "b7"), session="my run/1") == "b7"


@pytest.mark.parametrize(
    ("state", "loss"),
    [
        ("PREEMPTED", LossReason.PREEMPTED),
        ("CANCELLED", LossReason.CANCELLED),
        ("TIMEOUT", LossReason.WALLTIME),
        ("NODE_FAIL", LossReason.NODE_LOST),
        ("OUT_OF_MEMORY", LossReason.OUT_OF_MEMORY),
        ("FAILED", None),
        ("COMPLETED", None),
    ],
)
def test_the_end_of_a_job_names_the_loss_of_its_pilots(state: str, loss: LossReason | None) -> None:
    assert job_status(AccountedJob("1", state, nodes="n1"), now=NOW).loss is loss


def test_accounting_tells_why_a_job_was_queued_again() -> None:
    runs = "7|{}|0:0|n1\n7|PENDING|0:0|None assigned\n"
    assert requeued(runs.format("PREEMPTED"), []) == ("preempted by Slurm", LossReason.PREEMPTED)
    assert requeued(runs.format("NODE_FAIL"), []) == ("its node failed (n1)", LossReason.NODE_LOST)
    assert requeued(runs.format("REQUEUED"), []) == ("requeued by a person", LossReason.VACATED)
    assert requeued("7|PENDING|0:0|None assigned\n", []) is None
    line = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T10:00:00 DUE TO PREEMPTION ***"
    assert requeued("", [line]) == ("preempted by Slurm", LossReason.PREEMPTED)


def test_nodes_that_are_down_or_silent_are_lost() -> None:
    assert lost_nodes("n1|down*\nn1|down*\nn2|idle\nn3|mixed*\nn4|drained\n") == ["n1", "n3"]


def test_a_job_that_left_within_its_grace_time_was_preempted() -> None:
    text = "7                       2026-11-21T10:42:00     \n8                       N/A                     \n"
    assert read_preempted(text) == {"7"}
