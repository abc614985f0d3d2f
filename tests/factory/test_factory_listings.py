from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stoker.manager.factory.batch import BatchJobStatus, BatchSystemError, CommandUnanswered, SubmissionRefused
from stoker.manager.factory.listed import ListedJob, ListingBatchSystem, parse_bjobs, parse_qstat_json, parse_qstat_xml
from stoker.protocol.blocks import BlockPhase
from stoker.protocol.ids import BlockId
from stoker.site import Duration, Provider, ProviderKind, Site

PENDING, RUNNING, ENDED = BlockPhase.PENDING, BlockPhase.RUNNING, BlockPhase.ENDED
B7 = BlockId("b7")

PBS = {
    "timestamp": 1795275000,
    "pbs_version": "2022.1.1",
    "pbs_server": "head",
    "Jobs": {
        "11.head": {
            "Job_Name": "stoker-k3v9-b0",
            "job_state": "Q",
            "comment": "Not Running: Insufficient amount of resource: ngpus",
            "estimated": {"start_time": 1795276000},
        },
        "12.head": {"Job_Name": "stoker-k3v9-b1", "job_state": "R", "exec_host": "n1/0*4"},
        "13.head": {"Job_Name": "stoker-k3v9-b2", "job_state": "H"},
        "14.head": {"Job_Name": "stoker-k3v9-b3", "job_state": "S"},
        "15.head": {"Job_Name": "stoker-k3v9-b4", "job_state": "F", "Exit_status": 0},
        "16.head": {"Job_Name": "stoker-k3v9-b5", "job_state": "F", "Exit_status": 1},
        "17.head": {"Job_Name": "stoker-k3v9-b6", "job_state": "F", "Exit_status": 271},
        "18.head": {
            "Job_Name": "stoker-k3v9-b7",
            "job_state": "F",
            "Exit_status": -29,
            "comment": "Job run at Sat Nov 21 at 10:00 on (n1:ncpus=1) and exceeded resource walltime",
        },
    },
}

LSF = """\
201|PEND|-|-|stoker-k3v9-b0|New job is waiting for scheduling;
202|RUN|-|n1|stoker-k3v9-b1|-
203|SSUSP|-|n1|stoker-k3v9-b2|-
204|DONE|-|n1|stoker-k3v9-b3|-
205|EXIT|1|n1|stoker-k3v9-b4|-
206|EXIT|140|n1|stoker-k3v9-b5|-
207|EXIT|-|-|stoker-k3v9-b6|-
208|PSUSP|-|-|stoker-k3v9-b7|Job was suspended by the user while pending;
"""

GRID_ENGINE = """<?xml version='1.0'?>
<job_info xmlns:xsd="http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/schemas/qstat/qstat.xsd">
  <queue_info>
    <job_list state="running"><JB_job_number>301</JB_job_number><JAT_prio>0.5</JAT_prio>
      <JB_name>stoker-k3v9-b0</JB_name><JB_owner>ana</JB_owner><state>r</state>
      <queue_name>gpu.q@n1</queue_name><slots>1</slots></job_list>
    <job_list state="running"><JB_job_number>302</JB_job_number>
      <JB_name>stoker-k3v9-b1</JB_name><state>T</state><queue_name>gpu.q@n1</queue_name></job_list>
  </queue_info>
  <job_info>
    <job_list state="pending"><JB_job_number>303</JB_job_number>
      <JB_name>stoker-k3v9-b2</JB_name><state>qw</state><queue_name></queue_name></job_list>
    <job_list state="pending"><JB_job_number>304</JB_job_number>
      <JB_name>stoker-k3v9-b3</JB_name><state>Eqw</state><queue_name></queue_name></job_list>
    <job_list state="pending"><JB_job_number>305</JB_job_number>
      <JB_name>stoker-k3v9-b4</JB_name><state>hqw</state><queue_name></queue_name></job_list>
  </job_info>
</job_info>
"""


def said(jobs: dict[str, ListedJob]) -> list[tuple[BlockPhase, str]]:
    return [(job.phase, job.reason) for job in jobs.values()]


def test_pbs_listing_is_parsed() -> None:
    jobs = parse_qstat_json(json.dumps(PBS))
    assert said(jobs) == [
        (PENDING, "Not Running: Insufficient amount of resource: ngpus"),
        (RUNNING, "on n1/0*4"),
        (PENDING, "held"),
        (RUNNING, "suspended"),
        (ENDED, "done"),
        (ENDED, "exit code 1"),
        (ENDED, "killed by signal 15"),
        (ENDED, "out of walltime"),
    ]
    assert jobs["11.head"].expected_at == 1795276000
    assert jobs["16.head"].has_failed
    assert parse_qstat_json('{"pbs_server": "head"}') == {}


def test_lsf_listing_is_parsed() -> None:
    assert said(parse_bjobs(LSF)) == [
        (PENDING, "New job is waiting for scheduling;"),
        (RUNNING, "on n1"),
        (RUNNING, "suspended"),
        (ENDED, "done"),
        (ENDED, "exit code 1"),
        (ENDED, "out of walltime"),
        (ENDED, "cancelled by someone (bkill)"),
        (PENDING, "Job was suspended by the user while pending;"),
    ]


def test_grid_engine_listing_is_parsed() -> None:
    assert said(parse_qstat_xml(GRID_ENGINE)) == [
        (RUNNING, "on gpu.q@n1"),
        (RUNNING, "suspended (T)"),
        (PENDING, ""),
        (PENDING, "in error state Eqw: see `qstat -j`"),
        (PENDING, "held"),
    ]
    assert parse_qstat_xml("") == {}
    with pytest.raises(ValueError, match="syntax error"):
        parse_qstat_xml("error: commlib error")


COMMANDS = {
    ProviderKind.PBS: {
        "qsub": "echo 11.head",
        "qselect": "echo 11.head; echo 12.head",
        "qstat": f"cat <<'END'\n{json.dumps(PBS)}\nEND",
        "qdel": 'echo "$@" >> cancelled',
    },
    ProviderKind.LSF: {
        "bsub": "grep -q 'BSUB -J stoker-k3v9-b0' && echo 'Job <201> is submitted to queue <gpu>.'",
        "bjobs": f"cat <<'END'\n{LSF}END",
        "bkill": 'echo "$@" >> cancelled',
    },
    ProviderKind.GRID_ENGINE: {
        "qsub": "grep -q '#$ -N stoker-k3v9-b0' stoker-k3v9-b0.sh && echo 303",
        "qstat": f"cat <<'END'\n{GRID_ENGINE}END",
        "qdel": 'echo "$@" >> cancelled',
    },
}
IDS = {ProviderKind.PBS: "11.head", ProviderKind.LSF: "201", ProviderKind.GRID_ENGINE: "303"}
kinds = pytest.mark.parametrize("kind", list(COMMANDS), ids=lambda kind: kind.value)


class World:
    def __init__(self, folder: Path, kind: ProviderKind) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, body in COMMANDS[kind].items():
            self.put(name, body)
        site = Site(name="lab", provider=Provider(kind=kind, command_limit_s=Duration(60)))
        self.submit = folder / "sub mit"
        self.submit.mkdir()
        self.batch = ListingBatchSystem(site, session="k3v9", folder=self.submit, command=lambda block: f"echo {block}")

    def put(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.bin / name).chmod(0o755)


@pytest.fixture
def world(kind: ProviderKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return World(tmp_path, kind)


@kinds
def test_job_is_submitted_queried_found_and_cancelled(world: World, kind: ProviderKind) -> None:
    job = world.batch.submit(BlockId("b0"))
    assert job == IDS[kind]
    assert world.batch.query([job])[job].phase is PENDING
    assert job in world.batch.find()
    world.batch.cancel([job, "999"])
    assert (world.submit / "cancelled").read_text() == f"{job} 999\n"


@kinds
def test_job_missing_from_the_listing_is_absent_with_its_output(world: World, kind: ProviderKind) -> None:
    job = world.batch.submit(BlockId("b0"))
    for name in ("qstat", "bjobs"):
        world.put(name, "true" if kind is not ProviderKind.PBS else "echo 'qstat: Unknown Job Id 11' >&2; exit 153")
    script = (world.submit / "stoker-k3v9-b0.sh").read_text()
    (named,) = re.findall(r"^#\S+ -e (\S+)$", script, re.MULTILINE)
    (world.submit / named).write_text("no such module: cuda\n")
    assert world.batch.query([job])[job] == BatchJobStatus(
        ENDED, "no longer in the queue: no such module: cuda", is_unlisted=True
    )


@kinds
def test_refusal_and_outage_are_distinguished(world: World, kind: ProviderKind) -> None:
    for name in ("qsub", "bsub"):
        world.put(name, "echo 'Unknown queue MSG=moon' >&2; exit 1")
    with pytest.raises(SubmissionRefused, match="Unknown queue MSG=moon"):
        world.batch.submit(B7)
    for name in ("qsub", "bsub", "qstat", "bjobs", "qselect"):
        world.put(name, "echo 'Cannot connect to server head' >&2; exit 1")
    for ask in (lambda: world.batch.submit(B7), lambda: world.batch.query(["1"]), world.batch.find):
        with pytest.raises(BatchSystemError, match="Cannot connect to server head"):
            ask()


@pytest.mark.parametrize("kind", [ProviderKind.PBS, ProviderKind.GRID_ENGINE], ids=lambda kind: kind.value)
def test_unreadable_answer_is_reported_as_trouble(world: World, kind: ProviderKind) -> None:
    world.put("qstat", "echo '<<<'")
    with pytest.raises(BatchSystemError, match="printed something that cannot be read"):
        world.batch.query(["1"])


BANNERS = {
    ProviderKind.PBS: ("qsub", "11.head"),
    ProviderKind.LSF: ("bsub", "Job <201> is submitted to queue <gpu>."),
    ProviderKind.GRID_ENGINE: ("qsub", "303"),
}


@kinds
def test_job_id_is_found_among_other_output_lines(world: World, kind: ProviderKind) -> None:
    command, answer = BANNERS[kind]
    world.put(command, f"echo 'checking your budget ... 2026 hours left'; echo '{answer}'; echo 'bye: see news'")
    assert world.batch.submit(BlockId("b0")) == IDS[kind]


@kinds
def test_job_without_a_certain_id_is_found_by_its_name(world: World, kind: ProviderKind) -> None:
    world.put(BANNERS[kind][0], "echo 2026; echo 2027")
    with pytest.raises(CommandUnanswered, match="no unique job id"):
        world.batch.submit(BlockId("b0"))
    name = {ProviderKind.GRID_ENGINE: "b2"}.get(kind, "b0")
    assert world.batch.find()[IDS[kind]] == name


@kinds
def test_listing_is_parsed_among_other_output_lines(world: World, kind: ProviderKind) -> None:
    for name in ("qselect", "qstat", "bjobs"):
        if name in COMMANDS[kind]:
            world.put(name, f"echo 'Dear user, 3 < 4 & {{all}} is well'\n{COMMANDS[kind][name]}\necho 'bye | now'")
    job = IDS[kind]
    assert world.batch.query([job])[job].phase is PENDING
    assert job in world.batch.find()


@kinds
def test_jobs_are_cancelled_by_name(world: World, kind: ProviderKind) -> None:
    world.batch.cancel_named([BlockId("b0")])
    said = (world.submit / "cancelled").read_text()
    assert (
        said
        == {
            ProviderKind.PBS: "11.head 12.head\n",  # the job ids that qselect printed
            ProviderKind.LSF: "-J stoker-k3v9-b0 0\n",
            ProviderKind.GRID_ENGINE: "stoker-k3v9-b0\n",
        }[kind]
    )


QACCT = """==============================================================
qname        all.q
owner        ana
jobname      stoker-k3v9-b0
jobnumber    303
failed       {failed}
exit_status  {code}
"""
BHIST = """
Job <201>, Job Name <stoker-k3v9-b0>, User <ana>, Project <default>, Command <#!/b
                     in/bash;exec pilot>
Sat Nov 21 10:00:00: Submitted from host <head>, to Queue <gpu>;
Sat Nov 21 10:00:05: Dispatched 1 Task(s) on Host(s) <n1>;
Sat Nov 21 10:00:05: Starting (Pid 4711);
{more}
"""


@pytest.mark.parametrize(
    ("kind", "text", "phase", "reason"),
    [
        (ProviderKind.GRID_ENGINE, QACCT.format(failed=0, code=3), ENDED, "exit code 3"),
        (
            ProviderKind.GRID_ENGINE,
            QACCT.format(failed="37  : qmaster enforced h_rt limit", code="137 (Killed)"),
            ENDED,
            "out of walltime",
        ),
        (ProviderKind.GRID_ENGINE, QACCT.format(failed=0, code=0) + "deleted_by   ana@head\n", ENDED, "cancelled by"),
        (ProviderKind.GRID_ENGINE, QACCT.format(failed=0, code=0).replace("-b0", "-b9"), None, "another job"),
        (ProviderKind.LSF, BHIST.format(more="Sat Nov 21 10:01:00: Done successfully. The CPU"), ENDED, "done"),
        (
            ProviderKind.LSF,
            BHIST.format(
                more="Sat Nov 21: Exited with exit code 140. The CP\n                     U time used;\n"
                "Sat Nov 21: Completed <exit>; TERM_RUNLIMIT: job killed after reaching LSF run time limit;"
            ),
            ENDED,
            "out of walltime",
        ),
        (ProviderKind.LSF, BHIST.format(more="Sat Nov 21: Exited; TERM_OWNER: job killed"), ENDED, "cancelled"),
    ],
)
def test_accounting_finds_unlisted_jobs(
    world: World, kind: ProviderKind, text: str, phase: BlockPhase | None, reason: str
) -> None:
    job = world.batch.submit(BlockId("b0"))
    world.put("qstat", "true")
    world.put("bjobs", "true")
    for name in ("qacct", "bhist"):
        world.put(name, f'[ "$2" = {job} ] && cat <<"END"\n{text}\nEND')
    look = world.batch.query([job])[job]
    assert look.is_unlisted is (phase is None)
    assert phase is None or (look.phase is phase and look.reason.startswith(reason))
