"""The sites of a session: found from one another, written, and read back the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.config import load_site, load_sites, read_python_path, read_sites, site_text, write_sites
from stoker.errors import ConfigError
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


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_sites(tmp_path / "sites", [FULL, Site.default()], python_path="/a:/b c")
    assert read_sites(tmp_path / "sites") == {"big-lab": FULL, "local": Site.default()}
    assert read_python_path(tmp_path / "sites") == "/a:/b c"


def test_every_site_file_that_ships_survives(tmp_path: Path) -> None:
    files = sorted((Path(__file__).parents[2] / "site-configs").glob("*.toml"))
    assert files
    for file in files:
        site = load_site(file)
        (tmp_path / "copy.toml").write_text(site_text(site))
        again = load_site(tmp_path / "copy.toml")
        assert site_text(again) == site_text(site)


def test_a_site_brings_those_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "a.toml").write_text('name = "a"\nsites = ["more/b.toml"]\n')
    (tmp_path / "more" / "b.toml").write_text('name = "b"\nsites = ["c.toml", "../a.toml"]\n')
    (tmp_path / "more" / "c.toml").write_text('name = "c"\n')
    assert [site.name for site in load_sites(tmp_path / "a.toml")] == ["a", "b", "c"]
    assert [site.name for site in load_sites()] == ["local"]


def test_two_sites_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('name = "a"\nsites = ["b.toml"]\n')
    (tmp_path / "b.toml").write_text('name = "a"\n')
    with pytest.raises(ConfigError, match="two sites of the session are called a"):
        load_sites(tmp_path / "a.toml")
