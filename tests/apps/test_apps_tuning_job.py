import datetime
from pathlib import Path

import pytest

from stoker.apps.prompt_tuning.submit import CheckedJob, make_tuning_call
from stoker.contexts.recipe import BARE
from stoker.errors import ConfigError
from stoker.tuning.job import Data, Job, Metric, Optimizer, Prompt, Sample, Until, digest_job, parse_job, read_job

WHOLE = """
name = "facts"
[data]
path = "train.jsonl"
target = "label"
[prompt]
initial = "Say whether it is true."
virtual_tokens = 20
[until]
metric = "rouge-l"
reach = 0.5
iterations = 40
slo = "15 min"
[training]
batch = 4
optimizer = "sgd"
checkpoint_every = "5 s"
"""


def parse(text, **more):
    return parse_job(text, file="job.toml", folder=Path("/jobs"), **more)


def test_job_file_gives_a_job_its_settings(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "job.toml").write_text('model = "models"\n' + WHOLE)
    job = read_job(tmp_path / "job.toml")
    assert (job.name, job.data.target, job.data.input) == ("facts", "label", "input")
    assert (job.data.path, job.model) == (str(tmp_path / "train.jsonl"), str(tmp_path / "models"))
    assert (job.until.metric, job.until.reach, job.until.iterations) == (Metric.ROUGE, 0.5, 40)
    assert (job.training.optimizer, job.training.checkpoint_every_s) == (Optimizer.SGD, 5.0)
    assert job.deadline_s(submitted_s=1000.0) == 1000.0 + 15 * 60
    assert parse(WHOLE.replace("[prompt]", '[prompt] # "x"')).model == ""
    assert parse('model = "owner/name"\n[data]\npath = "a.csv"').model == "owner/name"


def test_deadline_with_a_time_zone_is_converted_to_a_timestamp(tmp_path):
    text = '[data]\npath = "a.csv"\n[until]\ndeadline = 2030-01-31T18:00:00+01:00\n'
    moment = datetime.datetime(2030, 1, 31, 17, tzinfo=datetime.UTC).timestamp()
    assert parse(text, now_s=moment - 1).deadline_s(submitted_s=0.0) == moment
    with pytest.raises(ConfigError, match=r"job\.toml: line 4: \[until\] deadline = 2030.* was 1 min ago") as caught:
        parse(text, now_s=moment + 60)
    assert (caught.value.line, caught.value.key) == (4, "deadline")
    assert Job(Data("a.csv")).deadline_s(submitted_s=5.0) is None


@pytest.mark.parametrize(
    ("text", "line", "key", "said"),
    [
        ("[data]\npath = 'a'\noptimizer = 'sgd'", 3, "optimizer", r"did you mean optimizer in \[training\]"),
        ("[until]\nreach = 0.5", 1, "data", "data is missing"),
        ("[data]\npath = 'a'\n[until]\nreach = 1.2", 4, "reach", "1.2 can never be reached: accuracy goes from 0 to 1"),
        ("[data]\npath = 'a'\n[until]\nreach = 90", 4, "reach", "write 0.9 for 90 %"),
        ("[data]\npath = 'a'\n[until]\nmetric = 'loss'\nreach = -1.0", 5, "reach", "a loss is above 0"),
        ("[data]\npath = 'a'\n[until]\nmetric = 'acuracy'", 4, "metric", "did you mean 'accuracy'?"),
        ("[data]\npath='a'\n[until]\nslo='1 h'\ndeadline=2030-01-01T00:00:00Z", 5, "deadline", "both set the deadline"),
        ("[data]\npath = 'a'\ntemplate = 'none'", 3, "template", r"must contain \{input\} once, and contains it 0"),
        ("[data]\npath = 'a'\ntarget = 'input'", 3, "target", "are the same field"),
        ("[data\npath = 'a'", 1, None, "not TOML"),
    ],
)
def test_job_file_error_names_the_line_and_the_setting(text, line, key, said):
    with pytest.raises(ConfigError, match=said) as caught:
        parse(text)
    assert str(caught.value).startswith(f"job.toml: line {line}: ")
    assert caught.value.line == line
    if key:
        assert caught.value.key == key


def test_missing_or_non_utf_8_job_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_job(tmp_path / "job.toml")
    (tmp_path / "job.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match=r"line 1: byte 9 \(0xff\) is not UTF-8 text"):
        read_job(tmp_path / "job.toml")


def test_job_digest_changes_with_settings_that_affect_results():
    job = parse(WHOLE)
    same = [("facts", "other"), ("40", "80"), ("15 min", "1 h"), ("5 s", "9 s"), ("train.jsonl", "moved.jsonl")]
    other = [("batch = 4", "batch = 8"), ("true", "false"), ("rouge-l", "bleu"), ("sgd", "adamw")]
    for before, after in same:
        assert digest_job(parse(WHOLE.replace(before, after))) == digest_job(job), after
    for before, after in other:
        assert digest_job(parse(WHOLE.replace(before, after))) != digest_job(job), after
    assert digest_job(job, "data") != digest_job(job)


def test_higher_accuracy_and_lower_loss_count_as_better():
    assert Metric.ACCURACY.better(0.6, 0.5)
    assert not Metric.ACCURACY.better(0.5, 0.5)
    assert Metric.LOSS.better(0.5, 0.6)
    assert Metric.LOSS.reached(0.5, 0.5)
    assert not Metric.LOSS.reached(0.6, 0.5)
    assert not Metric.BLEU.reached(1.0, None)
    assert not Metric.BLEU.reached(float("nan"), 0.5)
    assert Until(metric=Metric.LOSS, reach=3.5).reach == 3.5


@pytest.mark.parametrize(
    ("reach", "initial", "bank", "kind"),
    [
        (None, "", "", "all iterations"),
        (0.5, "", "", "bank"),
        (0.5, "", None, "prompt"),
        (0.5, "Say whether it is true.", "", "prompt"),
    ],
)
def test_tuning_call_tells_the_scheduler_which_kind_of_job_it_is(tmp_path, reach, initial, bank, kind):
    job = Job(data=Data(path="given"), prompt=Prompt(initial=initial), until=Until(reach=reach, iterations=40))
    ready = CheckedJob(job, (Sample("in", "out"),) * 20, BARE, "tiny")
    app, _ = make_tuning_call(ready, bank=bank if bank is None else tmp_path)
    assert (app.specification.requirements.features.items, app.specification.requirements.features.kind) == (40, kind)
