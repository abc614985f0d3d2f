"""What `stoker tune submit` refuses: one line that says what, where and what to do, before anything is submitted."""

import pytest
from click.testing import CliRunner

from stoker.apps.prompt_tuning.cli import submit_jobs
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
    """What is said of a job that is wrong, submitted behind one that is not; nothing may have come of either."""
    before = sorted(path.name for path in here.iterdir())
    result = CliRunner().invoke(submit_jobs, ["good.toml", *arguments])
    assert sorted(path.name for path in here.iterdir()) == before
    return result


@pytest.mark.parametrize(
    ("until", "line", "said"),
    [
        ("deadline = 2020-01-31T18:00:00Z", 6, "[until] deadline = 2020-01-31T18:00:00+00:00 was "),
        ("reach = 1.5", 6, "reach = 1.5 can never be reached: accuracy goes from 0 to 1"),
        ('metric = "loss"\nreach = -1.0', 7, "reach = -1 can never be reached: a loss is above 0"),
        ('slo = "1 h"\ndeadline = 2099-01-31T18:00:00Z', 7, "deadline and slo say the same in two ways"),
    ],
)
def test_a_deadline_or_a_target_that_cannot_be(here, until, line, said):
    write(here, name="bad", until=until)
    error = refused(here, "bad.toml").exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"bad.toml: line {line}: ")
    assert said in str(error)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "bad.csv: is empty"),
        (b"input,target\n", "bad.csv: is empty; give rows with the fields input and target"),
        (b"input,label\na,b\n", "bad.csv: line 2: target is missing (the row has input, label)"),
        (b"input,target\na,b\nc,\xe4\n", "bad.csv: line 3: is not UTF-8"),
        (b"input,target\na,b\nb,c\n", "bad.csv: has 2 different inputs; tuning wants at least 3"),
    ],
)
def test_data_that_nothing_can_be_tuned_on(here, content, said):
    (here / "bad.csv").write_bytes(content)
    write(here, name="bad", path="bad.csv")
    error = refused(here, "bad.toml").exception
    assert isinstance(error, ConfigError)
    assert said in str(error)


def test_a_metric_that_is_the_same_for_every_prompt(here):
    write(here, name="bad", until='metric = "bleu"')
    error = refused(here, "bad.toml").exception
    assert isinstance(error, ConfigError)
    assert "metric = 'bleu' is 0 for every prompt" in str(error)


def test_a_model_that_is_not_there_two_of_one_name_and_more_ranks_than_samples(here):
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
    assert "a range goes from at least 1 upwards" in result.output
