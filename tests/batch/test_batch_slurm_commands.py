from __future__ import annotations

import itertools

import pytest
from batch.lab.commands import until
from batch.lab.shape import Preempt, Shape
from batch.sessions import write_site

from stoker.config import load_site
from stoker.manager.factory.batch import BatchJobStatus, BatchSystemError, SubmissionRefused
from stoker.manager.factory.slurm import SlurmBatch
from stoker.protocol.blocks import BlockPhase
from stoker.protocol.ids import BlockId

B1, B2 = BlockId("b1"), BlockId("b2")


SESSIONS = itertools.count(1)


@pytest.fixture
def batch_of(tmp_path):
    """Return a function that makes the `SlurmBatch` of a session. Blocks run a command instead of a pilot. Session
    names are new, because Slurm remembers earlier sessions.
    """
    own = f"k{next(SESSIONS)}"

    def make(command: str = "sleep 100", *, session: str = own, **provider: object) -> SlurmBatch:
        site = load_site(write_site(tmp_path, provider=provider))
        folder = tmp_path / "submit"
        folder.mkdir(exist_ok=True)
        return SlurmBatch(site, session=session, folder=folder, command=lambda block: command)

    return make


def when(batch: SlurmBatch, job: str, phase: BlockPhase, *, reason: bool = False) -> BatchJobStatus:
    def seen() -> BatchJobStatus | None:
        look = batch.query([job]).get(job)
        return look if look is not None and look.phase is phase and (look.reason or not reason) else None

    look = until(seen, what=f"job {job} {phase.value}")
    assert look is not None
    return look


def test_job_is_submitted_found_by_its_name_and_cancelled(slurm, batch_of):
    batch = batch_of(gpus="titanx:1", options=["--nodelist=n4"])
    job = batch.submit(B1)
    assert when(batch, job, BlockPhase.RUNNING).reason == "on n4"
    batch_of(session="other").submit(B1)
    successor = batch_of()
    assert successor.find() == {job: B1}, "jobs of other sessions do not count"
    successor.cancel([job])
    assert when(batch, job, BlockPhase.ENDED).reason == "cancelled by someone (scancel)"
    batch.cancel([job, "999999"])


def test_pending_job_reports_its_reason_and_expected_start(slurm, batch_of):
    slurm.wait(slurm.submit("sleep 100", "--partition=main", "--exclusive", "--nodelist=n1", "--time=3"), "RUNNING")
    batch = batch_of(options=["--nodelist=n1", "--exclusive"])
    job = batch.submit(B1)
    look = until(lambda: _expected(batch, job), what="an expected start")
    assert look.reason in ("Resources", "Priority", "ReqNodeNotAvail")
    assert 60 < look.expected_in_s <= 180


def _expected(batch: SlurmBatch, job: str) -> BatchJobStatus | None:
    look = batch.query([job])[job]
    return look if look.expected_in_s else None


def test_job_that_can_never_start_reports_its_reason(slurm, batch_of):
    batch = batch_of(partition="phys", account="chem")
    job = batch.submit(B1)
    assert "phys allows phys" in until(lambda: batch.query([job])[job].reason, what="a reason")


@pytest.mark.parametrize(
    ("provider", "words"),
    [
        ({"partition": "gpu"}, "Invalid partition name specified"),
        ({"gpus": "h100:1"}, "Requested node configuration is not available"),
        ({"gpus": "a10:8"}, "Requested node configuration is not available"),
        ({"options": ["--no-such-option"]}, "no-such-option"),
    ],
    ids=["partition", "type", "count", "option"],
)
def test_refused_submission_error_contains_the_slurm_message(slurm, batch_of, provider, words):
    with pytest.raises(SubmissionRefused, match=words):
        batch_of(**provider).submit(B1)


def test_requeued_job_is_pending_again(slurm, batch_of):
    batch = batch_of(options=["--nodelist=n2", "--exclusive"])
    job = batch.submit(B1)
    when(batch, job, BlockPhase.RUNNING)
    slurm.submit("sleep 100", "--partition=main", "--exclusive", "--nodelist=n2")
    when(batch, job, BlockPhase.PENDING, reason=True)
    assert batch.find() == {job: B1}


def test_array_is_one_job_with_the_state_of_its_most_active_task(slurm, batch_of):
    slurm.update_node(["n3", "n4"], "DRAIN")
    batch = batch_of(gpus="1", options=["--array=0-2"])
    job = batch.submit(B1)
    assert set(when(batch, job, BlockPhase.RUNNING).reason.removeprefix("on ").split(",")) <= {"n1", "n2"}
    until(lambda: [line[2] for line in slurm.queue()].count("RUNNING") == 2, what="two tasks that run")
    assert set(batch.query([job])[job].reason.removeprefix("on ").split(",")) == {"n1", "n2"}
    assert batch.find() == {job: B1}, "the waiting task belongs to the block"
    batch.cancel([job])
    assert when(batch, job, BlockPhase.ENDED).reason == "cancelled by someone (scancel)"
    until(lambda: not slurm.queue(), what="no task left")


def test_failed_job_ends_with_its_last_output(slurm, batch_of):
    batch = batch_of("sh -c 'echo it was like this >&2; exit 3'")
    job = batch.submit(B1)
    look = when(batch, job, BlockPhase.ENDED)
    assert look.reason.startswith("exit code 3")
    assert "it was like this" in look.reason


def test_hanging_slurm_command_times_out_after_command_limit(slurm, batch_of):
    slurm.freeze("slurmctld")
    with pytest.raises(BatchSystemError, match="squeue has not answered for 1 s"):
        batch_of(command_limit="1 s").query(["1"])
    # Within 4 s sbatch sends its request.
    with pytest.raises(BatchSystemError, match="sbatch has not answered for 4 s"):
        batch_of(command_limit="4 s").submit(B2)
    slurm.thaw("slurmctld")
    batch = batch_of()
    until(lambda: set(batch.find().values()) == {B2}, what="the job that was submitted despite the timeout")


def test_unreachable_slurmctld_raises_a_batch_trouble_error(slurm, batch_of):
    batch = batch_of(command_limit="10 s")
    slurm.kill("slurmctld")
    with pytest.raises(BatchSystemError, match="Unable to contact slurm controller"):
        batch.submit(B1)
    with pytest.raises(BatchSystemError, match="Unable to contact slurm controller"):
        batch.find()


@pytest.mark.parametrize("accounting", [False, pytest.param(True, marks=pytest.mark.long)], ids=["squeue", "sacct"])
def test_end_reason_distinguishes_preemption_from_node_failure(make_cluster, batch_of, accounting):
    cluster = make_cluster(
        Shape(
            gpus=("a10:1", "a10:1", "a10:1"),
            preempt=Preempt.CANCEL,
            accounting=accounting,
            settings={"MinJobAge": "2"},
        )
    )
    batches = {node: batch_of(gpus="1", options=[f"--nodelist={node}", "--no-requeue"]) for node in cluster.shape.nodes}
    jobs = {node: batch.submit(BlockId(f"b{node}")) for node, batch in batches.items()}
    for node, batch in batches.items():
        when(batch, jobs[node], BlockPhase.RUNNING)
    cluster.update_node("n2", "DOWN")
    assert when(batches["n2"], jobs["n2"], BlockPhase.ENDED).reason == "node failed: n2"
    for node in ("n1", "n3"):
        cluster.submit("sleep 100", "--partition=main", "--gres=gpu:1", f"--nodelist={node}")
    assert when(batches["n1"], jobs["n1"], BlockPhase.ENDED).reason == "preempted by Slurm"
    until(lambda: not cluster.job(jobs["n3"]), limit_s=60, what="slurmctld to forget a job")
    assert when(batches["n3"], jobs["n3"], BlockPhase.ENDED).reason == "preempted by Slurm"
    assert batches["n3"].query(["4711"])["4711"].phase is BlockPhase.ENDED


@pytest.mark.long
def test_submission_with_an_unknown_account_is_refused(make_cluster, batch_of):
    cluster = make_cluster(
        Shape(gpus=("a10:1",), accounting=True, settings={"AccountingStorageEnforce": "associations"})
    )
    cluster.run("sacctmgr", "-i", "add", "account", "phys")
    cluster.run("sacctmgr", "-i", "add", "user", cluster.place.user, "account=phys")
    with pytest.raises(SubmissionRefused, match="Invalid account or account/partition combination"):
        batch_of(account="chem").submit(B1)
    until(lambda: _submitted(batch_of(account="phys")), what="slurmctld to hear of the account")


def _submitted(batch: SlurmBatch) -> str:
    try:
        return batch.submit(B2)
    except SubmissionRefused:
        return ""
