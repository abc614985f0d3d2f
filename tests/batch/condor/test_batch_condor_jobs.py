from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from batch.condor.machines import machine
from driver import machine as standin
from faults.world import until
from polling import PATIENCE_S, polls

from stoker.config import parse_site
from stoker.manager.cli import surroundings
from stoker.manager.factory import condor, condor_description
from stoker.manager.factory.batch import BatchJobStatus, BatchSystemError, SubmissionRefused
from stoker.manager.factory.condor import CondorBatch
from stoker.pilot.devices import cpu, gpu
from stoker.protocol.blocks import AllowedNodes, BlockPhase, LossReason
from stoker.protocol.ids import BlockId

if TYPE_CHECKING:
    from batch.condor.pool import Pool

PENDING, RUNNING, ENDED = BlockPhase.PENDING, BlockPhase.RUNNING, BlockPhase.ENDED
B7 = BlockId("b7")
SITE = """
name = "pool"
[pilot]
cache_size = "1 GB"
[provider]
kind = "condor"
"""
SLEEP = "sleep 300"


@pytest.fixture
def submit(tmp_path: Path) -> Callable[..., CondorBatch]:
    def make(
        settings: str = "", *, command: str = SLEEP, session: str = "k3v9", held_s: float = 120.0, **more: Any
    ) -> CondorBatch:
        folder = tmp_path / 'it\'s, a "session"' / "submit"
        folder.mkdir(parents=True, exist_ok=True)
        site = parse_site(SITE + settings, file="pool.toml")
        return CondorBatch(site, session=session, folder=folder, command=lambda _: command, held_s=held_s, **more)

    return make


@pytest.fixture
def own_pool(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool(machine("n1"))


def look(batch: CondorBatch, job: str) -> BatchJobStatus:
    return batch.query([job])[job]


def seen(batch: CondorBatch, job: str, phase: BlockPhase) -> str:
    for more in polls(PATIENCE_S, longest_s=0.1):
        last = batch.query([job]).get(job)
        if last is not None and last.phase is phase:
            return last.reason
        assert more, f"{job} is {last}, not {phase}"
    raise AssertionError


def output(tmp_path: Path, suffix: str = ".out") -> str:
    return next(tmp_path.glob(f"*/submit/stoker-k3v9-b7{suffix}")).read_text()


def test_condor_job_ends_when_it_is_cancelled_or_exits(pool: Pool, submit: Callable[..., CondorBatch]) -> None:
    batch = submit('gpus = "h100:1"', command="true")
    job = batch.submit(B7)
    assert seen(batch, job, PENDING).startswith("idle")
    assert batch.find() == {job: B7}
    batch.cancel([job])
    assert seen(batch, job, ENDED).startswith("removed via condor_rm (by user ")
    assert batch.find() == {}

    batch = submit(command="true")
    job = batch.submit(B7)
    assert seen(batch, job, ENDED) == "exit code 0"


def test_failed_job_reports_its_last_output(pool: Pool, submit: Callable[..., CondorBatch]) -> None:
    batch = submit(command="sh -c 'echo fine; echo oh no >&2; echo no Python here >&2; exit 3'")
    job = batch.submit(B7)
    assert seen(batch, job, ENDED) == "exit code 3: oh no; no Python here"
    batch = submit(command="sh -c 'kill -9 $$'")
    job = batch.submit(BlockId("b8"))
    assert seen(batch, job, ENDED) == "killed by signal 9 (SIGKILL)"


def test_condor_job_gets_the_requested_gpus(pool: Pool, submit: Callable[..., CondorBatch], tmp_path: Path) -> None:
    batch = submit('gpus = "titan-x:1"\ncores = 3', command="env")
    seen(batch, batch.submit(B7), ENDED)
    environ = dict(line.split("=", 1) for line in output(tmp_path).splitlines() if "=" in line)
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-cccc0003"
    assert environ["_CONDOR_SLOT"].startswith("slot1")
    assert environ["HOME"]
    assert "/usr/bin" in environ["PATH"]
    assert environ["TMPDIR"] == environ["_CONDOR_SCRATCH_DIR"]


def test_pilot_finds_gpus_by_the_uuids_that_htcondor_grants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = ("GPU-aaaa0001-1d6b", "GPU-bbbb0002-77aa")
    monkeypatch.setenv("STANDIN_NVML", str(standin.Machine(tmp_path, *({"uuid": uuid} for uuid in there)).file))
    nvml = standin.load()
    granted = {"GPU-bbbb0002": ["GPU-bbbb0002-77aa"], "GPU-bbbb0002,GPU-aaaa0001": list(there)[::-1], "10000": []}
    for value, expected in granted.items():
        found = gpu.find_gpus({"CUDA_VISIBLE_DEVICES": value}, nvml=nvml)
        assert [device.uuid for device in found.offered] == expected
        assert bool(found.lacks) is not bool(expected)


def test_pilot_uses_only_the_cores_and_memory_of_its_slot(tmp_path: Path) -> None:
    ad = tmp_path / ".machine.ad"
    ad.write_text('Name = "slot1_1@n1"\nCpus = 1\nTotalCpus = 64.0\nTotalMemory = 9999999\nMemory = 100\n')
    environ = {"_CONDOR_MACHINE_AD": str(ad)}
    assert len(cpu.find_usable_cores(environ)) == 1
    assert cpu.usable_memory_bytes(environ) == 100 * 2**20
    ad.unlink()
    assert cpu.find_usable_cores(environ) == cpu.find_usable_cores({})
    assert cpu.usable_memory_bytes(environ) == cpu.usable_memory_bytes({})


def test_pilots_in_neighbouring_slots_share_no_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    (tmp_path / "ad").write_text("Cpus = 3\n")
    slots = [{"_CONDOR_MACHINE_AD": str(tmp_path / "ad"), "_CONDOR_SLOT": f"slot1_{number}"} for number in (1, 2, 3)]
    assert [cpu.find_usable_cores(environ) for environ in slots] == [(0, 1, 2), (3, 4, 5), (0, 6, 7)]


def test_evicted_job_counts_as_ended_and_is_removed_from_the_queue(
    pool: Pool, submit: Callable[..., CondorBatch]
) -> None:
    batch = submit()
    job = batch.submit(B7)
    seen(batch, job, RUNNING)
    pool.evict(job)
    assert re.fullmatch(
        r"preempted from slot1_\d+@n\d@?: PREEMPT expression evaluated to True", seen(batch, job, ENDED)
    )
    pool.wait(job, 3)


def test_slots_are_found_if_startd_ads_describe_daemons(pool: Pool) -> None:
    found = surroundings.parse_condor_nodes(pool.run(*surroundings._CONDOR_NODES_COMMAND).stdout)
    assert sorted((node.cores, node.memory_bytes, node.gpus) for node in found) == [
        (8, 32_000 * 1024**2, gpus) for gpus in (0, 0, 1, 2)
    ]
    assert {node.user_domain for node in found} == {pool.run("condor_config_val", "UID_DOMAIN").stdout.strip()}


def test_pool_without_a_negotiator_is_reported(
    make_pool: Callable[..., Pool], submit: Callable[..., CondorBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(machine("n1"), match_s=9999)
    monkeypatch.setattr(condor, "_NEGOTIATION_WAIT_S", 0.0)
    batch = submit()
    job = batch.submit(B7)
    assert look(batch, job).reason == "idle", "the pool has a negotiator, which takes its time"
    (pool.folder / "no-negotiator").touch()
    assert look(submit(), job).reason == "idle; the pool has no negotiator at the moment, so no job starts"


@pytest.mark.long
def test_lost_machine_keeps_its_job_until_the_lease_ends(own_pool: Pool, submit: Callable[..., CondorBatch]) -> None:
    pool, batch = own_pool, submit("options = ['job_lease_duration = 20']")
    job = batch.submit(B7)
    seen(batch, job, RUNNING)
    pool.crash("n1")
    assert look(batch, job).phase is RUNNING
    assert "JobLeaseDuration (20 seconds) expired" in seen(batch, job, ENDED)


def test_pilot_process_itself_receives_the_termination_signal(
    pool: Pool, submit: Callable[..., CondorBatch], tmp_path: Path
) -> None:
    said = tmp_path / "said"
    (tmp_path / "job.sh").write_text(
        f"trap 'echo gone in peace >> {said}; exit 0' TERM; echo here > {said}; sleep 300 & wait"
    )
    batch = submit(command=f"bash {tmp_path}/job.sh")
    job = batch.submit(B7)
    seen(batch, job, RUNNING)
    until(said.exists, why="the job sets its trap")
    processes = pool.processes(job)
    batch.cancel([job])
    seen(batch, job, ENDED)
    assert said.read_text() == "here\ngone in peace\n"
    assert not [process for process in processes if process.is_running() and process.status() != "zombie"]


def test_held_job_shows_its_reason_and_is_removed_at_a_limit(pool: Pool, submit: Callable[..., CondorBatch]) -> None:
    why = "Job has gone over cgroup memory limit of 128 megabytes."
    batch = submit()
    job = batch.submit(B7)
    seen(batch, job, RUNNING)
    pool.hold(job, why, code=34)
    held = look(batch, job)
    assert (held.phase, held.reason, held.loss) == (PENDING, f"held: {why}", LossReason.OUT_OF_MEMORY)
    pool.release(job)
    seen(batch, job, RUNNING)
    pool.hold(job, why, code=34, held_for_s=200)
    held = look(batch, job)
    assert (held.phase, held.reason, held.loss) == (ENDED, f"held: {why}", LossReason.OUT_OF_MEMORY)
    pool.wait(job, 3)
    assert seen(batch, job, ENDED) == f"held by HTCondor: {why}"


def test_input_files_arrive_and_only_output_is_returned(
    pool: Pool, submit: Callable[..., CondorBatch], tmp_path: Path
) -> None:
    home = tmp_path / 'it\'s, a "session"'
    (home / "keys").mkdir(parents=True)
    (home / "session.json").write_text("{}")
    (home / "keys" / "pilot.json").write_text("secret")
    files = [home / "session.json", home / "keys" / "pilot.json"]
    batch = submit(
        "shared_files = false\n[environment]\nkind = 'packed'",
        command="sh -c 'ls; cat pilot.json; touch cache'",
        files=files,
    )
    assert seen(batch, batch.submit(B7), ENDED) == "exit code 0"
    assert {"session.json", "pilot.json"} <= set(output(tmp_path).split())
    assert output(tmp_path).endswith("secret")
    assert not list(home.rglob("cache"))


def test_walltime_ends_a_job(pool: Pool, submit: Callable[..., CondorBatch]) -> None:
    if pool.is_real:
        pytest.skip("HTCondor's shadow counts in its own ad, which no command changes: this would take a minute")
    batch = submit('walltime = "2 min"')
    job = batch.submit(B7)
    seen(batch, job, RUNNING)
    ad = pool.ad(job)
    pool.change(job, **{name: ad[name] - 121 for name in ("JobCurrentStartDate", "JobCurrentStartExecutingDate")})
    assert seen(batch, job, ENDED) == "out of walltime (2 min)"


def test_cancel_accepts_finished_and_unknown_jobs(pool: Pool, submit: Callable[..., CondorBatch]) -> None:
    batch = submit(command="true")
    done = batch.submit(B7)
    seen(batch, done, ENDED)
    batch.cancel([done, "999.0"])
    batch = submit()
    job = batch.submit(BlockId("b8"))
    batch.cancel([done, job, "999.0"])
    batch.cancel([job])
    assert "removed" in seen(batch, job, ENDED)
    batch.cancel([])


def test_cancelled_job_of_a_lost_machine_is_removed_by_force(
    own_pool: Pool, submit: Callable[..., CondorBatch]
) -> None:
    pool, batch = own_pool, submit()
    job = batch.submit(B7)
    seen(batch, job, RUNNING)
    pool.lose("n1")
    batch.cancel([job])
    assert look(batch, job) == BatchJobStatus(RUNNING, "is being removed", is_being_cancelled=True)
    assert batch.find() == {job: B7}, "the job has not ended yet"
    pool.change(job, EnteredCurrentStatus=pool.ad(job)["EnteredCurrentStatus"] - 200)
    assert "does not answer" in look(batch, job).reason
    assert job not in pool.queued()


def test_jobs_are_found_again_after_an_outage_of_the_schedd(own_pool: Pool, submit: Callable[..., CondorBatch]) -> None:
    pool, batch = own_pool, submit()
    job = batch.submit(B7)
    seen(batch, job, RUNNING)
    pool.stop_schedd()
    with pytest.raises(BatchSystemError, match=r"condor_q: .*Failed to connect to"):
        batch.query([job])
    with pytest.raises(BatchSystemError, match="Failed to connect to local queue manager"):
        batch.submit(BlockId("b8"))
    with pytest.raises(BatchSystemError, match=r"condor_rm: .*Failed to connect to schedd"):
        batch.cancel([job])
    with pytest.raises(BatchSystemError, match="condor_q"):
        batch.find()
    pool.start_schedd()
    assert look(batch, job).phase is RUNNING
    assert batch.find() == {job: B7}
    pool.evict(job)
    assert seen(batch, job, ENDED).startswith("preempted from slot1_1@n1")


def test_bad_requirement_is_refused_with_the_message_of_condor(pool: Pool, submit: Callable[..., CondorBatch]) -> None:
    batch = submit('requirements = "Memory > && 3"')
    with pytest.raises(SubmissionRefused, match=r"(?i)requirements"):
        batch.submit(B7)
    assert pool.queued() == []


def test_condor_requirements_select_the_machine(pool: Pool, submit: Callable[..., CondorBatch]) -> None:
    batch = submit("requirements = 'TARGET.HasScratch'", command="true")
    job = batch.submit(B7)
    seen(batch, job, ENDED)
    assert pool.ad(job)["LastRemoteHost"].rstrip("@").endswith("@n3")
    batch = submit("requirements = 'TARGET.HasTape'", command="true")
    job = batch.submit(BlockId("b8"))
    why = "idle: no match found; of 4 slots 4 are ruled out by the job's requirements: none meets TARGET.HasTape"
    until(lambda: look(batch, job).reason == why, why="the analysis")


def test_jobs_avoid_excluded_machines_and_can_require_a_machine(pool: Pool, submit: Callable[..., CondorBatch]) -> None:
    batch = submit("requirements = 'TARGET.Arch == \"X86_64\"'", command="true")
    for block, allowed, there in (
        ("b1", AllowedNodes(exclude=("n1", "n2", "n4")), "n3"),
        ("b2", AllowedNodes(only="n2"), "n2"),
    ):
        job = batch.submit(BlockId(block), allowed)
        seen(batch, job, ENDED)
        assert pool.ad(job)["LastRemoteHost"].rstrip("@").endswith(f"@{there}")
    job = batch.submit(B7, AllowedNodes(exclude=("n1", "n2", "n3", "n4")))
    until(lambda: look(batch, job).no_node, why="no machine is left")


def test_mistyped_setting_is_reported_while_the_job_waits(pool: Pool, submit: Callable[..., CondorBatch]) -> None:
    batch = submit("gpus = \"h100:1\"\noptions = ['reqest_memory = 5 TB', '+Fine = 3', 'request_cpus = 2']")
    job = batch.submit(B7)
    warned = "condor_submit warned: the line 'reqest_memory = 5 TB' was unused by condor_submit. Is it a typo?"
    reason = seen(batch, job, PENDING)
    assert reason.endswith(warned)
    assert reason.count("unused") == 1
    other = batch.submit(BlockId("b8"))
    looks = batch.query([job, other])
    assert ["unused" in looks[each].reason for each in (job, other)] == [True, False], "the warning is reported once"


def test_dry_run_shows_the_submitted_description(
    pool: Pool, submit: Callable[..., CondorBatch], tmp_path: Path
) -> None:
    settings = "gpus = \"a10:1\"\nworker_init = 'echo begun'"
    submit(settings, command="true").submit(B7)
    site = parse_site(SITE + settings, file="pool.toml")
    shown = condor_description.render_description_and_script(site, session="k3v9", block="b7", command="true")
    for suffix in (".sub", ".sh"):
        assert output(tmp_path, suffix) in shown


def test_second_factory_finds_the_jobs_of_its_session_and_site(pool: Pool, submit: Callable[..., CondorBatch]) -> None:
    jobs = {submit().submit(BlockId(block)): block for block in ("b1", "b2")}
    submit(session="zzzz").submit(B7)
    assert submit().find() == jobs
    other = submit().query(list(jobs))
    assert set(other) == set(jobs)


def test_missing_condor_commands_raise_batch_trouble(
    submit: Callable[..., CondorBatch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    batch = submit()
    with pytest.raises(BatchSystemError, match="condor_q"):
        batch.find()


def test_pool_without_history_still_reports_the_end_of_a_job(
    own_pool: Pool, submit: Callable[..., CondorBatch]
) -> None:
    (own_pool.bin / "condor_history").write_text(
        "#!/bin/sh\necho '['\necho 'Error: No passed search file and configuration key HISTORY is unset.' >&2\nexit 1\n"
    )
    batch = submit(command="true")
    job = batch.submit(B7)
    assert re.search("exit code 0|does not list the job", seen(batch, job, ENDED)), (
        "the job may be listed before it leaves the queue"
    )


def test_condor_history_is_not_queried_again_after_a_timeout(
    own_pool: Pool, submit: Callable[..., CondorBatch], tmp_path: Path
) -> None:
    (own_pool.bin / "condor_history").write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\nexec sleep 300\n")
    batch = submit("command_limit = '3 s'")
    assert look(batch, "999.0").is_unlisted
    assert look(batch, "999.0").is_unlisted
    assert (tmp_path / "asked").read_text() == "asked\n"
