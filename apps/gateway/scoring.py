"""`/v1/score` and `/v1/rerank` in vLLM's format: scores for pairs of texts, or for a query and documents.

A cross-encoder (a classifier with one label) computes the score. For other encoders, the score is the cosine of the
embeddings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from stoker.apps.common.openai_requests import (
    IGNORED,
    ApiRequest,
    Endpoint,
    Note,
    parse_json_object,
    parse_request_body,
)
from stoker.apps.common.refusals import refused, shown

SCORE, RERANK = "/v1/score", "/v1/rerank"
_FIELDS = {
    SCORE: ("model", "text_1", "text_2"),
    RERANK: ("model", "query", "documents", "top_n", "return_documents"),
}
_MOST_TEXTS = 2048


class Scoring(msgspec.Struct, frozen=True):
    """Options of a request for scores. `most`: maximum number of documents, 0 = all; `shows`: True to return texts."""

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
    """Parse the body of a request. Raises RequestRefused. `ignored`: called with the name of each ignored field."""
    body = {field: value for field, value in parse_json_object(data).items() if value is not None}
    for field in body.keys() - _FIELDS[address]:
        if field not in IGNORED:
            what = f"is not a known field here; there are {', '.join(_FIELDS[address])}"
            raise refused(field, what, "unknown_parameter")
        ignored(field)
    if address == SCORE:
        left, right = _texts(body, "text_1"), _texts(body, "text_2")
        if len(left) not in (1, len(right)):
            what = f"has {len(left)} texts, and text_2 {len(right)}; give one, or as many as text_2 has"
            raise refused("text_1", what, "invalid_value")
        scoring = Scoring(address)
    else:
        left, right = _texts(body, "query", most=1), _texts(body, "documents")
        scoring = Scoring(address, most=_most(body), shows=_read_return_documents(body))
    asked = {"model": body.get("model"), "input": [*left, *right]}
    request = parse_request_body(
        asked, endpoint=Endpoint.EMBEDDINGS, custom_id=name, line=0, most_texts=2 * _MOST_TEXTS
    )
    first = [0] * len(right) if len(left) == 1 else range(len(left))
    pairs = tuple(zip(first, range(len(left), len(left) + len(right)), strict=True))
    return msgspec.structs.replace(request, pairs=pairs), scoring


def _texts(body: dict[str, Any], field: str, *, most: int = _MOST_TEXTS) -> list[str]:
    if field not in body:
        raise refused(field, "is missing", "missing_required_parameter")
    value = body[field]
    texts = [value] if isinstance(value, str) else value
    if most == 1 and not isinstance(value, str):
        raise refused(field, f"must be a text, and is {shown(value)}", "invalid_type")
    if not isinstance(texts, list) or not texts:
        raise refused(field, f"must be a text or a list of texts, and is {shown(value)}", "invalid_type")
    if len(texts) > most:
        raise refused(field, f"has {len(texts):,} texts; at most {most:,} are allowed in a request", "invalid_value")
    for number, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            where = field if texts is not value else f"{field}[{number}]"
            raise refused(where, f"must be a text that is not empty, and is {shown(text)}", "invalid_type")
    return texts


def _most(body: dict[str, Any]) -> int:
    value = body.get("top_n", 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise refused("top_n", f"must be a whole number, 0 (all) or more, and is {shown(value)}", "invalid_value")
    return value


def _read_return_documents(body: dict[str, Any]) -> bool:
    value = body.get("return_documents", True)
    if not isinstance(value, bool):
        raise refused("return_documents", f"must be true or false, and is {shown(value)}", "invalid_type")
    return value
