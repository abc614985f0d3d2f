import json
import os

import pytest
from click.testing import CliRunner

from stoker.errors import ConfigError
from stoker.manager.cli.main import cli

GOOD = '{"input": "a", "target": "yes"}\n{"input": "b", "target": "no"}\n{"input": "c", "target": "yes"}\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    (tmp_path / "data.jsonl").write_text(GOOD)
    yield tmp_path
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "runinfo").exists()


def tune(*arguments):
    return CliRunner().invoke(cli, ["tune", *arguments], catch_exceptions=False)


def write(folder, *, name="job.toml", data="data.jsonl"):
    (folder / name).write_text(f'[data]\npath = "{data}"\n')


def test_one_invalid_job_file_prevents_all_submissions(folder):
    write(folder)
    write(folder, name="other.toml", data="absent.jsonl")
    with pytest.raises(ConfigError, match=r"absent\.jsonl: no such file"):
        tune("submit", "job.toml", "other.toml")
    (folder / "sub").mkdir()
    write(folder, name="sub/job.toml", data="../data.jsonl")
    with pytest.raises(ConfigError, match=r"sub/job\.toml: two jobs are called job; give one of them another `name`"):
        tune("submit", "job.toml", "sub/job.toml")


def test_tune_commands_report_that_no_job_is_known(folder):
    assert "no tuning job is known in this folder" in tune("status").output
    assert json.loads(tune("status", "--json").output) == {"jobs": []}
    assert tune("status", "--watch", "--json").exit_code == 2
    with pytest.raises(ConfigError, match="no tuning job is known there"):
        tune("report")
    assert os.listdir(folder) == ["data.jsonl"]
