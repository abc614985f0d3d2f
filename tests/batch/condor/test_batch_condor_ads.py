"""Test the interpretation of HTCondor ads without HTCondor."""

from __future__ import annotations

import re
from typing import Any

import pytest

from stoker.manager.factory.batch import BatchSystemError, SubmissionRefused
from stoker.manager.factory.commands import CommandResult
from stoker.manager.factory.condor import build_submission_error, find_warnings, short_failure_reason
from stoker.manager.factory.condor_ads import (
    JobAd,
    JobVerdict,
    build_end_status,
    has_failed,
    has_no_matching_slot,
    job_id_of_ad,
    judge_job,
    parse_job_ads,
    summarize_match_analysis,
)
from stoker.protocol.blocks import BlockPhase, LossReason


def ad(status: int, *, for_s: int = 5, **more: Any) -> JobAd:
    return {
        "ClusterId": 12,
        "ProcId": 0,
        "JobStatus": status,
        "EnteredCurrentStatus": 1000,
        "ServerTime": 1000 + for_s,
        **more,
    }


def told(verdict: JobVerdict) -> tuple[BlockPhase, str]:
    return verdict.status.phase, verdict.status.reason


@pytest.mark.parametrize(
    ("job", "phase", "reason"),
    [
        (ad(1), BlockPhase.PENDING, "idle"),
        (ad(1, LastRejMatchReason="no match found", LastRejMatchTime=1003), BlockPhase.PENDING, "idle: no match found"),
        (ad(1, LastRejMatchReason="insufficient priority |5|12.0|"), BlockPhase.PENDING, "idle: insufficient priority"),
        (ad(1, NumShadowStarts=1, LastRemoteHost="slot1@n1"), BlockPhase.PENDING, "idle"),
        (ad(1, NumJobStarts=1, LastJobStatus=5, LastRemoteHost="slot1@n1"), BlockPhase.PENDING, "idle"),
        (ad(2, RemoteHost="slot1_1@n1"), BlockPhase.RUNNING, "on slot1_1@n1"),
        (ad(3), BlockPhase.RUNNING, "is being removed"),
        (ad(6), BlockPhase.RUNNING, "sends its output back"),
        (ad(7), BlockPhase.RUNNING, "suspended"),
        (ad(5, HoldReason="no\n such file", HoldReasonCode=13), BlockPhase.PENDING, "held: no such file"),
    ],
)
def test_state_of_a_queued_job_is_read_from_its_ad(job: JobAd, phase: BlockPhase, reason: str) -> None:
    verdict = judge_job(job)
    assert told(verdict) == (phase, reason)
    assert not verdict.remove


@pytest.mark.parametrize(
    ("code", "subcode", "loss", "reason"),
    [
        (1011, 0, LossReason.PREEMPTED, "preempted from slot1@n1: why"),
        (1019, 0, LossReason.PREEMPTED, "preempted from slot1@n1: why"),
        (1004, 0, LossReason.VACATED, "evicted from slot1@n1: why"),
        (1008, 0, LossReason.NODE_LOST, "node failed: n1: why"),
        (34, 102, LossReason.OUT_OF_MEMORY, "evicted from slot1@n1: why"),
    ],
)
def test_evicted_job_counts_as_ended_with_the_eviction_reason(
    code: int, subcode: int, loss: LossReason, reason: str
) -> None:
    job = ad(
        1, LastJobStatus=2, NumJobStarts=1, LastRemoteHost="slot1@n1",
        VacateReason="why", VacateReasonCode=code, VacateReasonSubCode=subcode,
    )  # fmt: skip
    verdict = judge_job(job)
    assert told(verdict) == (BlockPhase.ENDED, reason)
    assert (verdict.status.loss, verdict.remove, verdict.force) == (loss, True, False)


def evicted(code: int, **more: Any) -> JobAd:
    """Return an idle job that left its machine, before or after a shadow recorded its start."""
    return ad(1, LastJobStatus=2, NumJobStarts=0, LastRemoteHost="slot1@n1", VacateReasonCode=code, **more)


@pytest.mark.parametrize("code", [1011, 1022, 1002, 1008])
def test_eviction_is_detected_before_the_shadow_logs_the_start(code: int) -> None:
    verdict = judge_job(evicted(code))
    assert (verdict.status.phase, verdict.remove) == (BlockPhase.ENDED, True)


@pytest.mark.parametrize("code", [1003, 1006, 1026, 1032, 1036])
def test_refusal_by_a_slot_ends_a_job_only_if_the_job_ran(code: int) -> None:
    assert judge_job(evicted(code)).status.phase is BlockPhase.PENDING
    assert judge_job(evicted(code), has_run=True).status.phase is BlockPhase.ENDED


@pytest.mark.parametrize("status", [1, 2])
def test_released_job_still_reports_its_last_hold(status: int) -> None:
    look = judge_job(
        ad(status, LastHoldReason=_OVER, LastHoldReasonCode=34, LastHoldReasonSubCode=102, NumHolds=3)
    ).status
    assert (look.cause, look.holds) == ("memory", 3)
    assert look.advice.endswith("raise [provider] memory in the site file")


_OTHER_USER = "Error from slot1_1@n1: Failed to open '/home/ana/s/submit/b1.out' as standard output: Permission denied"
_OVER = "Error from slot1@n1: Job has gone over memory limit of 3072 megabytes. Last measured usage: 3400 megabytes."


@pytest.mark.parametrize(
    ("code", "subcode", "why", "loss", "cause", "advice"),
    [
        (34, 102, _OVER, LossReason.OUT_OF_MEMORY, "memory",
         'memory = "3.2 GB" is too small: the pilot used 3.6 GB; raise [provider] memory in the site file'),
        (21, 0, "memory usage exceeded request_memory", LossReason.OUT_OF_MEMORY, "memory",
         'memory = "3.2 GB" is too small: the pilot used 3.6 GB; raise [provider] memory in the site file'),
        (34, 104, "disk usage exceeded request_disk", LossReason.HELD, "disk",
         "the pilot used more disk than the job had requested; raise [pilot] cache_size, which sets the request"),
        (3, 0, "The job attribute PeriodicHold evaluated to TRUE", LossReason.HELD, "hold code 3",
         "fix the cause that HTCondor names, in the site file or on its machines"),
        (6, 13, _OTHER_USER, LossReason.HELD, "hold code 6",
         "the pool runs jobs as users of its own, who cannot access the session's folder; set [provider]"
         ' shared_files = false and [environment] kind = "packed" in the site file'),
        (1, 0, "via condor_hold (by user ana)", LossReason.HELD, "", ""),
    ],
)  # fmt: skip
def test_hold_reports_its_cause_and_advice(
    code: int, subcode: int, why: str, loss: LossReason, cause: str, advice: str
) -> None:
    job = ad(
        5, HoldReason=why, HoldReasonCode=code, HoldReasonSubCode=subcode, NumJobStarts=1,
        RequestMemory=3072, ResidentSetSize_RAW=3400 * 1024,
    )  # fmt: skip
    look = judge_job(job).status
    assert (look.reason, look.loss, look.cause, look.advice) == (f"held: {why}", loss, cause, advice)


def test_hold_of_a_job_that_never_ran_is_not_counted_as_a_loss() -> None:
    assert judge_job(ad(5, HoldReason="no such file", HoldReasonCode=13)).status.loss is None


def test_hold_over_the_time_limit_ends_the_job() -> None:
    verdict = judge_job(ad(5, HoldReason="out of disk", HoldReasonCode=34, for_s=121))
    assert told(verdict) == (BlockPhase.ENDED, "held: out of disk")
    assert (verdict.remove, verdict.force) == (True, False)


@pytest.mark.parametrize("code", [1, 16])
def test_holds_by_the_owner_or_for_files_have_no_time_limit(code: int) -> None:
    verdict = judge_job(ad(5, HoldReason="via condor_hold (by user ana)", HoldReasonCode=code, for_s=99_999))
    assert told(verdict) == (BlockPhase.PENDING, "held: via condor_hold (by user ana)")
    assert not verdict.remove


def test_job_whose_removal_hangs_is_removed_by_force() -> None:
    verdict = judge_job(ad(3, RemoteHost="slot1_1@n1", for_s=121))
    assert told(verdict) == (BlockPhase.ENDED, "is being removed; slot1_1@n1 does not answer")
    assert (verdict.remove, verdict.force) == (True, True)


@pytest.mark.parametrize(
    ("job", "reason", "failed"),
    [
        (ad(4, ExitBySignal=False, ExitCode=0), "exit code 0", False),
        (ad(4, ExitBySignal=False, ExitCode=2), "exit code 2", True),
        (ad(4, ExitBySignal=True, ExitSignal=9), "killed by signal 9 (SIGKILL)", True),
        (ad(4, ExitBySignal=True, ExitSignal=99), "killed by signal 99", True),
        (ad(3, RemoveReason="via condor_rm (by user ana)"), "removed via condor_rm (by user ana)", False),
        (
            ad(3, LastJobStatus=2, RemoveReason="The job attribute PeriodicRemove expression '...' evaluated to TRUE",
               StokerWalltime=7200),
            "out of walltime (2 h)", False,
        ),
        (
            ad(3, LastJobStatus=5, HoldReason="no such file", RemoveReason="via condor_rm (by user ana)"),
            "held by HTCondor: no such file", False,
        ),
        (
            ad(3, LastJobStatus=5, LastHoldReason="no such file", RemoveReason="via condor_rm (by user ana)"),
            "held by HTCondor: no such file", False,
        ),
        (
            ad(3, LastJobStatus=2, LastHoldReason="no such file", RemoveReason="via condor_rm (by user ana)",
               ExitBySignal=True, ExitSignal=15),
            "removed via condor_rm (by user ana)", False,
        ),
    ],
)  # fmt: skip
def test_ended_job_reports_the_reason_of_its_end(job: JobAd, reason: str, failed: bool) -> None:
    look = build_end_status(job)
    assert (look.phase, look.reason) == (BlockPhase.ENDED, reason)
    assert has_failed(job) is failed
    losses = {"removed": LossReason.CANCELLED, "out of": LossReason.WALLTIME, "held by": LossReason.HELD}
    assert look.loss is next((loss for words, loss in losses.items() if reason.startswith(words)), None)


@pytest.mark.parametrize("prefix", ["", "Last"])
def test_held_job_that_the_pool_removed_reports_its_hold(prefix: str) -> None:
    hold = {f"{prefix}HoldReason": _OVER, f"{prefix}HoldReasonCode": 34, f"{prefix}HoldReasonSubCode": 102}
    look = build_end_status(ad(3, LastJobStatus=5, NumHolds=2, RemoveReason="SYSTEM_PERIODIC_REMOVE", **hold))
    assert (look.loss, look.cause, look.holds) == (LossReason.OUT_OF_MEMORY, "memory", 2)
    assert look.advice.endswith("raise [provider] memory in the site file")


def test_reason_of_an_earlier_wait_for_a_slot_is_not_shown() -> None:
    assert has_no_matching_slot(ad(1, LastRejMatchReason="no match found", LastRejMatchTime=1003))
    assert not has_no_matching_slot(ad(1, LastRejMatchReason="no match found", LastRejMatchTime=990))


ANALYSIS = """
The Requirements expression for job 781.0 reduces to these conditions:

         Slots
Step    Matched  Condition
-----  --------  ---------
[0]           2  TARGET.Arch == "X86_64"
[5]           0  TARGET.Memory >= RequestMemory


781.000:  Run analysis summary ignoring user priority.  Of {},
      2{} are rejected by your job's requirements
      {}{} reject your job because of their own requirements
      0 match and are already running your jobs
"""


# Output of HTCondor 25.14.
NOWHERE = """
The Requirements expression for job 15.000 reduces to these conditions:

         Slots      If
Step   Matched   Drained  Condition
----- --------- --------- ---------
[0]           0         0  TARGET.HasTape
[5]           1         1  versionGE(split(TARGET.CondorVersion)[1],"25.12.0")
[11]          1         1  TARGET.FileSystemDomain == MY.FileSystemDomain


015.000:  Run analysis summary ignoring user priority.  Of 1 slots on 1 machines,
      1 slots are rejected by your job's requirements
      0 slots reject your job because of their own requirements
      0 slots match and are willing to run your job

WARNING:  Be advised:
   No machines matched the job's constraints
"""
COMPOUND = """
    [0]    : TARGET.HasTape is true
    [1]    : TARGET.Cpus > 99
    [2]    : [0] || [1]
    [3]    : split(TARGET.CondorVersion)[1] == "9"
    [4]    : [2] && [3]
    [5]    : TARGET.Memory >= RequestMemory
    [6]    : [3] && [5]

The Requirements expression for job 6.000 reduces to these conditions:

        Slots
Step   Matched  Condition
----- --------- ---------
[0]           0  TARGET.HasTape is true
[1]           0  TARGET.Cpus > 99
[2]           0  [0] || [1]
[3]           1  split(TARGET.CondorVersion)[1] == "9"
[4]           0  [2] && [3]
[5]           1  TARGET.Memory >= RequestMemory
[6]           0  [3] && [5]


006.000:  Run analysis summary ignoring user priority.  Of 1 slots on 1 machines,
      1 slots are rejected by your job's requirements
      0 slots reject your job because of their own requirements
      0 slots match and are willing to run your job
"""
TAKEN = """
The Requirements expression for job 38.000 reduces to these conditions:

         Slots      If
Step   Matched   Drained  Condition
----- --------- --------- ---------
[7]           1         1  TARGET.Memory >= RequestMemory
[9]           0         1  TARGET.Cpus >= RequestCpus
[11]          1         1  TARGET.FileSystemDomain == MY.FileSystemDomain


038.000:  Run analysis summary ignoring user priority.  Of 1 slots on 1 machines,
      0 slots are rejected by your job's requirements
      0 slots reject your job because of their own requirements
      0 slots match and are willing to run your job
      1 slots would match if drained
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (NOWHERE, "of 1 slots 1 are ruled out by the job's requirements: none meets TARGET.HasTape"),
        (TAKEN, "of 1 slots 1 would suit, but are taken"),
        (
            "015.000:  Run analysis summary ignoring user priority.  Of 1 slots on 1 machines,\n"
            "      0 slots are rejected by your job's requirements\n"
            "      0 slots reject your job because of their own requirements\n"
            "      1 slots match and are willing to run your job\n",
            "",
        ),
        (
            ANALYSIS.format("2 machines", "", 0, ""),
            "of 2 slots 2 are ruled out by the job's requirements: none meets TARGET.Memory >= RequestMemory"
            " with the resources free now",
        ),
        (
            ANALYSIS.format("2 slots on 1 machines", " slots", 0, " slots"),
            "of 2 slots 2 are ruled out by the job's requirements: none meets TARGET.Memory >= RequestMemory",
        ),
        (
            COMPOUND,
            "of 1 slots 1 are ruled out by the job's requirements: none meets TARGET.HasTape is true || "
            'TARGET.Cpus > 99, split(TARGET.CondorVersion)[1] == "9" && TARGET.Memory >= RequestMemory',
        ),
        (
            ANALYSIS.format("9 machines", "", 3, ""),
            "of 9 slots 2 are ruled out by the job's requirements, 3 refuse the job by their own requirements",
        ),
        ("781.000:  Job is running.\n", ""),
    ],
)
def test_unsuitable_slots_are_reported_with_reasons(text: str, told: str) -> None:
    assert summarize_match_analysis(text) == told


@pytest.mark.parametrize(
    ("words", "kind", "told"),
    [
        ("ERROR: Can't find address of local schedd", BatchSystemError, "Can't find address of local schedd"),
        ("ERROR: Failed to connect to local queue manager; AUTHENTICATE:1003", BatchSystemError, "Failed to connect"),
        (
            "ERROR: Failed to connect to local queue manager; CEDAR:6001:Failed to connect to <127.0.0.1:38977>",
            BatchSystemError,
            "^Failed to connect to local",
        ),
        (
            "ERROR: on Line 5 of x.sub:; ERROR: Failed to parse command file (line 5).",
            SubmissionRefused,
            r"Failed to parse command file \(line 5\)",
        ),
        ("ERROR: Failed to commit job submission into the queue.", BatchSystemError, "Failed to commit"),
        ("SECMAN:2007:Failed to end classad message.", BatchSystemError, "SECMAN:2007"),
        ("SECMAN:2011:Connection closed during command authorization.", BatchSystemError, "SECMAN:2011"),
        (
            "ERROR: Failed to commit job submission into the queue.; ERROR: Submissions need +ProjectName",
            SubmissionRefused,
            "^Submissions need",
        ),
        ("ERROR: MAX_JOBS_SUBMITTED exceeded. Current=9, Limit=9", BatchSystemError, "^MAX_JOBS"),
        (
            "ERROR: Failed to create proc; Number of submitted jobs would exceed MAX_JOBS_PER_OWNER",
            BatchSystemError,
            "MAX_JOBS_PER_OWNER",
        ),
        ("ERROR: I don't know about the 'none' universe.", SubmissionRefused, "^I don't know"),
        ("ERROR: User ana@site is disabled", SubmissionRefused, "^User ana"),
    ],
)
def test_error_of_condor_submit_is_classified(words: str, kind: type[Exception], told: str) -> None:
    error = build_submission_error(words)
    assert type(error) is kind
    assert re.search(told, str(error))


SHUT_DOWN = """Error: Can't find address for schedd submit.pool

Extra Info: You probably saw this error because the condor_schedd is not
running on the machine you are trying to query. If the condor_schedd is not
running, the Condor system will not be able to find an address and port to
connect to and satisfy this request. Please make sure the Condor daemons are
running and try again.

Extra Info: If the condor_schedd is running on the machine you are trying to
query and you still see the error, the most likely cause is that you have
setup a personal Condor, you have not defined SCHEDD_NAME in your
condor_config file, and something is wrong with your SCHEDD_ADDRESS_FILE
setting. You must define either or both of those settings in your config
file, or you must use the -name option to condor_q. Please see the Condor
manual for details on SCHEDD_NAME and SCHEDD_ADDRESS_FILE.
"""
KILLED = """
-- Failed to fetch ads from: <127.0.0.1:38977?addrs=127.0.0.1-38977&alias=submit.pool> : submit.pool
CEDAR:6001:Failed to connect to <127.0.0.1:38977?addrs=127.0.0.1-38977&alias=submit.pool>
"""


@pytest.mark.parametrize(
    ("err", "told"),
    [
        (SHUT_DOWN, "Error: Can't find address for schedd submit.pool"),
        (
            KILLED,
            "-- Failed to fetch ads from: <127.0.0.1:38977> : submit.pool; "
            "CEDAR:6001:Failed to connect to <127.0.0.1:38977>",
        ),
        ("", "exit code 1, no output"),
    ],
)
def test_unreachable_schedd_in_condor_q_output_is_recognized(err: str, told: str) -> None:
    assert short_failure_reason(CommandResult(1, "", err)) == told


@pytest.mark.parametrize(
    ("err", "told"),
    [
        (
            "WARNING: the line 'reqest_memory = 5 TB' was unused by condor_submit. Is it a typo?\n",
            ["the line 'reqest_memory = 5 TB' was unused by condor_submit. Is it a typo?"],
        ),
        (
            "\nWARNING: Committed job submission into the queue with the following warning(s):\n"
            "WARNING: QMGMT:0:Submissions want +ProjectName\n",
            ["Submissions want +ProjectName"],
        ),
        ("To monitor your job(s), run: condor_watch_q -clusters 3\n", []),
    ],
)
def test_warning_of_condor_submit_is_recognized(err: str, told: list[str]) -> None:
    assert find_warnings(err) == told


def test_ads_are_parsed_as_condor_q_prints_them() -> None:
    assert parse_job_ads("", command="condor_q") == []
    assert parse_job_ads("[\n]\n", command="condor_history") == []
    two = parse_job_ads(
        '[\n{\n  "ClusterId": 7,\n  "ProcId": 0\n}\n,\n{\n  "ClusterId": 8,\n  "ProcId": 1\n}\n]\n', command="condor_q"
    )
    assert [job_id_of_ad(found) for found in two] == ["7.0", "8.1"]


@pytest.mark.parametrize(
    "text", ["-- Schedd: submit.pool", '{"ClusterId": 1}', "[1]", '[{"ProcId": 0}]', '[{"ClusterId": 7']
)
def test_malformed_condor_q_output_raises_batch_trouble(text: str) -> None:
    with pytest.raises(BatchSystemError, match="condor_q printed"):
        parse_job_ads(text, command="condor_q")
