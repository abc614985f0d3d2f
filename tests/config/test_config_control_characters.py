"""Stoker refuses control characters in a site file, because they could start a new line of a script. The error names
file, line and setting.
"""

from __future__ import annotations

import msgspec
import pytest

from stoker.config import parse_site
from stoker.errors import ConfigError
from stoker.site import Environment, Pilot, Policy, Provider, ProviderKind, Session, Site

KINDS = {"queue": "pbs", "requirements": "condor", "image": "kubernetes", "namespace": "kubernetes"}
"""For each setting that Slurm lacks: a batch system that has the setting."""
CHARACTERS = ["\n", "\r", "\t", "\0", "\x1b", "\x7f", "\x85", "\u2028"]


def texts() -> list[tuple[str, str]]:
    found = []
    for table, kind in (
        ("", Site), ("provider", Provider), ("pilot", Pilot), ("session", Session), ("policy", Policy),
        ("environment", Environment),
    ):  # fmt: skip
        for field in msgspec.structs.fields(kind):
            if field.type is str or field.type == tuple[str, ...]:
                found.append((table, field.encode_name))  # noqa: PERF401
    return found


def site_file(table: str, setting: str, text: str) -> tuple[str, int]:
    value = '"' + "".join(f"\\u{ord(each):04x}" for each in text) + '"'
    if setting in ("options", "sites"):
        value = f"[{value}]"
    lines = [f"{setting} = {value}"] if not table else [f"[{table}]"]
    if table == "provider":
        lines.append(f'kind = "{KINDS.get(setting, "slurm")}"')
    if table:
        lines.append(f"{setting} = {value}")
    return "\n".join(lines), len(lines)


def test_list_of_text_settings_contains_known_settings() -> None:
    assert {("provider", "partition"), ("provider", "options"), ("environment", "python"), ("", "sites")} <= {*texts()}


@pytest.mark.parametrize(("table", "setting"), texts())
def test_control_character_in_a_setting_is_refused(table: str, setting: str) -> None:
    for character in CHARACTERS:
        text, line = site_file(table, setting, f"a{character}#SBATCH --wrap=b")
        if setting == "worker_init" and character in "\n\t":
            assert character in parse_site(text, file="s.toml").provider.worker_init
            continue
        with pytest.raises(ConfigError) as caught:
            parse_site(text, file="s.toml")
        assert (caught.value.facts["key"], caught.value.facts["line"]) == (setting, line)
        assert str(caught.value).startswith(f"s.toml: line {line}: ")
        assert character not in str(caught.value)


def test_site_created_in_code_with_a_line_break_is_refused() -> None:
    with pytest.raises(ValueError, match=r"qos = .* has a line break in it"):
        Provider(kind=ProviderKind.SLURM, qos="normal\n#SBATCH --wrap=true")
    with pytest.raises(ValueError, match=r"options = .* has a line break in it"):
        Provider(kind=ProviderKind.SLURM, options=("--exclusive", "--hold\n#SBATCH --wrap=true"))


@pytest.mark.parametrize(
    "text",
    ['name = "lab\\n"', '[provider]\nkind = "slurm"\ngpus = "a10:2\\n"', '[pilot]\ndevices = "cpu:4\\n"',
     '[session]\nports = "21000-21999\\n"'],
)  # fmt: skip
def test_line_break_after_a_valid_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="has a line break in it"):
        parse_site(text, file="s.toml")
