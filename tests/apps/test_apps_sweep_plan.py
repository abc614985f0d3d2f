import pytest

from stoker.apps.common.record_log import RecordLog
from stoker.apps.inference_sweep.generate import Request, Written, generate
from stoker.apps.inference_sweep.plan import EXAMPLE, combinations, digest_items, read_sweep
from stoker.apps.inference_sweep.run import KEY, make_records, make_rows, plan_calls
from stoker.errors import ConfigError, StokerError

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


def test_the_shipped_example():
    sweep = read_sweep(EXAMPLE)
    assert len(combinations(sweep)) * len(sweep.items) == 64
    assert [item.id for item in sweep.items][:2] == ["capital", "planet"]


def test_combinations_are_the_whole_grid(files, tmp_path):
    (tmp_path / "model").mkdir()
    sweep = read_sweep(files())
    combined = combinations(sweep)
    assert [tuple(one.parameters.values()) for one in combined] == [(4, 0.0), (4, 0.7), (8, 0.0), (8, 0.7)]
    assert len({one.digest for one in combined}) == 4
    assert sweep.models[0].path == str(tmp_path / "model")
    assert combined[0].prompt.fill(sweep.items[0].fields) == "Q: Why {topic}? (sky)\nA:"
    assert combined[0].name == "small, plain, max_new_tokens 4, temperature 0.0"
    assert len(read_sweep(files(), limit=1).items) == 1
    assert digest_items(sweep.items) != digest_items(sweep.items[:1])


def test_an_empty_cell_is_no_text_and_is_told_of(files):
    sweep = read_sweep(files(rows="question,topic\nWhy?,sky\nHow?,\nWho?,\n"))
    assert sweep.prompts[0].fill(sweep.items[1].fields) == "Q: How? ()\nA:"
    assert sweep.prompts[0].fill({"question": "Who?", "topic": None}) == "Q: Who? ()\nA:"
    (note,) = sweep.notes
    assert note.endswith("rows.csv: topic is empty in 2 of 3 rows (line 3, line 4): the prompt has no text there")
    assert read_sweep(files()).notes == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("[[models]]", "[[modls]]"), "modls is not a setting; did you mean models?"),
        (('path = "model"', 'pth = "model"'), "models 1: pth is not a setting; did you mean path?"),
        (("max_new_tokens", "max_tokens"), "parameters: max_tokens is not a setting; did you mean max_new_tokens?"),
        (('name = "plain"', ""), "prompts 1: name is missing"),
        (("[4, 8]", "[4, 0]"), "max_new_tokens is 0; it must be a whole number, 1 or more"),
        (("[4, 8]", "[4, 4.5]"), "max_new_tokens is 4.5; it must be a whole number"),
        (("[4, 8]", "[4, true]"), "max_new_tokens is True"),
        (("[4, 8]", "[]"), "max_new_tokens has no value"),
        (("[0, 0.7]", "[0, 0.0]"), "temperature has twice the same value"),
        (("[0, 0.7]", "nan"), "temperature is nan; it must be a number, 0.0 or more (from 1e-06 on, if it is not 0)"),
        (("[0, 0.7]", "inf"), "temperature is inf"),
        (("[0, 0.7]", "1e-320"), "temperature is 1e-320"),
        (("[0, 0.7]", "-1"), "temperature is -1; it must be a number, 0.0 or more"),
        (("{topic}", "{topics}"), "line 2: topics is missing, and the prompt plain wants it"),
        (('data = "rows.csv"', 'data = "no.csv"'), "no.csv: no such file"),
        (('data = "rows.csv"', ""), "top: data is missing"),
        (('data = "rows.csv"', 'data = "rows.csv"\nid = "name"'), "line 2: name must name the row, and is None"),
        (('text = "Q', 'chat = 1\ntext = "Q'), "prompts 1: chat must be true or false"),
        (("[[prompts]]", "prompts = 3\n[x]"), "x is not a setting"),
        (("data =", "data ="), None),
    ],
)
def test_a_bad_sweep_file_is_named(files, change, says):
    path = files(SWEEP.replace(*change))
    if says is None:  # the unchanged file is fine: what fails above fails for its change
        assert read_sweep(path).models[0].name == "small"
        return
    with pytest.raises(ConfigError) as caught:
        read_sweep(path)
    assert says in str(caught.value)


def test_rows_named_twice(files):
    path = files(SWEEP.replace('"rows.csv"', '"rows.csv"\nid = "topic"'), ROWS + "What?,sky\n")
    with pytest.raises(ConfigError, match=r"line 4: topic sky was already used in line 2"):
        read_sweep(path)


def test_models_of_one_name(files):
    with pytest.raises(ConfigError, match="models 2: small stands there twice"):
        read_sweep(files(SWEEP + '[[models]]\nname = "small"\n'))


def test_what_is_left_and_what_comes_of_it(files, tmp_path):
    class Toy:
        def chat(self, message):
            return f"<{message}>"

        def generate(self, prompts, *, max_new_tokens, batch_size, temperature, seed):
            return [f"{prompt}!{max_new_tokens},{temperature},{batch_size},{seed}" for prompt in prompts]

    sweep = read_sweep(files())
    combined = combinations(sweep)
    with RecordLog(tmp_path / "log", key=KEY) as log:
        calls = plan_calls(combined, sweep.items, log, batch_size=8)
        assert len(calls) == 4
        for number, call in enumerate(calls[:2]):
            texts = tuple(call.combination.prompt.fill(item.fields) for item in call.items)
            parameters = call.combination.parameters
            log.append(
                make_records(call, generate(Toy(), Request(number, texts, (5, 6), **parameters, tensor_batch=2)))
            )
        with pytest.raises(StokerError, match="no result for row 2 with small, plain, max_new_tokens 8"):
            make_rows(combined, sweep.items, log)
        assert [call.combination.digest for call in plan_calls(combined, sweep.items, log, batch_size=8)] == [
            one.digest for one in combined[2:]
        ]
        rows = make_rows(combined[:2], sweep.items, log)
    assert [(row["id"], row["temperature"]) for row in rows] == [("2", 0.0), ("3", 0.0), ("2", 0.7), ("3", 0.7)]
    assert rows[3]["output"] == "Q: How? (sea)\nA:!4,0.7,2,6"
    assert rows[1]["output"] == "Q: How? (sea)\nA:!4,0.0,2,0"
    chatted = generate(Toy(), Request(0, ("a",), (1,), max_new_tokens=4, temperature=0.0, chat=True))
    assert chatted.texts == ["<a>!4,0.0,1,0"]
    with pytest.raises(StokerError, match="2 rows went out and 1 came back"):
        make_records(calls[0], Written(0, ["x"], 0.0, 0.0, "w"))
