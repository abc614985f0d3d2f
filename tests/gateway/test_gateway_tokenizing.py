"""`/tokenize` and `/detokenize` count as the model does, without loading it."""

from __future__ import annotations

import pytest
from gateway.asking import chat, model_of

pytestmark = pytest.mark.slow


def test_tokens_of_a_text_are_the_models_and_make_the_text_again(http, client, gateway):
    asked = {"model": "swift", "prompt": "What is two plus two?", "return_token_strs": True}
    found = http.post("/tokenize", json=asked).json()
    assert found.keys() == {"count", "max_model_len", "tokens", "token_strs"}
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == 21
    assert found["max_model_len"] == 2048
    assert http.post("/detokenize", json={"model": "swift", "tokens": found["tokens"]}).json() == {
        "prompt": asked["prompt"]
    }
    assert model_of(gateway, "swift")["state"] == "cold"
    assert chat(client).usage.prompt_tokens == found["count"]


@pytest.mark.parametrize(
    ("address", "body", "param"),
    [
        ("/tokenize", {"prompt": "a"}, "model"),
        ("/tokenize", {"model": "small"}, "prompt"),
        ("/tokenize", {"model": "small", "prompt": 1}, "prompt"),
        ("/tokenize", {"model": "small", "messages": []}, "messages"),
        ("/tokenize", {"model": "gone", "prompt": "a"}, "model"),
        ("/detokenize", {"model": "small", "tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"model": "small", "tokens": [99_999]}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_its_field(http, address, body, param):
    answer = http.post(address, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
