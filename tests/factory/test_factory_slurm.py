from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from factory.fake_slurm import FakeSlurm
from live.peers import until

from stoker.manager.factory.batch import (
    BatchSystemError,
    CommandUnanswered,
    SubmissionRefused,
    block_of_job_name,
    job_name,
)
from stoker.manager.factory.batches import open_batch_system, render_submission
from stoker.manager.factory.pacing import RequestPacer
from stoker.manager.factory.slurm import SlurmBatch
from stoker.manager.factory.slurm_output import (
    AccountedJob,
    build_job_status,
    build_status_of_unknown_job,
    find_end_reason_in_output,
    find_requeue_reason,
    parse_lost_nodes,
    parse_preempted_jobs,
    parse_scontrol,
    parse_squeue,
)
from stoker.protocol.blocks import BlockPhase, LossReason
from stoker.protocol.ids import BlockId
from stoker.protocol.session import SessionFolder
from stoker.site import Duration, Provider, ProviderKind, Site

# ---- commands


B7 = BlockId("b7")


def site(**provider: object) -> Site:
    given = {"kind": ProviderKind.SLURM, "command_limit_s": Duration(60), **provider}
    return Site(name="lab", provider=Provider(**given))  # type: ignore[arg-type]


@pytest.fixture
def batch(slurm: FakeSlurm, tmp_path: Path) -> SlurmBatch:
    return SlurmBatch(site(), session="k3v9", folder=tmp_path, command=lambda block: f"echo {block}")


def test_job_is_followed_from_its_submission_to_its_end(batch: SlurmBatch, slurm: FakeSlurm) -> None:
    job = batch.submit(B7)
    assert slurm.jobs()[job]["name"] == "stoker-k3v9-b7"
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 600))
    slurm.put(job, reason="QOSMaxGRESPerUser", start=start)
    look = batch.query([job])[job]
    assert (look.phase, look.reason) == (BlockPhase.PENDING, "QOSMaxGRESPerUser")
    assert 500 < look.expected_in_s <= 600
    slurm.put(job, state="RUNNING", nodes="n014", reason="None", start=start)
    assert batch.query([job])[job].reason == "on n014"
    slurm.put(job, state="PREEMPTED")
    assert batch.query([job])[job].reason == "preempted by Slurm"


def test_submitted_script_equals_the_dry_run(slurm: FakeSlurm, folder: SessionFolder) -> None:
    batch = open_batch_system(site(partition="p"), session="k3v9", folder=folder, python_path="/some/where")
    batch.submit(B7)
    shown = render_submission(site(partition="p"), session="k3v9", folder=folder, block="b7", python_path="/some/where")
    assert (folder.submit / "stoker-k3v9-b7.sh").read_text() == shown


def test_scripts_in_a_folder_with_any_name_are_submitted(slurm: FakeSlurm, tmp_path: Path) -> None:
    name = "blank quo'te dou\"ble new\nline per%cent"
    (tmp_path / name).mkdir()
    slurm.run_jobs()
    batch = SlurmBatch(site(), session="k3v9", folder=tmp_path / name, command=lambda block: f"echo {block}")
    job = batch.submit(B7)
    until_over(batch, job)
    assert (tmp_path / name / "stoker-k3v9-b7.out").read_text() == "b7\n"


def until_over(batch: SlurmBatch, job: str) -> str:
    look = until(lambda: (seen := batch.query([job])[job]).phase is BlockPhase.ENDED and seen, what="the job's end")
    return str(look.reason)


def test_unknown_partition_is_refused(slurm: FakeSlurm, tmp_path: Path) -> None:
    batch = SlurmBatch(site(partition="nope"), session="k3v9", folder=tmp_path, command=lambda _: "true")
    with pytest.raises(SubmissionRefused, match="Invalid partition name specified"):
        batch.submit(B7)


POLICY = "Batch job submission failed: Job violates accounting/QOS policy"
LIMITS = f"sbatch: error: {POLICY} (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    "err",
    [
        f"sbatch: error: AssocMaxSubmitJobLimit\n{LIMITS}",
        f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{LIMITS}",
        "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
        "qsub: would exceed queue gpuq's per-user limit of jobs in 'Q' state",
        "qsub: Maximum number of jobs already in queue",
        "User <ana>: Pending job threshold reached. Retrying in 60 seconds...",
        "Unable to run job: job rejected: Only 75000 jobs are allowed per user (current job count: 75000)",
    ],
)
def test_full_queue_is_an_outage_and_not_a_refusal(batch: SlurmBatch, slurm: FakeSlurm, err: str) -> None:
    slurm.fault("sbatch", code=1, err=err)
    with pytest.raises(BatchSystemError) as caught:
        batch.submit(B7)
    assert str(caught.value).startswith(err.replace("sbatch: error: ", "").replace("\n", "; "))
    assert str(caught.value).endswith(("lower [pilot] max_blocks", "until Slurm accepts jobs"))
    slurm.fault("sbatch")
    assert batch.submit(B7)


@pytest.mark.parametrize("why", ["AssocMaxWallDurationPerJobLimit", "QOSMaxGRESPerJob"])
def test_job_larger_than_allowed_is_refused(batch: SlurmBatch, slurm: FakeSlurm, why: str) -> None:
    slurm.fault("sbatch", code=1, err=f"sbatch: error: {why}\n{LIMITS}")
    with pytest.raises(SubmissionRefused, match=f"^{why}; "):
        batch.submit(B7)


def test_unreachable_controller_is_an_outage_and_not_a_refusal(batch: SlurmBatch, slurm: FakeSlurm) -> None:
    job = batch.submit(B7)
    slurm.controller(up=False)
    for ask in (
        lambda: batch.submit(BlockId("b8")),
        lambda: batch.query([job]),
        batch.find,
        lambda: batch.cancel([job]),
    ):
        with pytest.raises(BatchSystemError, match=r"Unable to contact slurm controller \(connect failure\)"):
            ask()
    slurm.controller(up=True)
    assert batch.query([job])[job].phase is BlockPhase.PENDING


def test_missing_slurm_conf_is_an_outage_and_not_a_refusal(batch: SlurmBatch, slurm: FakeSlurm) -> None:
    lines = ["error: fetch_config: DNS SRV lookup failed", "fatal: Could not establish a configuration source"]
    slurm.fault("sbatch", code=1, err="\n".join(f"sbatch: {line}" for line in lines))
    with pytest.raises(BatchSystemError, match="Could not establish a configuration source"):
        batch.submit(B7)


def test_sbatch_output_without_a_job_id_is_reported_as_trouble(batch: SlurmBatch, slurm: FakeSlurm) -> None:
    slurm.fault("sbatch", code=0, err="sbatch: everything is fine")
    with pytest.raises(BatchSystemError, match="no unique job id"):
        batch.submit(B7)


def test_job_that_squeue_omits_has_the_state_of_scontrol(batch: SlurmBatch, slurm: FakeSlurm) -> None:
    jobs = [batch.submit(BlockId(f"b{number}")) for number in range(5)]
    for state in ("PENDING", "RUNNING"):
        for job in jobs:
            slurm.put(job, state=state, forgotten="squeue", nodes="n1", reason="Resources")
        for some in (jobs[:1], jobs):  # first one job, then all jobs in one command
            looks = batch.query(some)
            assert [look.phase.value.upper() for look in looks.values()] == [state] * len(some)
            assert not any(look.is_unlisted for look in looks.values())


def test_job_known_only_to_sacct_has_the_state_of_sacct(batch: SlurmBatch, slurm: FakeSlurm) -> None:
    job, other = batch.submit(B7), batch.submit(BlockId("b8"))
    for each in (job, other):
        slurm.put(each, state="RUNNING", forgotten="everywhere")
    rows = f"{job}|RUNNING|0:0|n1\n{other}|TIMEOUT|0:0|n1"
    slurm.fault("sacct", before=rows)
    looks = batch.query([job, other])
    assert (looks[job].phase, looks[job].reason) == (BlockPhase.RUNNING, "on n1")
    assert (looks[other].phase, looks[other].reason) == (BlockPhase.ENDED, "out of walltime")


def test_job_unknown_to_every_command_is_absent(batch: SlurmBatch, slurm: FakeSlurm) -> None:
    job = batch.submit(B7)
    slurm.put(job, forgotten="everywhere")
    assert batch.query([job])[job].is_unlisted
    slurm.put(job, forgotten="", state="RUNNING")
    assert not batch.query([job])[job].is_unlisted


def test_outdated_list_hides_neither_a_start_nor_an_end(slurm: FakeSlurm, tmp_path: Path) -> None:
    pacer = RequestPacer(clock=lambda: 0.0)
    batch = SlurmBatch(site(), session="k3v9", folder=tmp_path, command=str, pacer=pacer)
    listing, job = pacer.listing, batch.submit(B7)
    batch.query([job])
    old = listing.read(dict)
    slurm.put(job, state="RUNNING", nodes="n1")
    for _ in range(2):
        listing.forget()
        assert batch.query([job])[job].phase is BlockPhase.RUNNING
        listing.forget()
        listing.read(lambda: old)
    assert batch.query([job])[job].phase is BlockPhase.RUNNING, "the job is not queued again"
    listing.forget()
    batch.query([job])
    old = listing.read(dict)
    batch.cancel([job])
    listing.read(lambda: old)
    assert batch.query([job])[job].reason == "cancelled by someone (scancel)"


def test_jobs_are_cancelled_by_name(batch: SlurmBatch, slurm: FakeSlurm) -> None:
    job, other = batch.submit(B7), batch.submit(BlockId("b8"))
    slurm.put(job, forgotten="squeue")
    batch.cancel_named([B7])
    assert [slurm.jobs()[each]["state"] for each in (job, other)] == ["CANCELLED", "PENDING"]


@pytest.mark.parametrize(
    "around",
    [
        {"before": "checking your project's budget ... 2026 hours left"},
        {"before": "2026", "after": "*** maintenance on 12 December ***"},
        {"before": "budget ... ", "after": "Submit to partition gpu: 12 jobs ahead"},
    ],
)
def test_job_id_is_found_among_other_output_lines(batch: SlurmBatch, slurm: FakeSlurm, around: dict[str, str]) -> None:
    slurm.fault("sbatch", **around)
    assert batch.submit(B7) == "101"


@pytest.mark.parametrize(
    ("reason", "what"),
    [
        ("PartitionTimeLimit", "never starts with these settings: walltime .* shorten \\[provider\\] walltime"),
        ("QOSMaxGRESPerJob", "lower \\[provider\\] gpus"),
        ("InvalidAccount", "change \\[provider\\] account"),
        ("PartitionDown", "waits until an administrator opens it"),
        ("QOSMaxGRESPerUser", "$"),
        ("Priority", "$"),
    ],
)
def test_permanent_pending_reason_has_advice(batch: SlurmBatch, slurm: FakeSlurm, reason: str, what: str) -> None:
    job = batch.submit(B7)
    slurm.put(job, reason=reason)
    assert re.match(f"{reason}.*{what}", batch.query([job])[job].reason)


def test_sbatch_that_waits_for_room_has_created_no_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    quick = SlurmBatch(site(command_limit_s=Duration(1)), session="k3v9", folder=tmp_path, command=str)
    shim = slurm.bin / "sbatch"
    said = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
    shim.write_text(f"#!/bin/sh\necho '{said}' >&2\nexec sleep 600\n")
    with pytest.raises(BatchSystemError, match=r"MaxJobCount\), for all users") as caught:
        quick.submit(B7)
    assert not isinstance(caught.value, CommandUnanswered)


def test_jobs_of_another_process_are_found_by_name(batch: SlurmBatch, slurm: FakeSlurm, tmp_path: Path) -> None:
    job = batch.submit(B7)
    slurm.put("900", name="stoker-other-b7", state="RUNNING")
    slurm.put("901", name="somebody's|job", state="RUNNING")
    slurm.put("902", name="stoker-k3v9-b7", state="RUNNING", folder="/another/session/of/the/same/name")
    another = SlurmBatch(site(), session="k3v9", folder=tmp_path, command=lambda _: "true")
    assert another.find() == {job: B7}


def test_one_command_queries_all_jobs(batch: SlurmBatch, slurm: FakeSlurm) -> None:
    jobs = [batch.submit(BlockId(f"b{number}")) for number in range(3)]
    before = len(slurm.asked("squeue"))
    assert len(batch.query(jobs)) == 3
    assert len(slurm.asked("squeue")) == before + 1
    assert not slurm.asked("scontrol")


def test_cancelling_an_ended_job_is_no_error(batch: SlurmBatch, slurm: FakeSlurm) -> None:
    job = batch.submit(B7)
    batch.cancel([job])
    batch.cancel([job, "4711"])
    assert batch.query([job])[job].reason == "cancelled by someone (scancel)"


def test_host_without_slurm_is_reported(folder: SessionFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmissionRefused, match="no sbatch on its PATH"):
        open_batch_system(site(), session="k3v9", folder=folder)


# ---- output


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


def test_squeue_output_is_parsed() -> None:
    rows = parse_squeue(SQUEUE)
    assert len(rows) == 10
    looks = {job: build_job_status(row, now=NOW) for job, row in rows.items()}
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
def test_job_that_slurm_holds_indefinitely_counts_as_ended(state: str, reason: str) -> None:
    [row] = parse_squeue(f"7|{state}|{reason}|N/A||stoker-k3v9-b0|/home/ana/submit\n").values()
    assert row.is_held_for_good
    look = build_job_status(row, now=NOW)
    assert look.phase is BlockPhase.ENDED
    words = reason.replace("_", " ") if reason != "None" else "special exit"
    assert look.reason == f"held by Slurm: {words}"


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin"])
def test_job_held_by_a_person_waits_and_shows_the_release_command(reason: str) -> None:
    [row] = parse_squeue(f"7|PENDING|{reason}|N/A||stoker-k3v9-b0|/home/ana/submit\n").values()
    look = build_job_status(row, now=NOW)
    assert (look.phase, look.reason) == (BlockPhase.PENDING, f"{reason}, until `scontrol release 7`")


def test_tasks_of_an_array_are_one_job() -> None:
    def look(*states: str) -> tuple[BlockPhase, str]:
        rows = parse_squeue("".join(f"7|{state}|stoker-k3v9-b0|/home/ana/submit\n" for state in states))
        assert list(rows) == ["7"]
        found = build_job_status(rows["7"], now=NOW)
        return found.phase, found.reason

    done, failed, waits = "COMPLETED|None|N/A|n1", "TIMEOUT|TimeLimit|N/A|n1", "PENDING|Resources|N/A|"
    one, two = "RUNNING|None|N/A|n[1,3]", "RUNNING|None|N/A|n2"
    assert look(waits, one, done, two, one) == (BlockPhase.RUNNING, "on n[1,3],n2")
    assert look(done, failed, waits) == (BlockPhase.PENDING, "Resources")
    assert look(done, failed, done) == (BlockPhase.ENDED, "out of walltime")


def test_scontrol_output_is_parsed() -> None:
    rows = parse_scontrol(
        "JobId=5 JobName=stoker-k3v9-b1 UserId=ana(1000) GroupId=ana(1000) Priority=1 Nice=0 Account=(null) "
        "QOS=(null) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
        "ExitCode=3:0 RunTime=00:00:01 TimeLimit=00:10:00 NodeList=n1 BatchHost=n1 NumNodes=1 \n"
    )
    row = rows["5"]
    assert (row.state, row.exit_code, row.nodes, row.name) == ("FAILED", "3:0", "n1", "stoker-k3v9-b1")
    assert parse_scontrol("slurm_load_jobs error: Invalid job id specified") == {}


def test_scontrol_shows_an_array_as_its_most_active_task() -> None:
    rows = parse_scontrol(
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
def test_failed_job_reports_its_state_and_output(exit_code: str, output: list[str], said: str) -> None:
    assert build_job_status(AccountedJob("1", "FAILED", exit_code=exit_code), now=NOW, output=output).reason == said


def test_reason_that_slurm_appends_to_the_job_output_is_read() -> None:
    line = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T10:00:00 DUE TO PREEMPTION ***"
    assert find_end_reason_in_output(["loading", line]) == "preempted by Slurm"
    assert find_end_reason_in_output([line.replace("PREEMPTION", "TIME LIMIT")]) == "out of walltime"
    assert build_job_status(AccountedJob("12", "CANCELLED"), now=NOW, output=[line]).reason == "preempted by Slurm"
    assert (
        build_job_status(AccountedJob("12", "CANCELLED"), now=NOW, output=["loading"]).reason
        == "cancelled by someone (scancel)"
    )
    assert build_status_of_unknown_job([line]).reason == "preempted by Slurm"
    assert build_status_of_unknown_job([]).reason == "Slurm no longer knows this job"


def test_job_names_are_built_and_parsed() -> None:
    assert job_name("k3v9", "b7") == "stoker-k3v9-b7"
    assert block_of_job_name("stoker-k3v9-b7", session="k3v9") == "b7"
    assert block_of_job_name("stoker-k3v90-b7", session="k3v9") is None
    assert block_of_job_name("stoker-k3v9-b7-again", session="k3v9") is None
    assert block_of_job_name(job_name("my run/1", "b7"), session="my run/1") == "b7"


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
def test_end_of_a_job_names_the_cause_of_its_pilot_losses(state: str, loss: LossReason | None) -> None:
    assert build_job_status(AccountedJob("1", state, nodes="n1"), now=NOW).loss is loss


def test_accounting_gives_the_reason_of_a_requeue() -> None:
    runs = "7|{}|0:0|n1\n7|PENDING|0:0|None assigned\n"
    assert find_requeue_reason(runs.format("PREEMPTED"), []) == ("preempted by Slurm", LossReason.PREEMPTED)
    assert find_requeue_reason(runs.format("NODE_FAIL"), []) == ("its node failed (n1)", LossReason.NODE_LOST)
    assert find_requeue_reason(runs.format("REQUEUED"), []) == ("requeued by a person", LossReason.VACATED)
    assert find_requeue_reason("7|PENDING|0:0|None assigned\n", []) is None
    line = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T10:00:00 DUE TO PREEMPTION ***"
    assert find_requeue_reason("", [line]) == ("preempted by Slurm", LossReason.PREEMPTED)


def test_down_or_silent_nodes_count_as_lost() -> None:
    assert parse_lost_nodes("n1|down*\nn1|down*\nn2|idle\nn3|mixed*\nn4|drained\n") == ["n1", "n3"]


def test_job_with_a_preemption_time_counts_as_preempted() -> None:
    text = "7                       2026-11-21T10:42:00     \n8                       N/A                     \n"
    assert parse_preempted_jobs(text) == {"7"}
