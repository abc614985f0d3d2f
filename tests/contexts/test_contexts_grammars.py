from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_tiny_model

if not all(map(find_spec, ("torch", "transformers", "llguidance"))):
    pytest.skip("needs the extra models", allow_module_level=True)

from stoker.contexts import load_causal_lm
from stoker.contexts.inference import token_rules as grammars
from stoker.contexts.inference.adapter import Sampling

PERSON = json.dumps(
    {
        "type": "object", "additionalProperties": False, "required": ["age", "color", "name"],
        "properties": {
            "age": {"type": "integer", "minimum": 0, "maximum": 99}, "color": {"enum": ["red", "green"]},
            "name": {"type": "string", "maxLength": 4},
        },
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("grammars") / "tiny"
    write_tiny_model(folder, layers=1)
    loaded = {engine: load_causal_lm(str(folder), engine=engine) for engine in ("continuous", "static")}
    yield loaded
    for each in loaded.values():
        each.close()


@pytest.fixture
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    return models[getattr(request, "param", "continuous")]


both_engines = pytest.mark.parametrize("model", ["continuous", "static"], indirect=True)


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        person.keys() == {"age", "color", "name"} and 0 <= person["age"] <= 99 and person["color"] in ("red", "green")
    )


@both_engines
def test_every_text_of_a_mixed_batch_follows_its_schema(model: Any) -> None:
    plain = model.complete("Once", max_new_tokens=30, temperature=1.0)
    found: dict[int, Any] = {}

    def write(seed: int) -> None:
        schema = PERSON if seed % 2 else ""
        found[seed] = model.complete(
            "Once", max_new_tokens=300 if schema else 30, temperature=1.0, seed=seed, json_schema=schema
        )

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == plain
    texts = [found[seed] for seed in range(1, 8, 2)]
    assert [text.finish_reason for text in texts] == ["stop"] * 4
    assert all(is_person(text.text) for text in texts)
    assert len({text.text for text in texts}) == 4
    assert model.complete("Once", max_new_tokens=300, temperature=1.0, seed=3, json_schema=PERSON) == found[3]


@both_engines
def test_streamed_text_follows_its_json_schema(model: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 300, "temperature": 1.0, "seed": 5, "json_schema": PERSON}
    pieces = list(model.stream_completion("Once", **options))
    assert "".join(piece.text for piece in pieces) == model.complete("Once", **options).text
    assert pieces[-1].finish_reason == "stop"
    assert is_person("".join(piece.text for piece in pieces))
    found = model.complete("Once", max_new_tokens=5, json_schema=PERSON)
    assert (found.finish_reason, found.completion_tokens) == ("length", 5)
    assert all(is_person(text) for text in model.generate(["One", "Two"], max_new_tokens=300, json_schema=PERSON))


@pytest.mark.parametrize(
    ("option", "value", "pattern"),
    [
        ("regex", r"[0-9]{3}-[a-f]{2}", r"\d{3}-[a-f]{2}"),
        ("choice", ["red", "green \"'"], "red|green \"'"),
        ("grammar", 'start: "a" | "b" start', "b*a"),
        ("grammar", 'root ::= "yes" | "no"', "yes|no"),
    ],
)
def test_generated_text_follows_a_regex_choice_or_grammar(model: Any, option: str, value: Any, pattern: str) -> None:
    found = model.complete("Once", max_new_tokens=60, temperature=1.0, engine_options={option: value})
    assert re.fullmatch(pattern, found.text)
    assert found.finish_reason == "stop"
    with pytest.raises(ValueError, match=f"one of json_schema and {option}"):
        model.complete("Once", json_schema="{}", engine_options={option: value})


DEEP = "(" * 5_000 + "a" + ")" * 5_000


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("json_schema", "{", "cannot be compiled"),
        ("json_schema", '{"type": "foo"}', "Invalid type: foo"),
        ("json_schema", '{"$ref": "#"}', "no text follows it"),
        ("json_schema", "[" * 200 + "]" * 200, "cannot be compiled"),
        ("json_schema", json.dumps({"const": "x" * 600_000}), "at most 500,000"),
        ("regex", "(a", "unclosed group"),
        ("regex", DEEP, "cannot be compiled"),
        ("grammar", "start: other", "unknown name"),
        ("choice", "red", "a list of non-empty texts"),
    ],
)
def test_format_that_cannot_be_compiled_is_refused_by_name(model: Any, option: str, value: Any, says: str) -> None:
    given = {option: value} if option == "json_schema" else {"engine_options": {option: value}}
    with pytest.raises(ValueError, match=says) as refused:
        model.complete("Once", **given)
    assert refused.value.option == option
    assert model.complete("Once", max_new_tokens=2).completion_tokens == 2


@both_engines
def test_format_with_too_many_states_fails_only_its_request(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token multiplies the number of possible parses in this grammar."""
    monkeypatch.setattr(grammars, "_LLGUIDANCE_LIMITS", {"max_items_in_row": 30})
    options = {"grammar": 'start: item\nitem: "a" | item item', "min_tokens": 100}
    with pytest.raises(ValueError, match="cannot be continued within its grammar") as refused:
        model.complete("Once", max_new_tokens=200, engine_options=options)
    assert refused.value.option == "grammar"
    assert model.complete("Once", max_new_tokens=2).completion_tokens == 2


def test_unreadable_tokenizer_and_missing_package_are_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for tokenizer, says in (
        (object(), "llguidance cannot read this model's tokenizer"),
        (model.tokenizer, "pip install"),
    ):
        with pytest.raises(ValueError, match=says):
            grammars.Grammars(tokenizer, ends=frozenset({0})).create_matcher(Sampling(json_schema="{}"))
        monkeypatch.setitem(sys.modules, "llguidance.hf", None)


def test_model_without_an_end_token_ends_with_its_schema(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny", layers=1, ends=False)
    model = load_causal_lm(str(tmp_path / "tiny"))
    found = model.complete("Once", max_new_tokens=300, temperature=1.0, json_schema=PERSON)
    assert found.finish_reason == "stop"
    assert is_person(found.text)
    model.close()
