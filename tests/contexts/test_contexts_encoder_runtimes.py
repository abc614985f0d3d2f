from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from new_process import run_python
from tiny_encoder import load_encoder as load

from stoker.contexts import EncoderProfile, encoder, encoder_family, keep_encoder_profile, token_counter
from stoker.contexts.length_profiles import LengthTime
from stoker.contexts.loading import count_slots
from stoker.contexts.model_source import max_text_tokens, read_max_text_tokens
from stoker.errors import InputTooLongError, RecipeError

TEXTS = ["paris lies in france", "water boils", "paris", "", "water boils and paris lies in france"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def dynamic(folder: Path) -> Any:
    return load(folder)


@pytest.mark.parametrize(("pooling", "batch"), [("mean", 4), ("cls", 1), ("last", 4)])
def test_fixed_length_runtime_embeds_like_a_dynamic_encoder(
    folder: Path, dynamic: Any, batch: int, pooling: str
) -> None:
    found, tokens = load(folder, length=12, batch=batch).embed_array(TEXTS, pooling=pooling, normalize=False)
    expected, same_tokens = dynamic.embed_array(TEXTS, pooling=pooling, normalize=False)
    assert np.allclose(found, expected, atol=1e-5)
    assert tokens == same_tokens


def test_text_longer_than_the_runtime_is_refused_or_truncated(folder: Path, dynamic: Any) -> None:
    model = load(folder, length=8)
    with pytest.raises(InputTooLongError, match="text 1 has 11 tokens; this runtime accepts at most 8") as raised:
        model.embed(["paris", "paris lies in " * 3])
    assert (raised.value.tokens, raised.value.longest) == (11, 8)
    assert isinstance(raised.value, ValueError), "it is caught like the error for a text that the model cannot read"
    fits = model.embed(["paris lies in " * 2])
    assert np.allclose(fits, dynamic.embed(["paris lies in " * 2]), atol=1e-5), "its length is that of the runtime"
    assert np.allclose(model.embed(["paris lies in " * 3], truncate=True), fits, atol=1e-5)


def test_recipe_declares_the_longest_input_of_its_runtime(folder: Path) -> None:
    plain, short, long = encoder(folder), encoder(folder, length=8), encoder(folder, length=16)
    assert [recipe.longest_input for recipe in (plain, short, long)] == [0, 8, 16]
    assert len({recipe.key for recipe in (plain, short, long, encoder(folder, length=8, batch=2))}) == 4
    assert encoder(folder, length=8).key == short.key
    assert "length=8" in short.arguments
    assert count_slots(short, load(folder, length=8), device_memory_bytes=0) == 1
    assert count_slots(plain, load(folder, length=8, batch=4), device_memory_bytes=0) == 4, "a call for each text"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"length": 2}, r"length=2\): write a whole number of tokens, 3 or more"),
        ({"length": 8.0}, r"length=8\.0\): write a whole number"),
        ({"length": 41}, r"length=41\): small accepts at most 40 tokens"),
        ({"length": 8, "batch": 0}, r"batch=0\): write a whole number of texts"),
        ({"length": 8, "compiled": "yes"}, r"compiled='yes'\): write True, False or"),
        ({"batch": 4}, r"batch=4\): only a runtime has this option; give length=, too"),
        ({"compiled": True}, r"compiled=True\): only a runtime has this option"),
    ],
    ids=str,
)
def test_options_that_a_runtime_does_not_support_are_refused(folder: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        encoder(folder, **options)


def test_token_limit_of_a_folder_equals_that_of_the_loaded_model(folder: Path, dynamic: Any, tmp_path: Path) -> None:
    assert read_max_text_tokens(str(folder)) == dynamic.longest == 40
    with pytest.raises(RecipeError, match="the runtime takes 41 tokens, and the model accepts at most 40"):
        dynamic.as_runtime(41)
    assert read_max_text_tokens(str(tmp_path / "nowhere")) == 0
    (tmp_path / "config.json").write_text("[")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    assert read_max_text_tokens(str(tmp_path)) == 24


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
def test_smallest_of_all_length_limits_applies(facts: tuple[str, int, int, int, int], expected: int) -> None:
    kind, positions, padding, tokenizer, sentences = facts
    found = max_text_tokens(
        model_type=kind, positions=positions, padding=padding, tokenizer=tokenizer, sentences=sentences
    )
    assert found == expected


COUNTED = ["", "paris", "Paris lies in France and water boils", "unheard of", "paris " * 60, "naïve — ☃", "  water\n"]
PROFILE = EncoderProfile(
    lengths=(LengthTime(8, 0.001, 0.0), LengthTime(16, 0.002, 0.0), LengthTime(32, 0.004, 0.0)), name="", dtype="auto",
    computed_dtype="float32", compiled="auto", is_compiled=True, device="NVIDIA H100", threads=1, torch="2.13.0",
    repeats=30, measured_at=1e9,
)  # fmt: skip


def test_login_node_counts_the_same_tokens_as_the_model(folder: Path) -> None:
    model, count = load(folder), token_counter(str(folder))
    assert [count(text) for text in COUNTED] == [model.count_tokens(text) for text in COUNTED]
    assert count(COUNTED[1]) == 3, "with the tokens around it"


def test_call_counts_the_tokens_of_its_longest_text(folder: Path) -> None:
    count = token_counter(str(folder))
    assert count(["paris", "paris lies in france", "water boils"]) == 6
    assert count([]) == 0
    assert count(("paris lies", "water")) == 6, "a pair of texts is read as one"
    assert count([("paris lies", "water"), ("paris", "water")]) == 6


@pytest.mark.parametrize("given", [7, ["paris", 7], ("a", "b", "c")], ids=str)
def test_counting_tokens_of_a_non_text_value_raises_an_error(folder: Path, given: Any) -> None:
    with pytest.raises(RecipeError, match="cannot be counted: the function's first argument must be a text"):
        token_counter(str(folder))(given)


def test_model_without_a_tokenizer_file_names_the_missing_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for text in (None, "{"):
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(RecipeError, match=r"tokenizer of .* cannot be read .*tokenizer\.json"):
            token_counter(str(tmp_path))("paris")


def test_recipes_and_token_counts_import_no_gpu_library(folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys; import stoker.contexts.encoder; from stoker import encoder, encoder_family;"
        f" encoder({str(folder)!r}); stoker.contexts.encoder({str(folder)!r});"
        f" family = encoder_family({str(folder)!r}, lengths=[8, 16]);"
        " assert 'tokenizers' not in sys.modules; assert family.count(['paris']) == 3;"
        " assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    run_python(program)


def test_call_may_use_all_runtimes_that_are_long_enough(folder: Path) -> None:
    family = encoder_family(folder, lengths=[8, 16, 40], batch=2, memory="1 GB")
    assert family.lengths == (8, 16, 40)
    assert family.recipes == tuple(encoder(folder, length=tokens, batch=2, memory="1 GB") for tokens in (8, 16, 40))
    assert family.count is not None
    counted = family.count(["water boils", "paris lies in " * 3])
    assert counted == 11
    assert [recipe.longest_input for recipe in family.serving(counted)] == [16, 40]
    with pytest.raises(InputTooLongError, match="the input has 62 tokens, and the longest runtime"):
        family.serving(family.count("paris " * 60))
    cut = encoder_family(folder, lengths=[8, 16], truncate=True)
    assert cut.count is not None
    assert [recipe.longest_input for recipe in cut.serving(cut.count(["paris " * 60]))] == [16]


def test_lengths_are_chosen_by_the_latency_profile(folder: Path) -> None:
    keep_encoder_profile(folder, PROFILE)
    assert encoder_family(folder).lengths == (8, 16, 32)
    assert encoder_family(folder, texts=["paris lies"] * 99 + ["water " * 20]).lengths == (8, 32)
    assert encoder_family(folder, texts=["paris " * 60], truncate=True).lengths == (32,)
    with pytest.raises(RecipeError, match="every expected text has more tokens"):
        encoder_family(folder, texts=["paris " * 60])


def test_missing_profile_error_explains_how_to_measure_a_profile(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"give lengths=\[64, .*stoker run encoder_lengths --model"):
        encoder_family(folder)
    keep_encoder_profile(folder, PROFILE)
    with pytest.raises(RecipeError, match=r"--dtype float16 --compiled yes$"):
        encoder_family(folder, dtype="float16", compiled=True)
    keep_encoder_profile(folder, msgspec.structs.replace(PROFILE, compiled=False))
    assert encoder_family(folder, compiled=False).lengths == (8, 16, 32)


@pytest.mark.parametrize("lengths", [[], [8, 8], [2, 8], [8, 16.0], [True, 8], "8"], ids=str)
def test_invalid_lengths_are_refused(folder: Path, lengths: Any) -> None:
    with pytest.raises(RecipeError, match=r"encoder_family\(lengths=.*: write whole numbers of tokens, 3 or more"):
        encoder_family(folder, lengths=lengths)


def test_invalid_encoder_family_arguments_raise_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="small accepts at most 40 tokens"):
        encoder_family(folder, lengths=[8, 64])
    with pytest.raises(RecipeError, match="there is no model at"):
        encoder_family(tmp_path / "nowhere", lengths=[8])
    with pytest.raises(RecipeError, match="not both"):
        encoder_family(folder, lengths=[8], texts=["paris"])
    with pytest.raises(RecipeError, match=r"lengths=\[\.\.\.\]"):
        encoder_family(folder, length=8)
    shutil.copytree(folder, tmp_path / "sentences")
    (tmp_path / "sentences" / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
    with pytest.raises(RecipeError, match="sentences accepts at most 12 tokens"):
        encoder_family(tmp_path / "sentences", lengths=[8, 16])
