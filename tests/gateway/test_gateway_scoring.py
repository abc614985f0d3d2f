from __future__ import annotations

import json

import pytest

pytest.importorskip("starlette")

from stoker.apps.common.refusals import RequestRefused
from stoker.apps.gateway.scoring import RERANK, SCORE, read_scoring


@pytest.mark.parametrize(
    ("address", "body", "param"),
    [
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        (SCORE, {"text_1": "a", "text_2": "b", "top_n": 1}, "top_n"),
        (RERANK, {"query": ["a"], "documents": ["b"]}, "query"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"] * 2049}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
def test_error_for_a_wrong_score_request_names_the_field(address, body, param):
    with pytest.raises(RequestRefused) as refused:
        read_scoring(json.dumps({"model": "m", **body}).encode(), address, name="r")
    assert refused.value.error.param == param
    assert refused.value.error.message.startswith(param)
