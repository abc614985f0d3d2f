from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

import pytest
from fake_manager import FakeManager, recipe

from stoker.pilot.agent import observing
from stoker.protocol.to_manager import WalltimeUpdate

NOW = 1_800_000_000.0

AD = f"""\
ClusterId = 7
JobCurrentStartDate = {NOW - 100:.0f}
StokerWalltime = 3600
Cmd = "/home/ana/run.sh"
Requirements = (TARGET.Arch == "X86_64")
"""


def command(folder: Path, name: str, text: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def in_seconds(seconds: float) -> str:
    """Return a local time in the format of Slurm."""
    return datetime.fromtimestamp(time.time() + seconds).isoformat(timespec="seconds")


@pytest.mark.parametrize(
    ("environ", "ad", "left_s"),
    [
        ({}, "", observing.UNKNOWN_END),
        ({"SLURM_JOB_END_TIME": f"{NOW + 60:.0f}"}, "", 60),
        ({"SLURM_JOB_END_TIME": f"{NOW - 60:.0f}"}, "", 0),
        ({"SLURM_JOB_END_TIME": "soon"}, "", observing.UNKNOWN_END),
        ({"_CONDOR_JOB_AD": "job.ad"}, AD, 3500),
        ({"_CONDOR_JOB_AD": "job.ad"}, AD + "AllowedExecuteDuration = 1000\n", 900),
        ({"_CONDOR_JOB_AD": "job.ad"}, "ClusterId = 7\n", observing.UNKNOWN_END),
        ({"_CONDOR_JOB_AD": "none.ad"}, "", observing.UNKNOWN_END),
    ],
)
def test_walltime_is_read_from_the_environment_and_htcondor_ads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], ad: str, left_s: float
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.ad").write_text(ad)
    assert observing.read_seconds_until_job_end(environ, now=NOW) == left_s


def test_node_has_the_name_that_its_batch_system_uses(tmp_path: Path) -> None:
    ad = tmp_path / "machine.ad"
    ad.write_text('MyType = "Machine"\nMachine = "n3.pool"\nTotalGPUs = 1\n')
    assert observing.batch_system_node_name({"SLURMD_NODENAME": "n2", "_CONDOR_MACHINE_AD": str(ad)}) == "n2"
    assert observing.batch_system_node_name({"_CONDOR_MACHINE_AD": str(ad)}) == "n3.pool"
    assert observing.batch_system_node_name({"_CONDOR_MACHINE_AD": str(tmp_path / "none")}) == ""
    assert observing.batch_system_node_name({}) == ""


@pytest.mark.parametrize(
    ("ahead_s", "left_s"),
    [
        pytest.param(7200.0, 3590.0, id="ahead: it looks as if the job were over"),
        pytest.param(-7200.0, 3600.0, id="behind: it looks as if the job had not begun"),
        pytest.param(60.0, 3440.0, id="a little ahead"),
    ],
)
def test_htcondor_ad_of_another_clock_gives_a_plausible_walltime(tmp_path: Path, ahead_s: float, left_s: float) -> None:
    ad, now = tmp_path / "job.ad", NOW + ahead_s
    ad.write_text(AD)
    os.utime(ad, (now - 10, now - 10))
    assert observing.read_seconds_until_job_end({"_CONDOR_JOB_AD": str(ad)}, now=now) == left_s


ARRAY = {"SLURM_JOB_ID": "88", "SLURM_ARRAY_JOB_ID": "88", "SLURM_ARRAY_TASK_ID": "2"}
"""The job id may name the whole array, for which squeue shows every task."""


@pytest.mark.parametrize(
    ("name", "environ", "text", "expected"),
    [
        ("squeue", {"SLURM_JOB_ID": "88"}, "[ \"$*\" = '-h -j 88 -o %e' ] && echo TOMORROW", 86400.0),
        ("squeue", ARRAY, "[ \"$*\" = '-h -j 88_2 -o %e' ] && echo TOMORROW", 86400.0),
        ("squeue", {"SLURM_JOB_ID": "88"}, "echo N/A", observing.UNKNOWN_END),
        ("squeue", {"SLURM_JOB_ID": "88"}, "echo 'Invalid job id specified' >&2; exit 1", observing.UNKNOWN_END),
        ("bjobs", {"LSB_JOBID": "88"}, "echo '1:30 L'", 5400.0),
        ("bjobs", {"LSB_JOBID": "88"}, "echo '-'", observing.UNKNOWN_END),
    ],
)
def test_walltime_is_read_from_command_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, environ: dict[str, str], text: str, expected: float
) -> None:
    text = text.replace("TOMORROW", in_seconds(86400))
    monkeypatch.setenv("PATH", command(tmp_path / "bin", name, text)["PATH"])
    said = observing.query_seconds_until_job_end(environ)
    assert said == expected or abs(said - expected) < 60


def test_walltime_query_gives_up_if_squeue_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "_COMMAND_LIMIT_S", 0.2)
    monkeypatch.setenv("PATH", command(tmp_path / "bin", "squeue", "exec sleep 100")["PATH"])
    assert observing.query_seconds_until_job_end({"SLURM_JOB_ID": "88"}) == observing.UNKNOWN_END


def test_site_file_walltime_applies_without_another_source(manager: FakeManager) -> None:
    manager.start_pilot("--devices", "cpu:1", "--walltime-s", "600")
    assert 500 < manager.hello().ends_in_s <= 600


def test_walltime_of_slurm_overrides_the_site_file(manager: FakeManager, tmp_path: Path) -> None:
    answers = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; echo {in_seconds(1800)}"
    environ = command(tmp_path / "bin", "squeue", answers)
    manager.start_pilot("--devices", "cpu:1", "--walltime-s", "60000", SLURM_JOB_ID="88", **environ)
    manager.hello()
    (tmp_path / "go").touch()
    assert 1000 < manager.wait_for(WalltimeUpdate).ends_in_s < 1800
    [hello] = manager.hellos
    assert hello.ends_in_s > 50_000
    manager.ready(recipe())  # without the walltime the pilot works as usual
    assert manager.results(manager.run(os.getppid, [()]))
