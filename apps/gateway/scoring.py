"""`/v1/score` and `/v1/rerank` in vLLM's format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from stoker.apps.common.openai_requests import IGNORED, ApiRequest, Endpoint, Note, parse_json_object, read_model
from stoker.apps.common.refusals import expect, expect_texts, expect_whole_number, refused, required

SCORE, RERANK = "/v1/score", "/v1/rerank"
_FIELDS = {SCORE: ("model", "text_1", "text_2"), RERANK: ("model", "query", "documents", "top_n", "return_documents")}
_MOST_TEXTS = 2048


class Scoring(msgspec.Struct, frozen=True):
    """Options of a request. `most`: maximum number of documents, 0 = all; `shows`: return texts."""

    address: str
    most: int = 0
    shows: bool = True

    def body(self, request: ApiRequest, scores: Sequence[float], *, tokens: int, name: str, model: str) -> Any:
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        if self.address == SCORE:
            data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
            head = {"id": f"score-{name}", "object": "list", "created": int(time.time()), "model": model}
            return {**head, "data": data, "usage": usage}
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.most or None]
        results: list[dict[str, Any]] = []
        for index in order:
            document = {"document": {"text": request.texts[request.pairs[index][1]]}} if self.shows else {}
            results.append({"index": index, **document, "relevance_score": scores[index]})
        return {"id": f"rerank-{name}", "model": model, "results": results, "usage": usage}


def read_scoring(
    data: bytes, address: str, *, name: str, ignored: Note = lambda _field: None
) -> tuple[ApiRequest, Scoring]:
    """Raises RequestRefused."""
    body = {field: value for field, value in parse_json_object(data).items() if value is not None}
    for field in body.keys() - _FIELDS[address]:
        if field not in IGNORED:
            what = f"is not a known field here; the fields are {', '.join(_FIELDS[address])}"
            raise refused(field, what, "unknown_parameter")
        ignored(field)
    if address == SCORE:
        left = expect_texts(required(body, "text_1"), "text_1", most=_MOST_TEXTS)
        right, scoring = expect_texts(required(body, "text_2"), "text_2", most=_MOST_TEXTS), Scoring(address)
        if len(left) not in (1, len(right)):
            what = f"has {len(left)} texts, and text_2 has {len(right)}; give one text, or as many as text_2"
            raise refused("text_1", what, "invalid_value")
    else:
        left = expect_texts(expect(required(body, "query"), str, "query"), "query")
        right = expect_texts(required(body, "documents"), "documents", most=_MOST_TEXTS)
        most = expect_whole_number(body.get("top_n", 0), "top_n", least=0, most=1 << 31)
        scoring = Scoring(address, most, expect(body.get("return_documents", True), bool, "return_documents"))
    first = [0] * len(right) if len(left) == 1 else range(len(left))
    pairs = tuple(zip(first, range(len(left), len(left) + len(right)), strict=True))
    texts, model = (*left, *right), read_model(body)
    return ApiRequest(name, 0, Endpoint.EMBEDDINGS, model, texts=texts, pairs=pairs), scoring
