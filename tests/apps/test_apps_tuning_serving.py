import shutil
from pathlib import Path

import pytest
from adapter_folders import write_tiny_soft_prompt
from click.testing import CliRunner
from tiny_model import write_tiny_model

from stoker.apps.common.models_file import read_models
from stoker.apps.prompt_tuning.board import SubmissionOptions
from stoker.apps.prompt_tuning.cli import submit_jobs
from stoker.apps.prompt_tuning.serving import add_prompt_to_models_file, check_prompt_can_be_served
from stoker.apps.prompt_tuning.submit import check_job
from stoker.errors import ConfigError
from stoker.tuning import read_job

JOB = 'name = "facts"\nmodel = "model"\n[data]\npath = "pairs.csv"\n[until]\niterations = 5\n'
BASE = '# our models\n[models.small]\npath = "model"   # the small one\nmin = 1'


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "model")
    (tmp_path / "runs").mkdir()
    write_tiny_soft_prompt(tmp_path / "runs" / "facts-1", seed=1)
    (tmp_path / "pairs.csv").write_text("input,target\n" + "".join(f"question {n},{n % 2}\n" for n in range(9)))
    (tmp_path / "facts.toml").write_text(JOB)
    return tmp_path


@pytest.fixture
def ready(here):
    return check_job(read_job("facts.toml"))


def add(ready, *, adapter="runs/facts-1", **options):
    given = SubmissionOptions(**{"serve": "facts", **options})
    check_prompt_can_be_served(given, ready)
    return add_prompt_to_models_file(given, ready, adapter=Path(adapter))


def test_tuned_prompt_is_added_to_its_base_model_in_the_models_file(here, ready):
    file = here / "models.toml"
    file.write_text(BASE)
    served = add(ready)
    assert (served.name, served.base, served.command) == ("facts", "small", "stoker serve models.toml")
    assert file.read_text() == f'{BASE}\n\n[models.facts]\nbase = "small"\nadapter = "runs/facts-1"\n'
    found = read_models(file)["facts"]
    assert (found.base, found.adapter) == ("small", str(here / "runs" / "facts-1"))


def test_new_models_file_receives_the_base_model_and_the_prompt(here, ready):
    (here / "lab").mkdir()
    served = add(ready, serve="facts v1.0", models=Path("lab/models.toml"), site="my site.toml")
    assert served.command == "stoker serve 'my site.toml' lab/models.toml"
    models = read_models(here / "lab" / "models.toml")
    assert list(models) == ["model", "facts v1.0"]
    assert models["model"].path == str(here / "model")
    assert models["facts v1.0"].adapter == str(here / "runs" / "facts-1")
    assert add(ready, serve="again", models=Path("lab/models.toml"), session="k3v9").base == "model"
    assert list(read_models(here / "lab" / "models.toml")) == ["model", "facts v1.0", "again"]


def test_model_that_serves_no_adapters_is_not_used_as_the_base(here, ready):
    (here / "other").symlink_to(here / "model")
    (here / "models.toml").write_text('[models.model]\npath = "model"\nengine = "static"\n')
    assert add(ready).base == "model-base"
    (here / "models.toml").write_text('[models.linked]\npath = "other"\n')
    assert add(ready).base == "linked"


def test_prompt_tuned_on_another_base_model_is_refused(here, ready):
    (here / "models.toml").write_text(BASE)
    write_tiny_soft_prompt(here / "wide", seed=1, width=32)
    with pytest.raises(ConfigError, match=r"models\.toml: \[models\.facts\] adapter: .* an adapter of another base"):
        add(ready, adapter="wide")
    assert (here / "models.toml").read_text() == BASE


@pytest.mark.parametrize(
    ("models", "arguments", "said"),
    [
        (BASE, ["--serve", "small"], "models.toml: [models.small] exists; give --serve another name"),
        ("[models.small", ["--serve", "facts"], "models.toml: line 1: "),
        (BASE, ["--serve", "facts", "--models", "none/models.toml"], "none: no such folder"),
        (BASE, ["facts.toml", "--serve", "facts"], "names one tuned prompt; submit one job instead of 2 jobs"),
        (BASE, ["--models", "models.toml"], "--models is the file of --serve; give --serve NAME too"),
    ],
)
def test_unservable_prompt_is_refused_before_its_job_starts(here, models, arguments, said):
    (here / "models.toml").write_text(models)
    shutil.rmtree(here / "runs" / "facts-1")
    result = CliRunner().invoke(submit_jobs, ["facts.toml", *arguments])
    assert said in f"{result.exception} {result.output}"
    assert (here / "models.toml").read_text() == models
    assert not list((here / "runs").iterdir())
