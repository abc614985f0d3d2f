"""Test submit scripts that exclude or probe nodes, and the answers of Slurm and HTCondor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from factory.fake_slurm import FakeSlurm
from factory.manager_end import ManagerEnd
from factory.test_factory_keeper import B0, KeeperHarness
from factory.toy_batch import ToyBatch

from stoker.manager.factory import condor_ads, condor_description
from stoker.manager.factory.allowed_nodes import restrict_to_allowed_nodes
from stoker.manager.factory.batch import NoNodeForJob, SubmissionRefused
from stoker.manager.factory.factory import BatchJobFactory
from stoker.manager.factory.slurm import SlurmBatch
from stoker.manager.factory.submitting import render_submit_script
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase, KnownBlock
from stoker.protocol.ids import BlockId
from stoker.protocol.to_manager import BlockUpdate
from stoker.site import Duration, Provider, ProviderKind, Site, Size

AWAY = AllowedNodes(exclude=("n2", "n7"))
PROBE = AllowedNodes(only="n2")


def site(kind: ProviderKind = ProviderKind.SLURM, **provider: object) -> Site:
    return Site(name="lab", provider=Provider(kind=kind, **provider))  # type: ignore[arg-type]


def asked(site: Site, option: str) -> list[str]:
    """Return the lines of a submit script with an option, in order."""
    script = render_submit_script(site, job="j", command="run-a-pilot")
    head = [line.removeprefix("#SBATCH ").strip() for line in script.splitlines() if line.startswith("#SBATCH")]
    return [line for line in head if line.startswith(option)]


@pytest.mark.parametrize(
    ("options", "all_of_them"),
    [
        ((), "n2,n7"),
        (("--exclude=n3",), "n3,n2,n7"),
        (("--mem=3G --exclude n3,n[10-12]",), "n3,n[10-12],n2,n7"),
        (("#SBATCH -x n3",), "n3,n2,n7"),
        (("-xn3", "--exclude=n4"), "n4,n2,n7"),
        (("--exclud=n7",), "n7,n2"),
        (("--exclusive", "# --exclude=n3", "##SBATCH --exclude=n3"), "n2,n7"),
    ],
)
def test_slurm_gets_the_excluded_nodes_of_the_site_and_of_stoker(options: tuple[str, ...], all_of_them: str) -> None:
    there = site(options=options)
    assert asked(restrict_to_allowed_nodes(there, AWAY), "--exclude=")[-1] == f"--exclude={all_of_them}"
    assert asked(restrict_to_allowed_nodes(there, AllowedNodes()), "--exclude=n2") == []


def test_excluded_nodes_in_a_file_of_the_site_are_merged(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("n3\nn[4,5],n6\n")
    assert (
        asked(restrict_to_allowed_nodes(site(options=(f"--exclude={file}",)), AWAY), "--exclude=")[-1]
        == "--exclude=n3,n[4,5],n6,n2,n7"
    )
    missing = site(options=("--exclude=./none",))
    assert restrict_to_allowed_nodes(missing, AWAY) == missing


def test_options_in_worker_init_count_too() -> None:
    init = "# ours\n#SBATCH --exclude=n3\n\nmodule load cuda\n#SBATCH --exclude=n9\n"
    script = render_submit_script(
        restrict_to_allowed_nodes(site(worker_init=init), AWAY), job="j", command="run-a-pilot"
    )
    effective = script[: script.index("module load cuda")]
    assert [line for line in effective.splitlines() if "--exclude" in line][-1] == "#SBATCH --exclude=n3,n2,n7"
    assert script.count("module load cuda") == 1


def test_slurm_probe_is_one_minute_on_one_node_only() -> None:
    wide = site(
        nodes=4, gpus="a10:2", walltime_s=Duration(7200), memory_bytes=Size(4 << 30),
        options=("--time=02:00:00", "--nodelist=n[1-8]", "--array=0-3", "--exclusive"),
    )  # fmt: skip
    probe = restrict_to_allowed_nodes(wide, PROBE)
    assert [asked(probe, option)[-1] for option in ("--time", "--nodes", "--nodelist", "--array")] == [
        "--time=1", "--nodes=1", "--nodelist=n2", "--array=0",
    ]  # fmt: skip
    assert asked(probe, "--gres") == ["--gres=gpu:a10:2"]
    assert "srun" not in render_submit_script(probe, job="j", command="run-a-pilot")


@pytest.mark.parametrize(
    ("provider", "requirements"),
    [
        ({}, '(TARGET.Machine != "n2") && (TARGET.Machine != "n7")'),
        (
            {"requirements": 'HasScratch || Arch == "X86_64"'},
            '(HasScratch || Arch == "X86_64") && (TARGET.Machine != "n2") && (TARGET.Machine != "n7")',
        ),
        (
            {"requirements": "Old", "options": ("Requirements = HasScratch", "+Lab = 1")},
            '(HasScratch) && (TARGET.Machine != "n2") && (TARGET.Machine != "n7")',
        ),
    ],
)
def test_condor_gets_the_requirements_of_the_site_and_of_stoker(provider: dict[str, object], requirements: str) -> None:
    text = condor_description.render_description(
        restrict_to_allowed_nodes(site(ProviderKind.CONDOR, **provider), AWAY), session="k3v9", block="b7"
    )
    given = [line for line in text.splitlines() if line.lower().startswith("requirements")]
    assert given == [f"requirements = {requirements}"]
    assert ("+Lab = 1" in text) is ("options" in provider)


def test_condor_probe_runs_for_a_minute_on_one_machine() -> None:
    pool = site(ProviderKind.CONDOR, requirements="HasScratch", walltime_s=Duration(7200))
    text = condor_description.render_description(restrict_to_allowed_nodes(pool, PROBE), session="k3v9", block="b7")
    assert 'requirements = (HasScratch) && (TARGET.Machine == "n2")' in text
    assert "+StokerWalltime = 60\n" in text
    assert "> 60)" in text


def test_other_batch_systems_get_no_node_options() -> None:
    pbs = site(ProviderKind.PBS)
    assert restrict_to_allowed_nodes(pbs, AWAY) == pbs


# ---- answers


B7 = BlockId("b7")


@pytest.fixture
def batch(slurm: FakeSlurm, tmp_path: Path) -> SlurmBatch:
    there = site(command_limit_s=Duration(60), options=("--exclude=n3",))
    return SlurmBatch(there, session="k3v9", folder=tmp_path, command=lambda block: f"echo {block}")


def test_submitted_script_excludes_the_nodes(batch: SlurmBatch, slurm: FakeSlurm, tmp_path: Path) -> None:
    batch.submit(B7, AWAY)
    assert "#SBATCH --exclude=n3,n2,n7\n" in (tmp_path / "stoker-k3v9-b7.sh").read_text()
    batch.submit(BlockId("b8"))
    assert "n7" not in (tmp_path / "stoker-k3v9-b8.sh").read_text()


@pytest.mark.parametrize("why", ["Requested node configuration is not available", "Invalid node name specified"])
def test_unknown_node_error_of_slurm_is_recognized(batch: SlurmBatch, slurm: FakeSlurm, why: str) -> None:
    slurm.fault("sbatch", code=1, err=f"sbatch: error: Batch job submission failed: {why}")
    with pytest.raises(NoNodeForJob, match=why):
        batch.submit(B7, AWAY)
    slurm.fault("sbatch", code=1, err="sbatch: error: Batch job submission failed: Invalid partition name specified")
    with pytest.raises(SubmissionRefused) as caught:
        batch.submit(B7, AWAY)
    assert not isinstance(caught.value, NoNodeForJob)


@pytest.mark.parametrize(
    ("reason", "no_node"),
    [
        ("ReqNodeNotAvail, UnavailableNodes:n[2,4]", True),
        ("BadConstraints", True),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", True),
        ("Resources", False),
        ("Priority", False),
    ],
)
def test_pending_job_reports_that_no_node_is_left(
    batch: SlurmBatch, slurm: FakeSlurm, reason: str, no_node: bool
) -> None:
    job = batch.submit(B7, AWAY)
    slurm.put(job, reason=reason)
    assert batch.query([job])[job].no_node is no_node


@pytest.mark.parametrize(
    ("analysis", "none"),
    [
        ("of 4 slots 4 are ruled out by the job's requirements: none meets Machine != n2", True),
        ("of 14 slots 4 are ruled out by the job's requirements, 10 would suit, but are taken", False),
        ("", False),
    ],
)
def test_condor_analysis_reports_that_no_slot_is_left(analysis: str, none: bool) -> None:
    assert condor_ads.is_every_slot_excluded(analysis) is none


class ChoosyBatch(ToyBatch):
    """A batch system that can choose nodes, and may have no node left."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[AllowedNodes] = []
        self.is_full = False

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:
        self.allowed.append(allowed)
        if self.is_full:
            raise NoNodeForJob("Requested node configuration is not available")
        return super().submit(block)


@pytest.fixture
def choosy() -> KeeperHarness:
    desk = KeeperHarness()
    desk.batch = ChoosyBatch()
    desk.another()
    return desk


def test_keeper_submits_a_block_to_the_ordered_nodes(choosy: KeeperHarness) -> None:
    choosy.keeper.add_ordered_blocks([B0], AWAY)
    choosy.settle()
    assert choosy.batch.allowed == [AWAY]  # type: ignore[attr-defined]
    choosy.keeper.match_manager_blocks([KnownBlock(BlockId("b9"), "lab", BlockPhase.ASKED, allowed=PROBE)])
    choosy.settle()
    assert choosy.batch.allowed == [AWAY, PROBE]  # type: ignore[attr-defined]


def test_keeper_reports_that_no_node_is_left(choosy: KeeperHarness) -> None:
    choosy.batch.is_full = True  # type: ignore[attr-defined]
    choosy.keeper.add_ordered_blocks([B0], AWAY)
    why = "Requested node configuration is not available"
    assert choosy.settle() == [BlockUpdate(B0, BlockPhase.REFUSED, reason=why, no_node=True)]


def test_keeper_reports_a_pending_job_without_a_node(choosy: KeeperHarness) -> None:
    choosy.keeper.add_ordered_blocks([B0], AWAY)
    choosy.settle()
    [update] = choosy.see(10, BlockPhase.PENDING, "ReqNodeNotAvail", no_node=True)
    assert isinstance(update, BlockUpdate)
    assert update.no_node


def test_batch_system_without_node_choice_gets_the_block() -> None:
    desk = KeeperHarness()
    desk.keeper.add_ordered_blocks([B0], AWAY)
    desk.settle()
    assert desk.batch.submitted == [B0]


def test_factory_logs_which_source_cannot_exclude_nodes(manager: ManagerEnd, caplog: pytest.LogCaptureFixture) -> None:
    named = {"old": site(ProviderKind.PBS), "new": site()}
    with caplog.at_level("INFO", logger="stoker.factory"):
        BatchJobFactory(manager.folder, sites=named, parent=os.getppid()).close()
    said = [text for text in caplog.messages if "excludes no failed nodes" in text]
    assert said == [
        "source old: Stoker excludes no failed nodes for PBS jobs: a new block may start on such a node again"
    ]
