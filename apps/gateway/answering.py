"""The model endpoints: parse a request, admit or refuse it, run its calls, and answer in OpenAI's format.

Each of the `n` choices of each prompt is an independent call.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stoker.apps.common.models_file import ColdRequestAction, apply_parser_settings
from stoker.apps.common.openai_answers import (
    Choice,
    Vectors,
    build_answer_body,
    build_token_usage,
    encode_embedding_body_in_parts,
)
from stoker.apps.common.openai_requests import (
    ApiRequest,
    Endpoint,
    Note,
    RequestRefused,
    field_error,
    parse_json_object,
    parse_request_body,
)
from stoker.apps.common.refusals import check_type, check_whole_number
from stoker.apps.gateway.failures import OBJECTIVE_UNREACHABLE, log, log_failure
from stoker.apps.gateway.figures import GatewayMetrics, RunningRequest
from stoker.apps.gateway.keys import Caller, CountedRequest
from stoker.apps.gateway.objectives import TOKEN_CHARACTERS, LatencyObjectives, read_objective_headers
from stoker.apps.gateway.responses import (
    ResponseEvents,
    build_response_body,
    convert_to_chat_request,
    translate_chat_error,
)
from stoker.apps.gateway.served import ServedModel, ServedModels, SessionWatch, forecast_first_token
from stoker.apps.gateway.streaming import (
    ChunkEncoder,
    StreamedAnswer,
    collect_pieces_with_retry,
    stream_merged_call_pieces,
)
from stoker.apps.gateway.vllm_endpoints import ScoringOptions, parse_scoring_request
from stoker.apps.gateway.wire import (
    ClientDisconnected,
    EventStream,
    JSONResponse,
    receive_body,
    result_unless_disconnected,
    stream_json_parts,
)
from stoker.sessions import StokerApp
from stoker.units import show_seconds

_OWN = ("n", "stream", "stream_options")
_MOST_CHOICES = 128
_DEFAULT_TOKENS = 1000
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")


class ParsedModelRequest(msgspec.Struct, frozen=True):
    """A checked request. `choices`: one request per choice; `best`: number of choices to return per prompt, 0 = all."""

    request: ApiRequest
    choices: tuple[ApiRequest, ...]
    prompts: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    best: int = 0
    scoring: ScoringOptions | None = None
    repeated: dict[str, Any] | None = None
    """Request fields that an answer of `/v1/responses` repeats; None at other endpoints."""


def parse_responses_request(data: bytes, *, name: str, ignored: Note = lambda _field: None) -> ParsedModelRequest:
    converted = convert_to_chat_request(parse_json_object(data), ignored=ignored)
    chat = msgspec.json.encode(converted.chat)
    try:
        asked = parse_model_request(chat, endpoint=Endpoint.CHAT, name=name, ignored=ignored)
    except RequestRefused as error:
        raise translate_chat_error(error, converted.places) from error
    return msgspec.structs.replace(asked, repeated=converted.repeated)


def parse_model_request(
    data: bytes, *, endpoint: Endpoint, name: str, ignored: Note = lambda _field: None
) -> ParsedModelRequest:
    """Parse the body of a request. `name`: id of the answer, from which the seed is derived if the request has none."""
    body = parse_json_object(data)
    is_completion = endpoint is Endpoint.COMPLETIONS
    own = {key: body.pop(key) for key in (*_OWN, *(["best_of"] if is_completion else [])) if key in body}
    request = parse_request_body(body, endpoint=endpoint, custom_id=name, line=0, ignored=ignored)
    if endpoint is Endpoint.EMBEDDINGS:
        for key, value in own.items():
            if value is not None:
                raise field_error(key, f"is not a known field of {endpoint.value} requests", "unknown_parameter")
        return ParsedModelRequest(request, (request,))
    own = {key: value for key, value in own.items() if value is not None}
    wanted = check_whole_number(own.get("n", 1), "n", least=1, most=_MOST_CHOICES)
    number = check_whole_number(own.get("best_of", wanted), "best_of", least=wanted, most=_MOST_CHOICES)
    stream = check_type(own.get("stream", False), bool, "stream")
    if stream and number > wanted:
        raise field_error("best_of", "cannot be streamed; leave it out, or do not stream", "unsupported_value")
    prompts = max(1, len(request.texts), len(request.ids))
    if prompts * number > _MOST_CHOICES:
        param = "prompt" if number == 1 else "n" if number == wanted else "best_of"
        asks = f"has {prompts} prompts" if number == 1 else f"asks for {prompts * number} choices"
        raise field_error(param, f"{asks}; at most {_MOST_CHOICES} are allowed in a request", "invalid_value")
    logprobs = max(0, request.sampling.logprobs) if number > wanted else request.sampling.logprobs
    usage, continuous = _read_usage_options(own.get("stream_options"), stream=stream)
    return ParsedModelRequest(
        request, tuple(_make_choice_requests(request, prompts, number, logprobs=logprobs)),
        prompts=prompts, stream=stream,
        include_usage=usage, continuous_usage=continuous, best=wanted if number > wanted else 0,
    )  # fmt: skip


def estimate_request_tokens(asked: ParsedModelRequest) -> tuple[int, int]:
    """Estimate how many tokens a request reads (one per four characters) and writes, if its client has disconnected."""
    read = sum(max(1, len(text) // TOKEN_CHARACTERS) for text in asked.request.input_texts)
    read += sum(map(len, asked.request.ids))
    if asked.request.endpoint is Endpoint.EMBEDDINGS:
        return read, 0
    samplings = [choice.sampling for choice in asked.choices]
    return read, sum((each.max_new_tokens or _DEFAULT_TOKENS) * each.writes for each in samplings)


def _make_stream_encoder(asked: ParsedModelRequest, *, name: str, model: str) -> ChunkEncoder | ResponseEvents:
    created = int(time.time())
    if asked.repeated is not None:
        return ResponseEvents(asked.repeated, name=name, model=model, created=created)
    return ChunkEncoder(
        endpoint=asked.request.endpoint, name=name, model=model, created=created,
        per_prompt=len(asked.choices) // asked.prompts, usage=asked.include_usage, continuous=asked.continuous_usage,
    )  # fmt: skip


def _make_choice_requests(request: ApiRequest, prompts: int, number: int, *, logprobs: int) -> Iterable[ApiRequest]:
    """Yield the requests of all choices, grouped by prompt. The seed increases by 1 per choice."""
    for place in range(prompts * number):
        sampling = msgspec.structs.replace(request.sampling, seed=request.sampling.seed + place, logprobs=logprobs)
        own = slice(place // number, place // number + 1)
        yield msgspec.structs.replace(request, texts=request.texts[own], ids=request.ids[own], sampling=sampling)


def choose_likeliest(choices: Sequence[Choice], *, per_prompt: int, best: int) -> list[Choice]:
    """Return the `best` choices of each prompt, by the mean log-probability of their new tokens."""

    def compute_mean_logprob(choice: Choice) -> float:
        new = (choice.logprobs or ())[-choice.completion_tokens :] if choice.completion_tokens else ()
        return sum(logprob or 0.0 for _, logprob, _ in new) / max(1, len(new))

    prompts = (choices[start : start + per_prompt] for start in range(0, len(choices), per_prompt))
    return [choice for each in prompts for choice in sorted(each, key=compute_mean_logprob, reverse=True)[:best]]


def _read_usage_options(options: Any, *, stream: bool) -> tuple[bool, bool]:
    if options is None:
        return False, False
    if not stream:
        raise field_error("stream_options", "needs stream to be true", "invalid_value")
    given = {name: value for name, value in check_type(options, dict, "stream_options").items() if value is not None}
    for name, value in given.items():
        if name not in _STREAM_OPTIONS:
            raise field_error(f"stream_options.{name}", "is not a known field", "unknown_parameter")
        check_type(value, bool, f"stream_options.{name}")
    usage, continuous = (given.get(name, False) for name in ("include_usage", "continuous_usage_stats"))
    return usage, usage and continuous


_WAITS = re.compile(r"(?:^|[,;\s])wait=(\d{1,6})(?:$|[,;\s])")
_AGAIN_S = 10.0
_RETRY_HINT = "Ask again after this time, or send the header `Prefer: wait=600` to wait for the answer"


async def refuse_long_wait(watch: SessionWatch, model: ServedModel, *, ttft_s: float, waits_s: float | None) -> None:
    """Raise RequestRefused for a request that would wait too long. `waits_s`: seconds in `Prefer: wait=`, else None."""
    facts = await watch.read_recent_facts(model)
    if trouble := watch.journal_trouble:
        raise RequestRefused(
            "the session accepts no requests now: its journal cannot be written; the gateway's log says why",
            type="server_error", code="session_unavailable", status=503, retry_after_s=_AGAIN_S, why=trouble,
        )  # fmt: skip
    refuses_cold = waits_s is not None or model.settings.cold is ColdRequestAction.REFUSE
    has_objective = ttft_s > 0 and not model.is_admitted_by_policy
    if not facts.hot and (refuses_cold or has_objective):
        facts = await watch.read_facts(model, within_s=0.1)  # the last status is old; the model may be loaded
    waits_s, later_s = waits_s or 0.0, facts.seconds_until_loaded
    if refuses_cold and not facts.hot and later_s > waits_s:
        watch.load_model(model)
        raise RequestRefused(
            f"the model {model.name} is {facts.state}; it may answer in {show_seconds(later_s)}. {_RETRY_HINT}",
            type="overloaded", code="model_cold", status=503, retry_after_s=later_s,
        )  # fmt: skip
    if not has_objective or (not facts.hot and model.settings.cold is ColdRequestAction.WAIT):
        return
    expected = forecast_first_token(facts, model.meter.first)
    if not expected.retry_delay_s(ttft_s) or expected.first_token_s <= waits_s:
        return
    if facts.hot:
        later_s = expected.retry_delay_s(ttft_s)
    else:
        watch.load_model(model)
    raise RequestRefused(
        f"the first token of the model {model.name} is expected in {show_seconds(expected.first_token_s)}, and the"
        f" objective is {show_seconds(ttft_s)}: {expected.because}. The objective could be met in"
        f" {show_seconds(later_s)}. {_RETRY_HINT}",
        type="overloaded", code=OBJECTIVE_UNREACHABLE, status=503, retry_after_s=later_s,
    )  # fmt: skip


class ModelEndpoints:
    def __init__(
        self, models: ServedModels, watch: SessionWatch, hold: Callable[[Caller], Awaitable[CountedRequest]],
        metrics: GatewayMetrics, *, most_bytes: int,
    ) -> None:  # fmt: skip
        """`hold`: counts a request against the limits of its key, or raises RequestRefused at a limit."""
        self._models = models
        self._watch = watch
        self._hold = hold
        self._metrics = metrics
        self._most_bytes = most_bytes
        self._ignored: set[str] = set()

    async def handle_responses_request(self, request: Request, caller: Caller) -> Response:
        try:
            return await self.answer_request(request, caller, Endpoint.CHAT, read=parse_responses_request)
        except RequestRefused as error:
            raise translate_chat_error(error) from error

    async def answer_scoring_request(self, request: Request, caller: Caller) -> Response:
        def read_scoring_request(data: bytes, *, name: str, ignored: Note) -> ParsedModelRequest:
            scored, scoring = parse_scoring_request(data, request.url.path, name=name, ignored=ignored)
            return ParsedModelRequest(scored, (scored,), scoring=scoring)

        return await self.answer_request(request, caller, Endpoint.EMBEDDINGS, read=read_scoring_request)

    async def answer_request(
        self,
        request: Request,
        caller: Caller,
        endpoint: Endpoint,
        *,
        read: Callable[..., ParsedModelRequest] | None = None,
    ) -> Response:
        """Answer a request. `read`: parser of the body. Raises RequestRefused, ClientDisconnected, errors of calls."""
        begun = time.monotonic()
        data = await receive_body(request, most_bytes=self._most_bytes)
        name = secrets.token_hex(12)
        read = read or partial(parse_model_request, endpoint=endpoint)
        asked = read(data, name=name, ignored=self._log_ignored_field_once)
        model = self._models.get_model_for_endpoint(asked.request.model, endpoint)
        own = partial(apply_parser_settings, settings=model.settings)
        asked = msgspec.structs.replace(asked, request=own(asked.request), choices=tuple(map(own, asked.choices)))
        prefers = _WAITS.search(request.headers.get("prefer", ""))
        writes, waits_s = endpoint is not Endpoint.EMBEDDINGS, float(prefers[1]) if prefers else None
        objectives = read_objective_headers(request.headers, honoured=self._models.honoured, writes=writes)
        ttft_s = objectives.get("ttft", model.objectives.ttft_s)
        try:
            model.prepare_recipe()
            await refuse_long_wait(self._watch, model, ttft_s=ttft_s, waits_s=waits_s)
        except RequestRefused as error:
            self._metrics.count_if_late_refusal(model, error)
            self._metrics.count_usage(model, key=caller.name, error=error)
            raise
        if ttft_s and waits_s is not None:
            objectives["ttft"] = max(ttft_s, waits_s)
        wanted = LatencyObjectives(objectives.get("ttft", ttft_s), objectives.get("tpot", model.objectives.tpot_s))
        running = RunningRequest(self._metrics, model, endpoint, begun=begun, wanted=wanted, key=caller.name)
        try:
            running.held = await self._hold(caller)
        except BaseException as error:
            running.end_request(error)
            raise
        try:
            app = await model.choose_app(asked.request, objectives, in_pieces=asked.stream)
            if asked.stream:
                at_once = wanted.tpot_s > 0
                return await self._answer_stream(
                    request, asked, model, app, name=name, running=running, at_once=at_once
                )
            whole = self._answer_whole(asked, model, app, name=name, running=running)
            response = await result_unless_disconnected(request.receive, whole)
        except (ClientDisconnected, asyncio.CancelledError) as error:
            running.count_tokens(*estimate_request_tokens(asked))
            running.end_after_disconnect(error)
            raise
        except BaseException as error:
            running.end_request(error)
            raise
        running.end_request(None)
        return response

    async def _answer_whole(
        self, asked: ParsedModelRequest, model: ServedModel, app: StokerApp, *, name: str, running: RunningRequest
    ) -> Response:
        found = await collect_pieces_with_retry(app, asked.choices)
        if asked.request.endpoint is Endpoint.EMBEDDINGS:
            [pieces] = found
            if asked.scoring is not None:
                [scored] = pieces
                running.count_whole_answer(scored.tokens, 0)
                return JSONResponse(
                    asked.scoring.build_answer_body(
                        asked.request, scored.scores, tokens=scored.tokens, name=name, model=model.name
                    )
                )
            vectors = Vectors(pieces[0].width, pieces[0].tokens, b"".join(piece.data for piece in pieces))
            running.count_whole_answer(vectors.tokens, 0)
            return stream_json_parts(
                encode_embedding_body_in_parts(vectors, model=model.name, packed=asked.request.packed)
            )
        choices: list[Choice] = [choice for [choice] in found]
        per_prompt = len(choices) // asked.prompts
        read = sum(choice.prompt_tokens for choice in choices[::per_prompt])
        written = sum(choice.completion_tokens for choice in choices)
        running.count_whole_answer(read, written)
        running.count_finish_reasons(choice.finish_reason for choice in choices)
        model.lengths.record_answer_length(written // len(choices))
        if asked.best:
            choices = choose_likeliest(choices, per_prompt=per_prompt, best=asked.best)
            if asked.request.sampling.logprobs < 0:
                choices = [msgspec.structs.replace(choice, logprobs=None) for choice in choices]
        head: dict[str, Any] = {"name": name, "model": model.name, "created": int(time.time())}
        if asked.repeated is not None:
            return JSONResponse(build_response_body(choices[0], asked.repeated, **head))
        return JSONResponse(
            build_answer_body(asked.request.endpoint, choices, usage=build_token_usage(read, written), **head)
        )

    async def _answer_stream(
        self, request: Request, asked: ParsedModelRequest, model: ServedModel, app: StokerApp, *, name: str,
        running: RunningRequest, at_once: bool,
    ) -> Response:  # fmt: skip
        """Stream the answer, or raise an error before the start. `at_once`: True to send each token immediately."""
        chunks = _make_stream_encoder(asked, name=name, model=model.name)
        running.begin_first_token_wait(is_hot=self._watch.last_facts(model).hot > 0)
        pieces = stream_merged_call_pieces(app, asked.choices)
        failed = partial(log_failure, request=request)
        answer = StreamedAnswer(pieces, chunks, running, self._watch, failed=failed)
        try:
            await result_unless_disconnected(request.receive, answer.wait_for_first_piece())
        except BaseException:
            await answer.end_calls()
            raise
        return EventStream(answer.stream_events(), at_end=answer.end_request, at_once=at_once)

    def _log_ignored_field_once(self, field: str) -> None:
        if field not in self._ignored:
            self._ignored.add(field)
            log.warning("the request field %s does not change answers and is ignored (logged once)", field)
