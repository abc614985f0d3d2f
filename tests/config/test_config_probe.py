from __future__ import annotations

import pytest

from stoker.config import parse_site
from stoker.errors import ConfigError
from stoker.manager.factory.pilot_command import pilot_options
from stoker.manager.taskvine.refusals import refuse_unsupported_site


def options(*lines: str) -> list[str]:
    said = pilot_options(parse_site("\n".join(["[pilot]", *lines, ""]), file="site.toml").pilot)
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
