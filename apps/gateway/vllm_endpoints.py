"""vLLM's endpoints: `/v1/score`, `/v1/rerank`, and `/tokenize` and `/detokenize` with the model's `tokenizer.json`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stoker.apps.common.openai_requests import IGNORED, ApiRequest, Endpoint, Note, parse_json_object, read_model_name
from stoker.apps.common.refusals import (
    RequestRefused,
    check_texts,
    check_type,
    check_whole_number,
    field_error,
    format_value,
    require_field,
)
from stoker.apps.gateway.failures import log
from stoker.apps.gateway.keys import Caller
from stoker.apps.gateway.served import ServedModel, ServedModels
from stoker.apps.gateway.wire import JSONResponse, receive_body
from stoker.contexts import token_counter
from stoker.errors import RecipeError

SCORE, RERANK, TOKENIZE, DETOKENIZE = "/v1/score", "/v1/rerank", "/tokenize", "/detokenize"
_FIELDS: dict[str, dict[str, type]] = {
    SCORE: {"model": object, "text_1": object, "text_2": object},
    RERANK: {"model": object, "query": str, "documents": object, "top_n": object, "return_documents": bool},
    TOKENIZE: {"model": str, "prompt": str, "add_special_tokens": bool, "return_token_strs": bool},
    DETOKENIZE: {"model": str, "tokens": list},
}
"""The fields of each endpoint, with their types. Other code checks the fields of type `object`."""
_MOST_TEXTS = 2048
_MOST_ID = 1 << 31


def _read_fields(data: bytes, address: str, *, ignored: Note | None = None) -> dict[str, Any]:
    """Return the fields of a body that are not null. `ignored`: receives fields without effect; None refuses them."""
    body = {name: value for name, value in parse_json_object(data).items() if value is not None}
    for name in [name for name in body if name not in _FIELDS[address]]:
        if ignored is None or name not in IGNORED:
            what = f"is not a known field here; the fields are {', '.join(_FIELDS[address])}"
            raise field_error(name, what, "unknown_parameter")
        ignored(name)
        del body[name]
    for name, value in body.items():
        check_type(value, _FIELDS[address][name], name)
    return body


class ScoringOptions(msgspec.Struct, frozen=True):
    """Options of a score or rerank request. `most`: maximum number of documents, 0 = all; `shows`: return texts."""

    address: str
    most: int = 0
    shows: bool = True

    def build_answer_body(
        self, request: ApiRequest, scores: Sequence[float], *, tokens: int, name: str, model: str
    ) -> Any:
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


def parse_scoring_request(
    data: bytes, address: str, *, name: str, ignored: Note = lambda _field: None
) -> tuple[ApiRequest, ScoringOptions]:
    """Parse a request for `/v1/score` or `/v1/rerank`. Raises RequestRefused."""
    body = _read_fields(data, address, ignored=ignored)
    if address == SCORE:
        left = check_texts(require_field(body, "text_1"), "text_1", most=_MOST_TEXTS)
        right, scoring = check_texts(require_field(body, "text_2"), "text_2", most=_MOST_TEXTS), ScoringOptions(address)
        if len(left) not in (1, len(right)):
            what = f"has {len(left)} texts, and text_2 has {len(right)}; give one text, or as many as text_2"
            raise field_error("text_1", what, "invalid_value")
    else:
        left = check_texts(require_field(body, "query"), "query")
        right = check_texts(require_field(body, "documents"), "documents", most=_MOST_TEXTS)
        most = check_whole_number(body.get("top_n", 0), "top_n", least=0, most=1 << 31)
        scoring = ScoringOptions(address, most, body.get("return_documents", True))
    first = [0] * len(right) if len(left) == 1 else range(len(left))
    pairs = tuple(zip(first, range(len(left), len(left) + len(right)), strict=True))
    texts, model = (*left, *right), read_model_name(body)
    return ApiRequest(name, 0, Endpoint.EMBEDDINGS, model, texts=texts, pairs=pairs), scoring


class TokenizerEndpoints:
    def __init__(self, models: ServedModels, *, most_bytes: int) -> None:
        self._models = models
        self._most_bytes = most_bytes
        self._counters = {name: token_counter(model.settings.path) for name, model in models.items()}

    async def answer_tokenize_request(self, request: Request, _caller: Caller) -> Response:
        body = _read_fields(await receive_body(request, most_bytes=self._most_bytes), TOKENIZE)
        prompt, model = require_field(body, "prompt"), self._models.get_model(require_field(body, "model"))
        ids, names = await self._run_tokenizer(model, "encode", prompt, special=body.get("add_special_tokens", True))
        return JSONResponse(
            {
                "count": len(ids), "max_model_len": model.context_length or None, "tokens": ids,
                "token_strs": names if body.get("return_token_strs") else None,
            }
        )  # fmt: skip

    async def answer_detokenize_request(self, request: Request, _caller: Caller) -> Response:
        body = _read_fields(await receive_body(request, most_bytes=self._most_bytes), DETOKENIZE)
        tokens, model = require_field(body, "tokens"), require_field(body, "model")
        for number, id in enumerate(tokens):
            if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < _MOST_ID:
                raise field_error(f"tokens[{number}]", f"must be a token id, and is {format_value(id)}", "invalid_type")
        try:
            text = await self._run_tokenizer(self._models.get_model(model), "decode", tokens)
        except ValueError as error:
            raise RequestRefused(f"tokens: {error}", param="tokens", code="invalid_value") from None
        return JSONResponse({"prompt": text})

    async def _run_tokenizer(self, model: ServedModel, method: str, *given: Any, **options: Any) -> Any:
        try:
            return await asyncio.to_thread(getattr(self._counters[model.name], method), *given, **options)
        except RecipeError as error:
            log.warning("%s", error)
            raise RequestRefused(
                f"the model {model.name} has no tokenizer.json that can be read here", param="model",
                code="tokenizer_unavailable",
            ) from None  # fmt: skip
