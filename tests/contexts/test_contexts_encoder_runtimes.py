"""Runtimes of the ready-made encoder: every batch in one shape, and the results of any other encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_encoder import write_tiny_encoder

from stoker.contexts import ambient, encoder
from stoker.contexts.loading import load_context, slots_of
from stoker.contexts.model_source import longest_of_folder, longest_text
from stoker.errors import InputTooLongError, RecipeError

TEXTS = ["paris lies in france", "water boils", "paris", "", "water boils and paris lies in france"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_tiny_encoder(folder)
    return folder


def load(folder: Path, **options: Any) -> Any:
    """What a library does."""
    recipe = encoder(folder, **options)
    try:
        ambient.enter_library(device="cpu")
        return load_context(recipe, {ref.name: ref.source for ref in recipe.objects})
    finally:
        ambient.leave_library()


@pytest.fixture(scope="module")
def dynamic(folder: Path) -> Any:
    return load(folder)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_runtime_embeds_as_any_encoder_does(folder: Path, dynamic: Any, batch: int, pooling: str) -> None:
    import numpy as np

    found, tokens = load(folder, length=12, batch=batch).embed_array(TEXTS, pooling=pooling, normalize=False)
    expected, same_tokens = dynamic.embed_array(TEXTS, pooling=pooling, normalize=False)
    assert np.allclose(found, expected, atol=1e-5)
    assert tokens == same_tokens


def test_every_batch_has_the_shape_of_the_runtime(folder: Path) -> None:
    model = load(folder, length=12, batch=4)
    shapes, network = [], model._networks["embed"]

    def spy(**inputs: Any) -> Any:
        shapes.append({name: tuple(tensor.shape) for name, tensor in inputs.items()})
        return network(**inputs)

    model._networks["embed"] = spy
    model.embed(TEXTS, batch_size=32)
    model.embed(TEXTS[:1])
    names = ("input_ids", "attention_mask", "token_type_ids")
    assert shapes == [dict.fromkeys(names, (4, 12))] * 3


def test_a_runtime_classifies_as_any_encoder_does(tmp_path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    config = BertConfig.from_pretrained(folder, num_labels=3)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "judge")
    pairs = [("paris lies in france", "water boils"), ("water", "paris")]
    expected = load(tmp_path / "judge").classify(pairs)
    for found, shares in zip(load(tmp_path / "judge", length=16, batch=3).classify(pairs), expected, strict=True):
        assert found == pytest.approx(shares, abs=1e-5)


def test_a_text_that_is_longer_than_the_runtime_is_refused_with_both_lengths(folder: Path) -> None:
    model = load(folder, length=8)
    with pytest.raises(InputTooLongError, match="text 1 comes to 11 tokens; this runtime takes 8") as raised:
        model.embed(["paris", "paris lies in " * 3])
    assert (raised.value.tokens, raised.value.longest) == (11, 8)
    assert isinstance(raised.value, ValueError), "programs catch it as they catch a text that the model does not read"
    assert len(model.embed(["paris lies in " * 2])) == 1, "a text of the runtime's length is taken"


def test_the_beginning_of_a_long_text_counts_if_that_is_asked_for(folder: Path, dynamic: Any) -> None:
    import numpy as np

    cut = load(folder, length=8).embed(["paris lies in " * 3], truncate=True)
    assert np.allclose(cut, dynamic.embed(["paris lies in " * 2]), atol=1e-5)


def test_the_recipe_says_the_length(folder: Path) -> None:
    plain, short, long = encoder(folder), encoder(folder, length=8), encoder(folder, length=16)
    assert [recipe.longest_input for recipe in (plain, short, long)] == [0, 8, 16]
    assert len({recipe.key for recipe in (plain, short, long, encoder(folder, length=8, batch=2))}) == 4
    assert encoder(folder, length=8).key == short.key
    assert "length=8" in short.arguments


def test_a_runtime_runs_as_many_calls_as_its_batch_has_texts(folder: Path) -> None:
    model = load(folder, length=8)
    assert slots_of(encoder(folder, length=8), model, device_memory_bytes=0) == 1
    assert slots_of(encoder(folder), load(folder, length=8, batch=4), device_memory_bytes=0) == 4
    assert (model.longest, model.is_compiled) == (8, False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"length": 2}, r"length=2\): a whole number of tokens, 3 or more"),
        ({"length": -8}, r"length=-8\): a whole number"),
        ({"length": 8.0}, r"length=8\.0\): a whole number"),
        ({"length": True}, r"length=True\): a whole number"),
        ({"length": "8"}, r"length='8'\): a whole number"),
        ({"length": 41}, r"length=41\): small reads 40 tokens at the most"),
        ({"length": 8, "batch": 0}, r"batch=0\): a whole number of texts"),
        ({"length": 8, "compiled": "yes"}, r"compiled='yes'\): True, False or"),
        ({"length": 8, "compiled": 1}, r"compiled=1\): True, False or"),
        ({"batch": 4}, r"batch=4\) is a runtime's: name its length, too"),
        ({"compiled": True}, r"compiled=True\) is a runtime's"),
    ],
    ids=str,
)
def test_options_that_a_runtime_cannot_have_are_refused(folder: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        encoder(folder, **options)


def test_a_length_that_only_the_loaded_model_refuses_is_refused_there(dynamic: Any) -> None:
    with pytest.raises(RecipeError, match="a runtime of 41 tokens, and the model reads 40 at the most"):
        dynamic.as_runtime(41)


def test_what_a_folder_says_is_what_the_loaded_model_reads(folder: Path, dynamic: Any, tmp_path: Path) -> None:
    assert longest_of_folder(str(folder)) == dynamic.longest == 40
    assert longest_of_folder(str(tmp_path / "nowhere")) == 0
    (tmp_path / "config.json").write_text("[")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    assert longest_of_folder(str(tmp_path)) == 24


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (("bert", 512, 0, 10**30, 0), 512),
        (("roberta", 514, 1, 512, 0), 512),
        (("roberta", 514, 1, 10**30, 0), 512),
        (("bert", 512, 0, 512, 256), 256),
        (("t5", 0, 0, 10**30, 0), 0),
    ],
)
def test_the_least_of_all_limits_counts(facts: tuple[str, int, int, int, int], expected: int) -> None:
    kind, positions, padding, tokenizer, sentences = facts
    found = longest_text(
        model_type=kind, positions=positions, padding=padding, tokenizer=tokenizer, sentences=sentences
    )
    assert found == expected
