"""`/tokenize` and `/detokenize` in vLLM's format, with the model's `tokenizer.json`."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from stoker.apps.common.openai_requests import parse_json_object
from stoker.apps.common.refusals import RequestRefused, expect, refused, required, shown
from stoker.apps.gateway.failures import log
from stoker.apps.gateway.keys import Caller
from stoker.apps.gateway.served import ServedModel, ServedModels
from stoker.apps.gateway.wire import JSONAnswer, receive_body
from stoker.contexts import token_counter
from stoker.errors import RecipeError

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
_FIELDS: dict[str, dict[str, type]] = {
    TOKENIZE: {"model": str, "prompt": str, "add_special_tokens": bool, "return_token_strs": bool},
    DETOKENIZE: {"model": str, "tokens": list},
}
_MOST_ID = 1 << 31


class Tokenizing:
    def __init__(self, models: ServedModels, *, most_bytes: int) -> None:
        self._models = models
        self._most_bytes = most_bytes
        self._counters = {name: token_counter(model.settings.path) for name, model in models.items()}

    async def tokenize(self, request: Request, _caller: Caller) -> Response:
        body = _read(await receive_body(request, most=self._most_bytes), TOKENIZE, needs="prompt")
        model = self._models.named(body["model"])
        ids, names = await self._run(model, "encode", body["prompt"], special=body.get("add_special_tokens", True))
        return JSONAnswer(
            {
                "count": len(ids), "max_model_len": model.longest or None, "tokens": ids,
                "token_strs": names if body.get("return_token_strs") else None,
            }
        )  # fmt: skip

    async def detokenize(self, request: Request, _caller: Caller) -> Response:
        body = _read(await receive_body(request, most=self._most_bytes), DETOKENIZE, needs="tokens")
        for number, id in enumerate(body["tokens"]):
            if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < _MOST_ID:
                raise refused(f"tokens[{number}]", f"must be a token id, and is {shown(id)}", "invalid_type")
        try:
            text = await self._run(self._models.named(body["model"]), "decode", body["tokens"])
        except ValueError as error:
            raise RequestRefused(f"tokens: {error}", param="tokens", code="invalid_value") from None
        return JSONAnswer({"prompt": text})

    async def _run(self, model: ServedModel, method: str, *given: Any, **options: Any) -> Any:
        try:
            return await asyncio.to_thread(getattr(self._counters[model.name], method), *given, **options)
        except RecipeError as error:
            log.warning("%s", error)
            raise RequestRefused(
                f"the model {model.name} has no tokenizer.json that can be read here", param="model",
                code="tokenizer_unavailable",
            ) from None  # fmt: skip


def _read(data: bytes, address: str, *, needs: str) -> dict[str, Any]:
    fields = _FIELDS[address]
    body = {name: value for name, value in parse_json_object(data).items() if value is not None}
    for name, value in body.items():
        if name not in fields:
            what = f"is not a known field here; the fields are {', '.join(fields)}"
            raise refused(name, what, "unknown_parameter")
        expect(value, fields[name], name)
    for name in ("model", needs):
        required(body, name)
    return body
