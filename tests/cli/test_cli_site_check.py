from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from cli.command_line import write_commands
from click.testing import Result

from stoker.errors import ConfigError
from stoker.manager.cli import doctor_site
from stoker.site import Duration, Provider, ProviderKind, Site

SINFO = """\
[ "$1" = --version ] && { echo slurm 23.02.7; exit; }
echo 'gpu*|up|2:00:00|4|8|64000|gpu:a10:1|1|OFF'
echo 'long|up|2-00:00:00|4|8|64000|(null)|1|OFF'
echo 'any|up|infinite|4|8|64000|(null)|1|OFF'
"""


@pytest.fixture(autouse=True)
def _cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    write_commands(commands, sinfo=SINFO, sbatch="exit 1", scontrol="exit 1")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")


def site(*, hours: float = 1, **provider: object) -> Site:
    given = {"kind": ProviderKind.SLURM, "walltime_s": Duration(3600 * hours), **provider}
    return Site(name="lab", provider=Provider(**given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("partition", "limit"), [("gpu", "2 h"), ("", "2 h"), ("long", "48 h"), ("gpu,long", "gpu allows, 2 h")]
)
def test_walltime_over_the_limit_is_refused(partition: str, limit: str):
    with pytest.raises(ConfigError) as caught:
        doctor_site.refuse_sites_that_never_start([site(hours=72, partition=partition)])
    said = str(caught.value)
    assert said.startswith("site lab: [provider] walltime 72 h is more than partition ")
    assert limit in said
    assert said.endswith("jobs of this site would wait forever")


@pytest.mark.parametrize(
    "asked",
    [
        {"partition": "any"},
        {"partition": "gpu,any"},
        {"partition": "gpu", "qos": "patient"},
        {"partition": "gpu", "options": ("#SBATCH --exclusive", "#SBATCH --qos=patient")},
        {"partition": "gpu", "options": ("-p any",)},
    ],
)
def test_walltime_that_may_be_granted_is_accepted(asked: dict[str, Any]):
    notes = doctor_site.refuse_sites_that_never_start([site(hours=72, **asked)])
    assert len(notes) == ("gpu" in asked["partition"])


def test_site_is_accepted_if_the_cluster_does_not_answer(tmp_path: Path):
    write_commands(tmp_path / "bin", sinfo="exit 1")
    assert doctor_site.refuse_sites_that_never_start([site(hours=72)]) == []


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--no-wait"]])
def test_up_refuses_an_invalid_site_and_starts_nothing(stoker, tmp_path: Path, options: list[str]):
    (tmp_path / "lab.toml").write_text('name = "lab"\n[provider]\nkind = "slurm"\nwalltime = "3 h"\n')
    said: Result = stoker("up", "lab.toml", *options)
    assert "[provider] walltime 3 h is more than partition gpu allows, 2 h" in str(said.exception)
    assert not (tmp_path / "home" / "sessions.d").exists()
