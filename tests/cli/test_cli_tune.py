import json
import os

import pytest
from click.testing import CliRunner

from stoker.errors import ConfigError, RecipeError
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


def write(folder, more="", *, name="job.toml", data="data.jsonl"):
    (folder / name).write_text(f'[data]\npath = "{data}"\n{more}')


def test_help_requires_no_model():
    assert "submit" in tune("--help").output
    assert "--late [run|drop]" in tune("submit", "--help").output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[until]\ndeadline = 2020-01-01T00:00:00Z", r"job\.toml: line 4: \[until\] deadline = 2020.* ago"),
        ("[until]\nreach = 1.5", r"job\.toml: line 4: .*1.5 can never be reached"),
        ("[until]\nmetric = 'bleu'\nreach = 0.5", r"'bleu' is 0 for every prompt.*data\.jsonl"),
        ("[until]\niteration = 5", r"job\.toml: line 4: \[until\] iteration is not .*; did you mean iterations\?"),
        ("[training]\nbatch = 2", "gang: 4 devices for a .training. batch of 2 samples"),
    ],
)
def test_invalid_tuning_job_is_refused(folder, more, said):
    write(folder, more)
    with pytest.raises(ConfigError, match=said):
        tune("submit", "job.toml", "--gang", "4")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", r"data\.jsonl: is empty; give rows with the fields input and target"),
        (GOOD.encode() + b'{"input": "d"}\n', r"data\.jsonl: line 4: target is missing \(the row has input\)"),
        (GOOD.encode() + b'{"input": "d", "target": "\xff"}\n', r"data\.jsonl: line 4: byte 27 \(0xff\) is not UTF-8"),
        (GOOD.rpartition("{")[0].encode(), r"has 2 different inputs; tuning needs at least 3"),
    ],
)
def test_unusable_tuning_data_is_refused(folder, data, said):
    (folder / "data.jsonl").write_bytes(data)
    write(folder)
    with pytest.raises(ConfigError, match=said):
        tune("submit", "job.toml")


def test_one_wrong_job_stops_all_jobs_of_the_command(folder):
    write(folder)
    write(folder, name="other.toml", data="absent.jsonl")
    with pytest.raises(ConfigError, match=r"absent\.jsonl: no such file"):
        tune("submit", "job.toml", "other.toml")
    (folder / "sub").mkdir()
    write(folder, name="sub/job.toml", data="../data.jsonl")
    with pytest.raises(ConfigError, match=r"sub/job\.toml: two jobs are called job; give one of them another `name`"):
        tune("submit", "job.toml", "sub/job.toml")


def test_missing_model_is_refused(folder):
    (folder / "job.toml").write_text('model = "./absent"\n[data]\npath = "data.jsonl"\n')
    with pytest.raises(RecipeError, match=r"there is no model at \./absent"):
        tune("submit", "job.toml")


def test_invalid_options_are_refused(folder):
    write(folder)
    for wrong, said in (
        (["--gang", "x"], "x is not a number of devices or a range; write 4 or 1-4"),
        (["--gang", "4-2"], "4-2: a range starts at 1 or more and rises"),
        (["--gang", "0"], "starts at 1 or more"),
        (["--late", "perhaps"], "'perhaps' is not one of"),
        (["--site", "a.toml", "--session", "b"], "exclude each other"),
        (["--bank", "a", "--no-bank"], "exclude each other"),
    ):
        told = tune("submit", "job.toml", *wrong)
        assert told.exit_code == 2
        assert said in told.output
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        tune("submit", "job.toml", "--site", "absent.toml")


def test_show_without_results_is_reported(folder):
    assert "no tuning job is known in this folder" in tune("status").output
    assert json.loads(tune("status", "--json").output) == {"jobs": []}
    assert tune("status", "--watch", "--json").exit_code == 2
    with pytest.raises(ConfigError, match="no tuning job is known there"):
        tune("report")
    assert os.listdir(folder) == ["data.jsonl"]
