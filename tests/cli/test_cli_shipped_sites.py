from __future__ import annotations

from pathlib import Path

import pytest
from cli.command_line import Stoker

FOLDER = Path(__file__).parents[2] / "site-configs"
PILOT = "-m stoker.pilot.main --session"
LINES = {
    "local": ["--devices auto --cache-size '20000000000 B'"],
    "workstation": ["--devices gpu"],
    "slurm": ["#SBATCH --time=240", "#SBATCH --partition=gpu", "#SBATCH --gres=gpu:1", "--walltime-s 14400"],
    "slurm-preemptible": ["#SBATCH --open-mode=append", "#SBATCH --partition=backfill", "#SBATCH --requeue"],
    "condor": ["should_transfer_files = IF_NEEDED", "request_gpus = 1", "+MaxWallTime = 120", "queue 1"],
    "condor-no-shared-fs": ["should_transfer_files = YES", "transfer_input_files = ../carried/", "exec sh session/"],
    "mixed": ["# site mixed: ", "run here", "# site slurm-preemptible: ", "#SBATCH --partition=backfill"],
    "taskvine": ["-m stoker.pilot.taskvine.main --session", "vine_factory ", "--batch-type=slurm"],
}
"""Lines that each rendered site file must contain, in order."""


@pytest.mark.parametrize("site", sorted(path.stem for path in FOLDER.glob("*.toml")))
def test_dry_run_prints_the_job_of_each_shipped_site_file(
    stoker: Stoker, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))  # no batch system
    shown = stoker.ok("up", str(FOLDER / f"{site}.toml"), "--dry-run")
    place = 0
    for line in LINES[site]:
        place = shown.output.find(line, place)
        assert place >= 0, f"{line}\n\n{shown.output}"
    if site not in ("taskvine", "condor-no-shared-fs"):
        assert PILOT in shown.output
    assert list(tmp_path.iterdir()) == [], "a dry run creates no files"
