import msgspec
import pytest

from stoker.apps.inference_sweep.functions import SweepRequest, generate
from stoker.apps.inference_sweep.plan import EXAMPLE, read_sweep
from stoker.apps.inference_sweep.run import KEY, format_first_error, make_log_records, make_result_rows, plan_calls
from stoker.errors import ConfigError
from stoker.run_folder import RecordLog

SWEEP = """
data = "rows.csv"
[[models]]
name = "small"
path = "model"
[[prompts]]
name = "plain"
text = "Q: {question} ({topic})\\nA:"
[parameters]
max_new_tokens = [4, 8]
temperature = [0, 0.7]
"""
ROWS = "question,topic\nWhy {topic}?,sky\nHow?,sea\n"


@pytest.fixture
def files(tmp_path):
    def write(sweep=SWEEP, rows=ROWS):
        (tmp_path / "rows.csv").write_text(rows)
        (tmp_path / "sweep.toml").write_text(sweep)
        return tmp_path / "sweep.toml"

    return write


def test_shipped_sweep_file_is_valid():
    sweep = read_sweep(EXAMPLE)
    assert len(sweep.combinations) * len(sweep.rows) == 64
    assert [item.id for item in sweep.rows][:2] == ["capital", "planet"]


def test_sweep_runs_all_combinations_of_its_settings(files, tmp_path):
    (tmp_path / "model").mkdir()
    sweep = read_sweep(files())
    combined = sweep.combinations
    assert [tuple(one.parameters.values()) for one in combined] == [(4, 0.0), (4, 0.7), (8, 0.0), (8, 0.7)]
    assert len({one.digest for one in combined}) == 4
    assert sweep.models[0].path == str(tmp_path / "model")
    assert combined[0].prompt.fill(next(iter(sweep.rows)).fields) == "Q: Why {topic}? (sky)\nA:"
    assert combined[0].name == "small, plain, max_new_tokens 4, temperature 0.0"
    first = read_sweep(files(), limit=1).rows
    assert (len(first), [item.id for item in first]) == (1, ["2"])
    assert first.digest != sweep.rows.digest


def test_empty_cell_adds_no_text_and_prints_a_note(files):
    sweep = read_sweep(files(rows="question,topic\nWhy?,sky\nHow?,\nWho?,\n"))
    assert sweep.prompts[0].fill(list(sweep.rows)[1].fields) == "Q: How? ()\nA:"
    for empty in (None, float("nan"), "  "):
        assert sweep.prompts[0].fill({"question": "Who?", "topic": empty}) == "Q: Who? ()\nA:"
    assert sweep.prompts[0].fill({"question": "Who?", "topic": 0}) == "Q: Who? (0)\nA:"
    (note,) = sweep.rows.notes
    assert note.endswith("rows.csv: topic is empty in 2 of 3 rows (line 3, line 4): the prompt has no text there")
    assert read_sweep(files()).rows.notes == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("[[models]]", "[[modls]]"), "modls is not a setting; did you mean models?"),
        (("max_new_tokens", "max_tokens"), "[parameters] max_tokens is not a setting; did you mean max_new_tokens?"),
        (('name = "plain"', ""), "name is missing"),
        (("[4, 8]", "[4, 0]"), "max_new_tokens[1] must be a whole number of at least 1"),
        (("[4, 8]", "[]"), "max_new_tokens has no value"),
        (("[0, 0.7]", "[0, 0.0]"), "temperature has the same value twice"),
        (("[0, 0.7]", "nan"), "temperature must be a number of at least 0.0"),
        (("[0, 0.7]", "-1"), "temperature must be a number of at least 0.0"),
        (("[0, 0.7]", "1e-9"), "temperature must be 0, or 1e-06 or more"),
        (("{topic}", "{topics}"), "line 2: topics is missing, and the prompt plain needs it"),
        (('data = "rows.csv"', 'data = "no.csv"'), "no.csv: no such file"),
        (
            ('data = "rows.csv"', 'data = "rows.csv"\nid = "name"'),
            "line 2: name must be a text or a whole number (the row's name), and is None",
        ),
        (('text = "Q', 'chat = 1\ntext = "Q'), "[prompts.plain] chat must be true or false"),
        (("[parameters]", '[[models]]\nname = "small"\n[parameters]'), "models 2: small is used twice"),
    ],
)
def test_invalid_sweep_file_is_refused_with_the_fault(files, change, says):
    with pytest.raises(ConfigError) as caught:
        read_sweep(files(SWEEP.replace(*change)))
    assert says in str(caught.value)


def test_rows_with_the_same_id_are_refused(files):
    path = files(SWEEP.replace('"rows.csv"', '"rows.csv"\nid = "topic"'), ROWS + "What?,sky\n")
    with pytest.raises(ConfigError, match=r"line 4: topic sky was already used in line 2"):
        read_sweep(path)


def test_two_names_for_one_model_or_one_prompt_are_refused(files, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "linked").symlink_to("model")
    for path in ("model", "./model", "linked"):
        with pytest.raises(ConfigError, match="models 2: other and small are the same; leave one of them out"):
            read_sweep(files(SWEEP + f'[[models]]\nname = "other"\npath = "{path}"\n'))
    again = '[[prompts]]\nname = "other"\ntext = "Q: {question} ({topic})\\nA:"\n'
    with pytest.raises(ConfigError, match="prompts 2: other and plain are the same"):
        read_sweep(files(SWEEP + again))
    others = '[[models]]\nname = "other"\npath = "model"\ndtype = "float32"\n' + again + "chat = true\n"
    combined = read_sweep(files(SWEEP + others)).combinations
    assert len({one.digest for one in combined}) == len(combined) == 16


def test_model_of_a_sweep_may_take_several_devices(files):
    def swept(devices):
        return read_sweep(files(SWEEP.replace('name = "small"', f'name = "small"\ndevices = {devices}')))

    assert swept(2).models[0].devices == 2
    for wrong in ("0", "true", '"2"'):
        with pytest.raises(ConfigError, match=r"\[models.small\] devices must be a whole number"):
            swept(wrong)


class Toy:
    def chat(self, message):
        return f"<{message}>"

    def generate(self, prompts, *, max_new_tokens, batch_size, temperature, seed):
        for number, prompt in enumerate(prompts):
            if "long" in prompt:
                raise ValueError(f"prompt {number} has 9005 tokens")
        return [
            f"{prompt}!{max_new_tokens},{temperature},{batch_size},{own}"
            for prompt, own in zip(prompts, seed, strict=True)
        ]


def test_other_rows_have_results_if_the_model_rejects_a_row(files, tmp_path):
    sweep = read_sweep(files(rows="question,topic\nWhy?,sky\nlong,sky\nHow?,sea\n"))
    combined = sweep.combinations[:2]
    sweep = msgspec.structs.replace(sweep, combinations=combined)
    with RecordLog(tmp_path / "log", key=KEY) as log, RecordLog(tmp_path / "failed", key=KEY) as failed:
        calls = list(plan_calls(combined, sweep.rows, log, batch_size=8))
        for number, (combination, items) in enumerate(calls):
            texts = tuple(combination.prompt.fill(item.fields) for item in items)
            request = SweepRequest(number, texts, (5, 6, 7), **combination.parameters)
            ids = tuple(item.id for item in items)
            records, unmade = make_log_records(combination, ids, generate.function(Toy(), request))
            log.append(records)
            failed.append(unmade)
        rows = list(make_result_rows(sweep, log, failed))
        again = list(plan_calls(combined, sweep.rows, log, batch_size=8))
        said = format_first_error(sweep, failed)
    assert [(row["id"], row["output"] is None, row["error"]) for row in rows] == 2 * [
        ("2", False, ""),
        ("3", True, "the prompt has 9005 tokens"),
        ("4", False, ""),
    ]
    assert rows[2]["output"] == "Q: How? (sea)\nA:!4,0.0,0,7"
    assert rows[5]["output"] == "Q: How? (sea)\nA:!4,0.7,0,7"
    assert [[item.id for item in items] for _, items in again] == [["3"], ["3"]], (
        "a continued run tries failed rows again"
    )
    assert said == (
        f"{tmp_path / 'rows.csv'}: line 3: row 3 with small, plain, max_new_tokens 4, temperature 0.0:"
        " the prompt has 9005 tokens"
    )
