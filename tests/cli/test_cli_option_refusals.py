"""Each command refuses each wrong option in one line that names the option or value."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from stoker.errors import StokerError
from stoker.manager.cli.console import Seconds, WholeNumber
from stoker.manager.cli.main import cli

ARGUMENTS = {
    "explain": ["c-0"], "plan": ["local", "fact_verification"], "simulate": ["awareness"], "tune submit": ["job.toml"],
    "run prompt_tuning": ["job.toml"], "tune bank": ["prompts.txt"], "replay": ["x"],
    "tune status": ["x"], "tune report": ["x"], "run embed": ["texts.jsonl", "--model", "small"],
    "run encoder_lengths": ["--model", "small"], "serve keys add": ["ana"],
}  # fmt: skip
WRONG_TEXTS = {
    "-k": ["peer"],
    "--session": ["no-such-session"],
    "--clear": ["no-such-node"],
    "--scratch": ["/no/such/folder", "$NO_SUCH_VARIABLE"],
    "--older": ["soon", "4", "-1 s", ""],
    "--partition": ["no-such-partition"],
    "--idle": ["soon", "4", "-3 s", "0"],
    "--folder": ["a-file"],
    "--output": ["/proc/x"],
    "--host": ["0.0.0.0", "no.such.host.invalid"],
    "--uds": ["/no/such/folder/s"],
    "--model": ["/no/such/model"],
    "--models": ["/no/such/models.toml", "a-file"],
    "--claims": ["/no/such/file"],
    "--prompts": ["/no/such/file"],
    "--site": ["/no/such/site.toml", "no-such-site"],
    "--sweep": ["/no/such/file"],
    "--text": ["no-such-column"],
    "--texts": ["/no/such/file", "a-file"],
    "--id": ["no-such-column"],
    "--data": ["/no/such/file"],
    "--group": ["no-such-group"],
    "--since": ["monday", "0d", "2026-13-01", ""],
    "--gang": ["x", "0", "3-1", "1-x"],
    "--out": ["a-file", "/proc/x"],
    "--resume": ["no-such-run"],
    "--policy": ["no-such-policy"],
    "--set": ["no-equals-sign", "no.such.setting=3"],
}
NOT_HERE = {
    "batch": ["--permits"], "run batch_inference": ["--permits"],  # a hidden option that only the gateway uses
    "serve keys set": ["--group"],  # the command fails earlier: the key is missing
    "serve usage": ["--key", "--model"],  # a filter accepts any text
    "replay": ["--perfetto"],  # the command fails earlier: the session is missing
    "plan": ["--kind"],  # the command fails earlier: a measurement is missing
    "tune bank": ["--model", "--bank", "--site", "--session"],  # the command fails earlier: the prompts are missing
    "tune submit": ["--bank", "--site", "--session", "--out", "--serve"],  # the job file is missing
    "run prompt_tuning": ["--bank", "--site", "--session", "--out", "--serve"],
    "run fact_verification": ["--seed"],  # every whole number is valid
}  # fmt: skip


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            yield from commands(below, (*path, name))
    else:
        yield " ".join(path), command


def cases() -> Iterator[tuple[str, str, str]]:
    """Yield one wrong value for each option of each command. The first option of each kind gets all wrong values."""
    tried: set[object] = set()
    for name, command in commands(cli):
        for param in command.params:
            option = param.opts[0]
            if not isinstance(param, click.Option) or param.is_flag or option in NOT_HERE.get(name, ()):
                continue
            kind: object = option
            match param.type:
                case WholeNumber():
                    kind, values = WholeNumber, ["0", "many", "-1", "1.5", "9" * 30, "9" * 5000]
                case Seconds():
                    kind, values = Seconds, ["soon", "nan", "inf", "-1", "1e300"]
                case click.Choice():
                    values = ["none-of-these"]
                case _:
                    values = WRONG_TEXTS[option]
            for value in values[:1] if kind in tried else values:
                yield name, option, value
            tried.add(kind)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("STOKER_SESSION", "")  # restore the value that `run --session` changes
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (tmp_path / "a-file").write_text("x")
    (tmp_path / "texts.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("command", "option", "value"), list(cases()), ids=lambda text: text[:40])
def test_wrong_option_value_is_refused_with_an_explanation(command: str, option: str, value: str):
    ran = CliRunner().invoke(cli, [*command.split(), *ARGUMENTS.get(command, []), option, value])
    if isinstance(ran.exception, StokerError):
        said = str(ran.exception)
    else:
        assert ran.exit_code == 2, (ran.exception, ran.output)
        said = ran.output
    assert option in said or value in said, said
    assert "Traceback" not in said


def test_options_omitted_by_this_test_exist():
    there = {(name, option.opts[0]) for name, command in commands(cli) for option in command.params}
    assert {(name, option) for name, options in NOT_HERE.items() for option in options} <= there
