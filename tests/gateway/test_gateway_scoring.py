"""`/v1/score` and `/v1/rerank`, by embeddings and by a cross-encoder, as Transformers computes them."""

from __future__ import annotations

import json

import pytest
from gateway.asking import client_of  # skips this file if a package is missing
from lazily import lazily
from tiny_encoder import write_tiny_encoder

from stoker.apps.common.refusals import RequestRefused
from stoker.apps.gateway.scoring import RERANK, SCORE, read_scoring

torch, transformers = lazily("torch", "transformers")
pytestmark = pytest.mark.slow
MODELS = """
[models.vectors]
path = "models/encoder"
kind = "embedding"

[models.cross]
path = "models/cross"
kind = "embedding"

[models.labels]
path = "models/labels"
kind = "embedding"
"""
QUERY, DOCUMENTS = "paris in france", ["water boils", "paris lies in france", "france"]


@pytest.fixture(scope="module")
def write_models():
    def write(folder):
        (folder / "models.toml").write_text(MODELS)
        write_tiny_encoder(folder / "models" / "encoder")
        write_tiny_encoder(folder / "models" / "cross", head=True, num_labels=1)
        write_tiny_encoder(folder / "models" / "labels", head=True, num_labels=3)

    return write


def cross_scores(folder, query, documents):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = tokenizer([query] * len(documents), documents, padding=True, return_tensors="pt")
    with torch.inference_mode():
        return torch.sigmoid(model(**rows).logits[:, 0]).tolist(), int(rows["attention_mask"].sum())


@pytest.mark.parametrize("name", ["vectors", "labels"])
def test_scores_of_an_encoder_are_cosines_of_its_embeddings(gateway, http, name):
    with client_of(gateway) as client:
        found = client.embeddings.create(model=name, input=[QUERY, *DOCUMENTS])
    query, *rows = (torch.tensor(each.embedding) for each in found.data)
    expected = [torch.cosine_similarity(query, row, dim=0).item() for row in rows]
    answer = http.post(SCORE, json={"model": name, "text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert answer["id"].startswith("score-")
    assert (answer["object"], answer["model"]) == ("list", name)
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(n, "score") for n in range(3)]
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-5)
    assert answer["usage"] == {"prompt_tokens": found.usage.prompt_tokens, "total_tokens": found.usage.prompt_tokens}
    pairs = http.post(SCORE, json={"model": name, "text_1": [QUERY] * 3, "text_2": DOCUMENTS}).json()
    assert [each["score"] for each in pairs["data"]] == pytest.approx(expected, abs=1e-5)


def test_scores_of_a_cross_encoder_are_its_own(gateway, http):
    expected, tokens = cross_scores(gateway.folder / "models" / "cross", QUERY, DOCUMENTS)
    answer = http.post(SCORE, json={"model": "cross", "text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-5)
    assert answer["usage"]["total_tokens"] == tokens


def test_a_rerank_lists_the_best_documents_first(gateway, http):
    expected, _ = cross_scores(gateway.folder / "models" / "cross", QUERY, DOCUMENTS)
    order = sorted(range(3), key=lambda index: -expected[index])
    asked = {"model": "cross", "query": QUERY, "documents": DOCUMENTS, "user": "ana"}
    answer = http.post(RERANK, json=asked).json()
    assert answer["id"].startswith("rerank-")
    assert [each["index"] for each in answer["results"]] == order
    assert [each["document"]["text"] for each in answer["results"]] == [DOCUMENTS[index] for index in order]
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == pytest.approx([expected[index] for index in order], abs=1e-5)
    first = http.post(RERANK, json={**asked, "top_n": 1, "return_documents": False}).json()
    assert first["results"] == [{"index": order[0], "relevance_score": pytest.approx(max(expected), abs=1e-5)}]


@pytest.mark.parametrize("name", ["vectors", "cross"])
def test_a_text_that_is_too_long_to_score_is_refused(http, name):
    refused = http.post(RERANK, json={"model": name, "query": QUERY, "documents": ["paris", "water " * 60]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_dimensions_beyond_the_models_own_are_refused(http):
    refused = http.post("/v1/embeddings", json={"model": "vectors", "input": "paris", "dimensions": 64})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "dimensions")
    assert "dimensions is 64, and this model's vectors have 32 numbers" in error["message"]


@pytest.mark.parametrize(
    ("address", "body", "param"),
    [
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        (SCORE, {"text_1": "a", "text_2": "b", "top_n": 1}, "top_n"),
        (SCORE, {"text_1": "a", "text_2": "b", "model": 3}, "model"),
        (RERANK, {"query": ["a"], "documents": ["b"]}, "query"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"] * 2049}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        (RERANK, {"query": "a", "documents": ["b"], "return_documents": "no"}, "return_documents"),
    ],
)
def test_scores_that_cannot_be_had_are_refused_by_field(address, body, param):
    with pytest.raises(RequestRefused) as refused:
        read_scoring(json.dumps({"model": "m", **body}).encode(), address, name="r")
    assert refused.value.error.param == param
    assert refused.value.error.message.startswith(param)
