"""`stoker tune submit` refuses wrong jobs in one line before it submits any job."""

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from stoker.apps.prompt_tuning.board import SubmissionOptions
from stoker.apps.prompt_tuning.cli import submit_jobs
from stoker.apps.prompt_tuning.run import check_jobs, format_restart_command
from stoker.errors import ConfigError, RecipeError

JOB = """\
name = "{name}"
model = "{model}"
[data]
path = "{path}"
[until]
{until}
"""
GOOD = {"name": "good", "model": "./model", "path": "pairs.csv", "until": "iterations = 5"}
ROWS = b"input,target\n" + b"".join(b"question %d,%s\n" % (n, (b"yes", b"no")[n % 2]) for n in range(9))
CYRILLIC = ROWS.replace(b"yes", "да".encode()).replace(b"no", "нет".encode())


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "pairs.csv").write_bytes(ROWS)
    write(tmp_path)
    return tmp_path


def write(folder, **changes):
    job = {**GOOD, **changes}
    (folder / f"{job['name']}.toml").write_text(JOB.format(**job))


def refused(here, *arguments):
    """Submit a good job, then a wrong job, and return the error. The refused command must leave no files."""
    before = sorted(path.name for path in here.iterdir())
    result = CliRunner().invoke(submit_jobs, ["good.toml", *arguments])
    assert sorted(path.name for path in here.iterdir()) == before
    return result


@pytest.mark.parametrize(
    ("change", "content", "said"),
    [
        ({"until": "reach = 1.5"}, ROWS, "bad.toml: line 6: [until] reach = 1.5 can never be reached: accuracy goes"),
        ({"until": "deadline = 2020-01-31T18:00:00Z"}, ROWS, "[until] deadline = 2020-01-31T18:00:00+00:00 was "),
        ({"until": 'metric = "bleu"'}, ROWS, "metric = 'bleu' is 0 for every prompt"),
        ({"until": 'metric = "rouge-l"'}, CYRILLIC, "metric = 'rouge-l' is 0 for every prompt: it counts words of the"),
        ({}, b"input,label\na,b\n", "bad.csv: line 2: target is missing (the row has input, label)"),
        ({}, b"input,target\na,b\nb,c\n", "bad.csv: has 2 different inputs; tuning needs at least 3"),
    ],
)
def test_invalid_job_is_refused_before_any_job_is_submitted(here, change, content, said):
    (here / "bad.csv").write_bytes(content)
    write(here, name="bad", path="bad.csv", **change)
    error = refused(here, "bad.toml").exception
    assert isinstance(error, ConfigError)
    assert said in str(error)


def test_missing_model_equal_names_and_many_ranks_are_refused(here):
    write(here, name="bad", model="./none")
    assert isinstance(refused(here, "bad.toml").exception, RecipeError)
    again = refused(here, "good.toml").exception
    assert isinstance(again, ConfigError)
    assert "two jobs are called good; give one of them another `name`" in str(again)
    many = refused(here, "--gang", "20").exception
    assert isinstance(many, ConfigError)
    assert "20 devices for a [training] batch of 16 samples" in str(many)
    result = refused(here, "--gang", "4-2")
    assert result.exit_code == 2
    assert "a range starts at 1 or more and rises" in result.output


@pytest.mark.parametrize(
    "given",
    [
        {"gang": (2, 2), "late": "drop", "bank": None},
        {"gang": (1, 3), "bank": "my bank", "site": "site.toml", "out": Path("away")},
        {"session": "k3v9", "serve": "my facts", "models": Path("lab/models.toml")},
    ],
)
def test_resume_command_has_every_option_of_the_stopped_command(given):
    options = SubmissionOptions(**given)
    words = shlex.split(format_restart_command([Path("a job.toml"), Path("b.toml")], options))
    assert words[:3] == ["stoker", "tune", "submit"]
    read = submit_jobs.make_context("submit", words[3:]).params
    assert read.pop("jobs") == (Path("a job.toml"), Path("b.toml"))
    bank = None if read.pop("no_bank") else read.pop("bank")
    assert (
        SubmissionOptions(
            **{name: read[name] for name in ("site", "session", "gang", "late", "out", "serve")},
            bank=bank,
            models=read["models"] or SubmissionOptions().models,
        )
        == options
    )


def test_resume_command_is_short_without_options():
    assert format_restart_command([Path("a.toml")], SubmissionOptions()) == "stoker tune submit a.toml"


def test_dropping_late_jobs_needs_a_deadline(here):
    error = refused(here, "--late", "drop").exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith("good.toml: --late drop has no effect on jobs without a deadline")
    write(here, name="due", until='slo = "1 h"')
    assert list(check_jobs([Path("good.toml"), Path("due.toml")], SubmissionOptions(late="drop"))) == ["good", "due"]
