from __future__ import annotations

from pathlib import Path

import pytest

from stoker.config import load_site, load_sites, parse_site, read_sites, write_sites
from stoker.errors import ConfigError
from stoker.manager.factory.batches import render_submission
from stoker.manager.factory.pilot_command import build_pilot_options
from stoker.manager.taskvine.refusals import refuse_unsupported_site
from stoker.protocol.session import SessionFolder
from stoker.site import Duration, Policy, Provider, ProviderKind, Site

VAIN = {
    '[provider]\nwalltime = "2 h"': "line 2: [provider] walltime has no effect: a pilot on this machine runs",
    '[provider]\ncommand_limit = "5 s"': "line 2: [provider] command_limit has no effect: kind local has no batch",
    '[policy]\nfinish_within = "5 min"': "line 2: [policy] finish_within has no effect: it needs provisioning",
    "[policy]\nkeep_pending = 4": 'line 2: [policy] keep_pending has no effect: it needs provisioning = "opport',
    '[pilot]\nprobe = "never"\nprobe_every = "1 min"': 'line 3: [pilot] probe_every has no effect: probe = "never"',
    '[provider]\nkind = "pbs"\nexclude_nodes = 2': "line 3: [provider] exclude_nodes has no effect",
    "[provider]\nexclude_nodes = 0": "line 2: [provider] exclude_nodes has no effect: it needs kind slurm or condor",
    '[provider]\nkind = "slurm"\nexclude_nodes = 0\nprobe_nodes = "2 h"': "line 4: [provider] probe_nodes",
}


@pytest.mark.parametrize("text", VAIN, ids=lambda text: text.rpartition("\n")[2] + f" {len(text)}")
def test_setting_without_effect_is_refused_with_line_and_advice(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_site(text, file="site.toml")
    assert str(caught.value).startswith(f"site.toml: {VAIN[text]}")
    assert "leave" in str(caught.value)


EFFECTIVE = (
    '[provider]\nkind = "slurm"\nwalltime = "2 h"\ncommand_limit = "5 s"\n[policy]\nkeep_pending = 4',
    '[policy]\nprovisioning = "demand"\nfinish_within = "5 min"',
    '[pilot]\nprobe = "/opt/probe"\nprobe_every = "1 min"',
    '[provider]\nkind = "condor"\nexclude_nodes = 2\nprobe_nodes = "2 h"',
    '[provider]\nworker_init = "module load cuda"\nprice = 0.1\npoll = "1 s"',
)


@pytest.mark.parametrize("text", EFFECTIVE)
def test_setting_with_an_effect_is_accepted(text: str, tmp_path: Path) -> None:
    site = parse_site(f'name = "a"\n{text}', file="site.toml")
    write_sites(tmp_path, [site])
    assert read_sites(tmp_path)["a"] == site


def test_site_created_in_a_program_is_checked_for_effects() -> None:
    with pytest.raises(ConfigError, match=r"site local: \[provider\] walltime_s has no effect"):
        load_site(Site(provider=Provider(walltime_s=Duration(7200))))
    with pytest.raises(ConfigError, match=r"\[policy\] finish_within_s has no effect"):
        load_site(Site(policy=Policy(finish_within_s=Duration(60))))
    assert load_site(Site(provider=Provider(kind=ProviderKind.SLURM, walltime_s=Duration(7200))))


def test_site_that_lists_itself_or_a_site_twice_is_refused(tmp_path: Path) -> None:
    site, other = tmp_path / "lab.toml", tmp_path / "other.toml"
    other.write_text('name = "other"\nsites = ["lab.toml"]\n')
    site.write_text('name = "lab"\nsites = ["../' + tmp_path.name + '/lab.toml"]\n')
    with pytest.raises(ConfigError, match=r"lab\.toml: sites names .*, which is this file itself; remove it"):
        load_sites(site)
    site.write_text('name = "lab"\nsites = ["other.toml", "./other.toml"]\n')
    with pytest.raises(ConfigError, match=r"sites names './other.toml' twice"):
        load_sites(site)
    site.write_text('name = "lab"\nsites = ["other.toml"]\n')
    assert [each.name for each in load_sites(site)] == ["lab", "other"], (
        "two sites that name each other are one session"
    )


def test_worker_init_of_a_local_pilot_is_shown_in_the_dry_run(tmp_path: Path) -> None:
    site = parse_site('[provider]\nworker_init = "module load cuda"', file="s")
    assert render_submission(site, session="k", folder=SessionFolder(tmp_path)).startswith("module load cuda\nexec ")


# ---- probes


def options(*lines: str) -> list[str]:
    said = build_pilot_options(parse_site("\n".join(["[pilot]", *lines, ""]), file="site.toml").pilot)
    return said[said.index("--probe") :] if "--probe" in said else said[4:]


def test_probe_settings_reach_the_pilot_command() -> None:
    assert options() == []
    assert options('probe = "auto"', 'probe_every = "5 min"') == []
    assert options('probe = "never"') == ["--probe", "never"]
    assert options('probe = "/opt/site/probe --quick"') == ["--probe", "/opt/site/probe --quick"]
    assert options('probe_every = "0 s"') == ["--probe-every", "0"]
    assert options('probe = "/p"', 'probe_every = "90 s"') == ["--probe", "/p", "--probe-every", "90"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('probe = "nevr"', r"probe = 'nevr': write \"auto\", \"never\", or the path of a program"),
        ('probe_every = "0.5 s"', "at least 1 s"),
    ],
)
def test_invalid_probe_setting_is_refused(line: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"line 2: \[pilot\] .*{why}"):
        options(line)


def test_probe_setting_without_effect_under_taskvine_is_refused() -> None:
    site = parse_site('engine = "taskvine"\n[pilot]\nprobe = "/opt/probe"\n', file="site.toml")
    with pytest.raises(ConfigError, match="TaskVine workers do not probe devices"):
        refuse_unsupported_site(site)
