from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.config import format_site_toml, load_site, load_sites, read_python_path, read_sites, write_sites
from stoker.errors import ConfigError
from stoker.manager.factory.batches import SUBMIT_COMMANDS, open_batch_system, render_submission
from stoker.manager.factory.pilot_command import build_pilot_command, build_python_path, rounded_walltime_s
from stoker.manager.factory.submitting import job_id_in_sentence, job_id_on_own_line, render_submit_script
from stoker.protocol.session import SessionFolder
from stoker.site import (
    Duration,
    Environment,
    EnvironmentKind,
    Pilot,
    Policy,
    Provider,
    ProviderKind,
    ProvisioningName,
    Session,
    Site,
    Size,
)


def test_folders_inside_the_environment_are_not_passed_to_pilots(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    packages = sysconfig.get_paths()["purelib"]
    vendored = os.path.dirname(pytest.__file__)  # setuptools appends its folder `_vendor`
    monkeypatch.setattr(sys, "path", [str(tmp_path), packages, vendored])
    assert build_python_path() == os.path.realpath(tmp_path)


# ---- scripts


def site(kind: ProviderKind = ProviderKind.SLURM, *, pilot: Pilot | None = None, **provider: object) -> Site:
    return Site(name="lab", provider=Provider(kind=kind, **provider), pilot=pilot or Pilot())  # type: ignore[arg-type]


def head(script: str, mark: str = "#SBATCH") -> list[str]:
    return [line.removeprefix(mark).strip() for line in script.splitlines() if line.startswith(mark)]


def test_sbatch_script_contains_every_setting_of_the_site() -> None:
    wanted = site(
        partition="backfill",
        account="phys-lab",
        qos="low",
        constraint="a10|titanx",
        walltime_s=Duration(3601),
        gpus="a10:2",
        cores=6,
        memory_bytes=Size(4_000_000_000),
        options=("--exclude=n3", "#SBATCH --nice=10"),
        worker_init="module load cuda",
    )
    script = render_submit_script(wanted, job="stoker-k3v9-b7", command="run-a-pilot --block b7")
    assert script.startswith("#!/bin/bash\n")
    assert set(head(script)) == {
        "--job-name=stoker-k3v9-b7",
        "--output=stoker-k3v9-b7.out",
        "--error=stoker-k3v9-b7.err",
        "--open-mode=append",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--time=61",
        "--partition=backfill",
        "--account=phys-lab",
        "--qos=low",
        "--constraint=a10|titanx",
        "--gres=gpu:a10:2",
        "--cpus-per-task=6",
        "--mem=3815M",
        "--exclude=n3",
        "--nice=10",
    }
    assert script.index("module load cuda") < script.index("exec run-a-pilot --block b7")


def test_slurm_script_contains_only_the_settings_of_the_site() -> None:
    asked = head(render_submit_script(site(), job="j", command="c"))
    assert not [line for line in asked if line.startswith(("--exclusive", "--gres", "--mem", "--partition", "--cpus"))]


def test_options_of_the_site_take_precedence() -> None:
    asked = head(render_submit_script(site(gpus="1", options=("--gres=gpu:tesla:4",)), job="j", command="c"))
    assert [line for line in asked if line.startswith("--gres")] == ["--gres=gpu:1", "--gres=gpu:tesla:4"]


def test_value_with_blanks_or_quotes_stays_one_word() -> None:
    asked = head(render_submit_script(site(account='the "big" lab'), job="j", command="c"))
    assert '--account="the \\"big\\" lab"' in asked


def test_script_starts_pilots_on_several_nodes_with_srun() -> None:
    assert render_submit_script(site(), job="j", command="pilot").rstrip().endswith("\nexec pilot")
    step = render_submit_script(site(nodes=3, cores=4), job="j", command="pilot").rstrip().splitlines()[-1]
    assert step.startswith("exec srun --nodes=3 --ntasks=3 --ntasks-per-node=1 --cpus-per-task=4 ")
    assert step.endswith(" pilot")


@pytest.mark.parametrize("name", ["plain", 'quo\'te "s" new\nline', "$HOME `id` \\n 100% é"])
def test_session_folder_with_any_name_reaches_the_pilot(tmp_path: Path, name: str) -> None:
    folder = SessionFolder(tmp_path / name)
    folder.submit.mkdir(parents=True)
    pilot = tmp_path / "pilot"
    pilot.write_text("#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\n")
    pilot.chmod(0o755)
    wanted = Site(name="lab", provider=Provider(kind=ProviderKind.SLURM), environment=Environment(python=str(pilot)))
    script = render_submission(wanted, session="k3v9", folder=folder, block="b7", python_path=f"{tmp_path}/my code")
    said = subprocess.run(["bash"], input=script.encode(), capture_output=True, check=True, cwd=folder.submit).stdout
    words = said.decode().split("\0")
    assert words[words.index("--session") + 1] == str(folder.path)
    assert words[words.index("--block") + 1] == "b7"
    assert words[words.index("--source") + 1] == "lab"
    assert words[words.index("--walltime-s") + 1] == "3600"


def test_command_of_a_local_pilot_has_no_walltime(tmp_path: Path) -> None:
    words = shlex.split(build_pilot_command(Site.default(), folder=SessionFolder(tmp_path), block="0"))
    assert words[words.index("-m") + 1] == "stoker.pilot.main"
    assert "--walltime-s" not in words


def test_walltime_is_written_in_whole_minutes() -> None:
    assert [rounded_walltime_s(site(walltime_s=Duration(s))) for s in (60, 61, 3600)] == [60, 120, 3600]


def test_pbs_script_is_rendered() -> None:
    wanted = site(
        ProviderKind.PBS, queue="gpu", gpus="a100:2", cores=8, nodes=2, memory_bytes=Size(2**30), options=("-r n",)
    )
    script = render_submit_script(wanted, job="stoker-k3v9-b7", command="pilot")
    assert set(head(script, "#PBS")) >= {
        "-N stoker-k3v9-b7",
        "-l walltime=01:00:00",
        "-l select=2:ncpus=8:ngpus=2:gpu_type=a100:mem=1024mb",
        "-o stoker-k3v9-b7.out",
        "-r n",
    }
    assert "exec pbsdsh -- /bin/bash -c" in script


def test_lsf_script_is_rendered() -> None:
    wanted = site(ProviderKind.LSF, queue="gpu", account="p1", gpus="2", cores=4, memory_bytes=Size(2**31))
    script = render_submit_script(wanted, job="stoker-k3v9-b7", command="pilot")
    assert set(head(script, "#BSUB")) >= {
        "-J stoker-k3v9-b7",
        "-W 60",
        "-q gpu",
        "-P p1",
        "-n 4",
        '-R "span[ptile=4]"',
        '-gpu "num=2"',
        "-M 2048MB",
    }
    assert "-nnodes" not in script


def test_grid_engine_script_is_rendered() -> None:
    wanted = site(ProviderKind.GRID_ENGINE, queue="gpu", account="p1", gpus="1", cores=4)
    script = render_submit_script(wanted, job="stoker-k3v9-b7", command="pilot")
    assert set(head(script, "#$")) >= {
        "-N stoker-k3v9-b7",
        "-cwd",
        "-l h_rt=01:00:00",
        "-P p1",
        "-pe smp 4",
        "-l gpu=1",
    }


def test_grid_engine_has_no_blocks_of_several_nodes() -> None:
    with pytest.raises(ConfigError, match="raise max_blocks"):
        render_submit_script(site(ProviderKind.GRID_ENGINE, nodes=2), job="j", command="c")


@pytest.mark.parametrize("kind", [ProviderKind.SLURM, ProviderKind.PBS, ProviderKind.LSF, ProviderKind.GRID_ENGINE])
def test_script_is_rendered_on_a_host_without_batch_commands(
    kind: ProviderKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "exec pilot" in render_submit_script(site(kind), job="j", command="pilot")


def test_jobs_without_file_transfer_require_a_shared_file_system(tmp_path: Path) -> None:
    wanted = Site(
        name="lab",
        provider=Provider(kind=ProviderKind.SLURM, shared_files=False),
        environment=Environment(kind=Environment().kind.PACKED),
    )
    with pytest.raises(ConfigError, match="shared_files"):
        render_submission(wanted, session="k3v9", folder=SessionFolder(tmp_path))


SYSTEMS = {
    ProviderKind.LOCAL: "LocalBatch",
    ProviderKind.SLURM: "SlurmBatch",
    ProviderKind.CONDOR: "CondorBatch",
    ProviderKind.PBS: "ListingBatchSystem",
    ProviderKind.LSF: "ListingBatchSystem",
    ProviderKind.GRID_ENGINE: "ListingBatchSystem",
    ProviderKind.KUBERNETES: "KubernetesBatch",
}


@pytest.mark.parametrize("kind", list(ProviderKind))
def test_every_provider_kind_has_its_own_batch_system(
    kind: ProviderKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for command in {*SUBMIT_COMMANDS.values(), "kubectl"}:
        (tools / command).write_text("#!/bin/sh\n")
        (tools / command).chmod(0o755)
    (tmp_path / "session").mkdir()
    wanted = site(kind, image="lab/stoker" if kind is ProviderKind.KUBERNETES else "")
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    # Parsl's class cannot be created without the Kubernetes package.
    monkeypatch.setattr(
        "stoker.manager.factory.kubernetes.KubernetesProvider", lambda **_settings: SimpleNamespace(kube_client=None)
    )
    made = open_batch_system(wanted, session="k3v9", folder=SessionFolder(tmp_path / "session"))
    assert type(made).__name__ == SYSTEMS[kind]


# ---- job ids


SLURM, PBS, LSF, SGE = ProviderKind.SLURM, ProviderKind.PBS, ProviderKind.LSF, ProviderKind.GRID_ENGINE


@pytest.mark.parametrize(
    ("kind", "text", "id"),
    [
        (SLURM, "Welcome!\nSubmitted batch job 12 on cluster blue\n2026\n", "12"),
        (SLURM, "sbatch: lua: Submitted batch job 12\r\nbye\n", "12"),
        (SLURM, "Submitted batch job 12\nSubmitted batch job 13\n", ""),
        (SGE, 'budget ok\nYour job 303 ("stoker-k3v9-b0") has been submitted\n', "303"),
        (SGE, 'Your job-array 303.1-10:1 ("stoker-k3v9-b0") has been submitted\n', "303"),
        (LSF, "hello\nJob <201> is submitted to queue <gpu>.\nbye 12\n", "201"),
        (LSF, "Job <201> is submitted to default queue <normal>.\n", "201"),
        (LSF, "201\n", ""),
        (PBS, "11.head\n", ""),
    ],
)
def test_job_id_is_found_anywhere_in_a_sentence(kind: ProviderKind, text: str, id: str) -> None:
    assert job_id_in_sentence(kind, text) == id


@pytest.mark.parametrize(
    ("kind", "text", "id"),
    [
        (PBS, "checking your budget ... OK\n11.head.site.org\nhave a nice day\n", "11.head.site.org"),
        (PBS, "11[].head\n", "11[].head"),
        (PBS, "\x1b[32m11.head\x1b[0m\r\n", "11.head"),
        (PBS, "11.head\n12.head\n", ""),
        (PBS, "version 2.3\n", ""),
        (SGE, "qsub: checking your project budget ... OK\n101\n", "101"),
        (SGE, "101.1-10:1\n", "101"),
        (SGE, "2026\n101\n", ""),
        (SGE, "budget ok\n", ""),
        (SLURM, "12;blue\n", "12"),
        (LSF, "201\n", ""),
    ],
)
def test_line_is_a_job_id_only_if_it_contains_nothing_else(kind: ProviderKind, text: str, id: str) -> None:
    assert job_id_on_own_line(kind, text) == id


# ---- site files


FULL = Site(
    name="big-lab",
    provider=Provider(
        kind=ProviderKind.SLURM,
        partition="back\\fill",
        account='the "big" lab',
        walltime_s=Duration(5400.5),
        gpus="a10:2",
        memory_bytes=Size(7_500_000_001),
        options=("--nice=1", "--comment='é\U0001f600'"),
        worker_init="module load x\nexport A='b'\t# c",
    ),
    pilot=Pilot(scratch="$TMPDIR", max_blocks=9),
    session=Session(lease_s=Duration(90), interface="ib0"),
    policy=Policy(provisioning=ProvisioningName.DEMAND),
    environment=Environment(kind=EnvironmentKind.PACKED, python="python3"),
)


def test_written_site_file_reads_back_unchanged(tmp_path: Path) -> None:
    write_sites(tmp_path / "sites", [FULL, Site.default()], python_path="/a:/b c")
    assert read_sites(tmp_path / "sites") == {"big-lab": FULL, "local": Site.default()}
    assert read_python_path(tmp_path / "sites") == "/a:/b c"


def test_every_shipped_site_file_survives_a_round_trip(tmp_path: Path) -> None:
    files = sorted((Path(__file__).parents[2] / "site-configs").glob("*.toml"))
    assert files
    for file in files:
        site = load_site(file)
        (tmp_path / "copy.toml").write_text(format_site_toml(site))
        again = load_site(tmp_path / "copy.toml")
        assert format_site_toml(again) == format_site_toml(site)


def test_two_sites_with_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('name = "a"\nsites = ["b.toml"]\n')
    (tmp_path / "b.toml").write_text('name = "a"\n')
    with pytest.raises(ConfigError, match="two sites of the session are called a"):
        load_sites(tmp_path / "a.toml")
