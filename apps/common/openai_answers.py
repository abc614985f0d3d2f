"""Answer requests with a loaded model, and build the response bodies in OpenAI's format.

A model raises ValueError to refuse a request; `convert_model_error` converts the error to an ApiError. The parameter
`name` of several functions is the id of an answer.
"""

from __future__ import annotations

import base64
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from stoker.apps.common.answer_parsing import AnswerParser, choose_tool_format, make_answer_parser, parse_whole_answer
from stoker.apps.common.openai_chat import ToolCall
from stoker.apps.common.openai_requests import (
    ENGINE_FIELDS,
    ApiError,
    ApiRequest,
    Body,
    Endpoint,
    SamplingOptions,
    TokenIds,
)
from stoker.apps.common.tool_calls import AnswerDelta
from stoker.apps.common.tool_prompts import convert_messages_for_template, has_tool_support

if TYPE_CHECKING:
    from stoker.contexts import CausalLM, EncoderModel, RelayedTexts

Likelihoods = tuple[tuple[str, float | None, tuple[tuple[str, float], ...]], ...]
"""Per token: text, log-probability (None for a prompt's first token), and likeliest tokens with log-probabilities."""
Prompt = str | TokenIds
_PARAMS = {Endpoint.CHAT: "messages", Endpoint.COMPLETIONS: "prompt", Endpoint.EMBEDDINGS: "input"}
_MOST_SPECIAL_TOKENS = 16
_UNKNOWN_LENGTH = 4096
"""Assumed context length in tokens if a model states none."""


class Choice(msgspec.Struct, frozen=True):
    """The answer to a prompt. `unshown`: length in characters of a start token that `text` omits."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Likelihoods | None = None
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    unshown: int = 0


class TextBegun(msgspec.Struct, frozen=True):
    """The first piece of a streamed text. It shows that the model accepts the prompt."""

    prompt_tokens: int


class TokenPiece(msgspec.Struct, frozen=True):
    """A generated token, or the echoed prompt if `tokens` is 0. `unshown`: see `Choice`."""

    text: str
    logprobs: Likelihoods | None
    tokens: int = 1
    unshown: int = 0


class AnswerPiece(msgspec.Struct, frozen=True):
    """A piece of a parsed answer: reasoning, text or function calls. `tokens`: tokens since the last piece."""

    delta: AnswerDelta
    tokens: int
    logprobs: Likelihoods | None = None


class TextEnded(msgspec.Struct, frozen=True):
    finish_reason: str
    completion_tokens: int


TextPiece = TextBegun | str | TokenPiece | AnswerPiece | TextEnded


class ScorePiece(msgspec.Struct, frozen=True):
    """The scores of a request's pairs of texts. `tokens`: tokens that the model read."""

    scores: tuple[float, ...]
    tokens: int


_LENGTH_IS = "this model's maximum context length is"
"""Part of OpenAI's error message for a prompt that is too long. LiteLLM and other clients search for this text."""


class UnusableRequest(ValueError):
    """The model cannot answer a request. `param`: the invalid field, empty for the prompt."""

    def __init__(self, message: str, *, param: str = "", code: str = "context_length_exceeded") -> None:
        super().__init__(message)
        self.param, self.code = param, code


def build_prompts(model: CausalLM, request: ApiRequest) -> tuple[Prompt, ...]:
    """Return the prompts of a request. A conversation is one prompt. Raises ValueError."""
    if request.endpoint is not Endpoint.CHAT:
        return request.ids or request.texts
    template = model.chat_template
    options = dict(request.template_options)
    if has_tool_support(template) and request.tools.functions:
        options["tools"] = list(request.tools.functions)
    messages = convert_messages_for_template(request, template, choose_tool_format(request, template))
    try:
        return (model.chat_prompt(messages, **options),)
    except Exception as error:  # a template is a program and may raise any error
        raise ValueError(f"the model's chat template refuses the messages: {error}") from error


def set_request_adapter(model: CausalLM, request: ApiRequest) -> ApiRequest:
    """Return the request, with `sampling.adapter` set if its model is an adapter of the loaded model."""
    if request.model not in model.adapters:
        return request
    return replace(request, sampling=replace(request.sampling, adapter=request.model))


def complete_prompt(model: CausalLM, request: ApiRequest, prompt: Prompt, *, place: int) -> Choice:
    """Return the model's answer to a prompt. `place`: index of the prompt in the request. Raises ValueError."""
    sampling = request.sampling
    _, options = _make_engine_arguments(model, prompt, sampling, place=place)
    found = model.complete(prompt, **options)
    choice = Choice(
        found.text, found.finish_reason, found.prompt_tokens, found.completion_tokens,
        logprobs=_limit_likeliest_tokens(found.logprobs, sampling) if sampling.logprobs >= 0 else None,
    )  # fmt: skip
    if sampling.echo:
        echo = _make_echo_piece(model, prompt, found.prompt_logprobs, sampling)
        likelihoods = None if echo.logprobs is None else echo.logprobs + (choice.logprobs or ())
        return replace(choice, text=echo.text + choice.text, logprobs=likelihoods, unshown=echo.unshown)
    parser = _make_parser_for_prompt(model, request, prompt, place=place)
    if parser is None:
        return choice
    answer, calls = parse_whole_answer(parser, found.text)
    return replace(
        choice, text=answer.text, reasoning=answer.reasoning, calls=calls,
        finish_reason=parser.convert_finish_reason(found.finish_reason),
    )  # fmt: skip


def _make_parser_for_prompt(model: CausalLM, request: ApiRequest, prompt: Prompt, *, place: int) -> AnswerParser | None:
    if not isinstance(prompt, str):  # only answers to conversations are parsed, and their prompts are strings
        return None
    return make_answer_parser(request, template=model.chat_template, prompt=prompt, place=place)


def _make_echo_piece(
    model: CausalLM, prompt: Prompt, likelihoods: Likelihoods, sampling: SamplingOptions
) -> TokenPiece:
    text = prompt if isinstance(prompt, str) else model.text_of(prompt)
    first = likelihoods[0][0] if likelihoods else ""
    unshown = 0 if text.startswith(first) else len(first)
    return TokenPiece(
        text, _limit_likeliest_tokens(likelihoods, sampling) if sampling.logprobs >= 0 else None, 0, unshown
    )


def stream_text(
    model: CausalLM, request: ApiRequest, prompt: Prompt, *, place: int
) -> Iterator[TextPiece | RelayedTexts]:
    """Yield a `RelayedTexts` object for plain text, or a piece per token. Raises ValueError before the first piece."""
    sampling = request.sampling
    read, options = _make_engine_arguments(model, prompt, sampling, place=place)
    parser = _make_parser_for_prompt(model, request, prompt, place=place)
    tokens = model.stream_completion(prompt, **options)
    yield TextBegun(read)
    if parser is not None:
        yield from _parse_into_pieces(parser, tokens, sampling=sampling)
    elif sampling.logprobs >= 0:
        written, finish = 0, ""
        for token in tokens:
            if token.prompt_logprobs:
                yield _make_echo_piece(model, prompt, token.prompt_logprobs, sampling)
            written, finish = written + sampling.writes, token.finish_reason
            if sampling.writes:
                yield TokenPiece(token.text, _limit_likeliest_tokens(token.logprobs, sampling))
        yield TextEnded(finish, written)
    else:
        if sampling.echo:
            yield _make_echo_piece(model, prompt, (), sampling)
        texts = tokens.texts()
        yield texts
        yield TextEnded(texts.finish_reason, texts.tokens * sampling.writes)


def _parse_into_pieces(
    parser: AnswerParser, tokens: Iterator[Any], *, sampling: SamplingOptions
) -> Iterator[TextPiece]:
    written, told, finish = 0, 0, ""
    for token in tokens:
        written, finish = written + 1, token.finish_reason
        delta = parser.feed(token.text)
        likelihoods = _limit_likeliest_tokens(token.logprobs, sampling) if sampling.logprobs >= 0 else None
        if delta or likelihoods:
            yield AnswerPiece(delta, written - told, likelihoods)
            told = written
    if rest := parser.end():
        yield AnswerPiece(rest, written - told)
    yield TextEnded(parser.convert_finish_reason(finish), written)


def embed_request_texts(model: EncoderModel, request: ApiRequest) -> tuple[Any, int]:
    """Return the vectors of the texts, float32 `[texts, width]`, and the number of tokens. Raises ValueError."""
    if model.longest:
        for text in request.texts:
            # Every token except a special token has at least one byte. A text with few bytes therefore fits without a
            # count of its tokens.
            if len(text.encode()) + _MOST_SPECIAL_TOKENS > model.longest:
                _check_length(model, model.count_tokens(text), "a text")
    vectors, tokens = model.embed_array(list(request.texts))
    if request.dimensions and request.dimensions != vectors.shape[1]:
        what = f"this model's vectors have {vectors.shape[1]} numbers; leave it out, or give that number"
        raise UnusableRequest(
            f"dimensions is {request.dimensions}, and {what}", param="dimensions", code="invalid_value"
        )
    return vectors, tokens


def score_text_pairs(model: EncoderModel, request: ApiRequest) -> ScorePiece:
    """Return a score per pair: the output of a cross-encoder (a classifier with one label), or the cosine similarity of
    the embeddings.
    """
    if len(model.labels) != 1:
        vectors, tokens = embed_request_texts(model, request)
        return ScorePiece(tuple(float(vectors[one] @ vectors[other]) for one, other in request.pairs), tokens)
    pairs = [(request.texts[one], request.texts[other]) for one, other in request.pairs]
    lengths = [model.count_tokens(pair) for pair in pairs]
    _check_length(model, max(lengths), "a pair of texts")
    scores = (score for found in model.classify(pairs) for score in found.values())
    return ScorePiece(tuple(scores), sum(lengths))


def _check_length(model: EncoderModel, length: int, what: str) -> None:
    if 0 < model.longest < length:
        raise UnusableRequest(f"{_LENGTH_IS} {model.longest} tokens, and {what} has {length}")


def convert_model_error(error: ValueError, request: ApiRequest) -> ApiError:
    message, param, code = str(error).replace("prompt 0 ", "the prompt ", 1), _PARAMS[request.endpoint], None
    if isinstance(error, UnusableRequest):
        param, code = error.param or param, error.code
    elif getattr(error, "option", "") == "adapter":
        param, code = "model", "invalid_value"
    elif option := getattr(error, "option", ""):  # the engine does not support the option
        param = option if option in ENGINE_FIELDS else request.sampling.form_field or "response_format"
        code = "invalid_value"
        message = f"{param}: {message}"
    return ApiError(message, param=param, code=code)


def _make_engine_arguments(
    model: CausalLM, prompt: Prompt, sampling: SamplingOptions, *, place: int
) -> tuple[int, dict[str, Any]]:
    length = model.count_tokens(prompt)
    longest = model.longest or _UNKNOWN_LENGTH
    if sampling.adapter:
        longest -= model.virtual_tokens(sampling.adapter)
    most = (sampling.max_new_tokens or max(1, longest - length)) if sampling.writes else 0
    if length + most > longest:
        raise UnusableRequest(f"{_LENGTH_IS} {longest} tokens, and the prompt has {length}; {most} more were asked for")
    options: dict[str, Any] = {
        "max_new_tokens": most, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "seed": sampling.seed + place, "stop": sampling.stop, "json_schema": sampling.json_schema,
        "logprobs": max(1, sampling.logprobs) if sampling.logprobs >= 0 else 0,
    }  # fmt: skip
    if sampling.engine_options:  # not passed if empty, because some engines lack this argument
        options["engine_options"] = dict(sampling.engine_options)
    if sampling.adapter:
        options["adapter"] = sampling.adapter
    if sampling.echo and (sampling.logprobs >= 0 or not sampling.writes):
        options["prompt_logprobs"] = max(1, sampling.logprobs)
    return length, options


def _limit_likeliest_tokens(likelihoods: Likelihoods, sampling: SamplingOptions) -> Likelihoods:
    return tuple((token, chance, likeliest[: sampling.logprobs]) for token, chance, likeliest in likelihoods)


_FLOAT_BYTES = 4
_PART_BYTES = 250_000


def build_answer_head(endpoint: Endpoint, *, name: str, model: str, created: int, is_chunk: bool = False) -> Body:
    """Return the fields of an answer, or of a chunk of an answer, that do not depend on its text."""
    is_chat = endpoint is Endpoint.CHAT
    kind = "chat.completion.chunk" if is_chunk else "chat.completion"
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}", "object": kind if is_chat else "text_completion",
        "created": created, "model": model, "system_fingerprint": None,
    }  # fmt: skip


def build_answer_body(
    endpoint: Endpoint, choices: Sequence[Choice], *, name: str, model: str, created: int, usage: Body | None = None
) -> Body:
    """Return the response body of a conversation or a completion. `usage` replaces the token counts of the choices."""
    is_chat = endpoint is Endpoint.CHAT
    return {
        **build_answer_head(endpoint, name=name, model=model, created=created),
        "choices": [
            {
                "index": index,
                **({"message": _build_message_body(choice)} if is_chat else {"text": choice.text}),
                "logprobs": build_chat_logprobs(choice.logprobs)
                if is_chat
                else build_completion_logprobs(choice.logprobs, offset=-choice.unshown),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage or build_token_usage(
            sum(choice.prompt_tokens for choice in choices), sum(choice.completion_tokens for choice in choices)
        ),
    }  # fmt: skip


def build_embedding_body(vectors: Vectors, *, model: str, packed: bool) -> Body:
    """Return the response body of an embeddings request. `packed`: True to encode vectors in base64."""
    return {
        "object": "list",
        "data": [_build_embedding_item_body(index, vector, packed) for index, vector in enumerate(vectors)],
        **_embedding_model_and_usage(vectors, model),
    }


def encode_embedding_body_in_parts(vectors: Vectors, *, model: str, packed: bool) -> Iterator[bytes]:
    encode = msgspec.json.encode
    part = bytearray(b'{"object":"list","data":[')
    for index, vector in enumerate(vectors):
        part += (b"," if index else b"") + encode(_build_embedding_item_body(index, vector, packed))
        if len(part) > _PART_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part) + b"]," + encode(_embedding_model_and_usage(vectors, model))[1:]


class Vectors(msgspec.Struct, frozen=True):
    """Vectors of all or some texts: `width` little-endian float32 numbers per text. `tokens`: total of all texts."""

    width: int
    tokens: int
    data: bytes | bytearray

    def __iter__(self) -> Iterator[bytes]:
        size = self.width * _FLOAT_BYTES
        return (bytes(self.data[start : start + size]) for start in range(0, len(self.data), size))


def _build_message_body(choice: Choice) -> Body:
    """Return the message of a choice. Like OpenAI's API, omit empty reasoning and empty calls."""
    message: Body = {"role": "assistant", "content": choice.text or (None if choice.calls else ""), "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message


def build_delta_body(delta: AnswerDelta) -> Body:
    found: Body = {}
    if delta.reasoning:
        found["reasoning_content"] = delta.reasoning
    if delta.text:
        found["content"] = delta.text
    if delta.calls:
        found["tool_calls"] = [
            {
                "index": call.index, **({"id": call.id, "type": "function"} if call.id else {}),
                "function": {**({"name": call.name} if call.id else {}), "arguments": call.arguments},
            }
            for call in delta.calls
        ]  # fmt: skip
    return found


def build_token_usage(read: int, written: int) -> Body:
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _build_embedding_item_body(index: int, vector: bytes, packed: bool) -> Body:
    numbers = base64.b64encode(vector).decode() if packed else struct.unpack(f"<{len(vector) // _FLOAT_BYTES}f", vector)
    return {"object": "embedding", "index": index, "embedding": numbers}


def _embedding_model_and_usage(vectors: Vectors, model: str) -> Body:
    return {"model": model, "usage": {"prompt_tokens": vectors.tokens, "total_tokens": vectors.tokens}}


# ---- log-probabilities, which OpenAI writes in one format for conversations and another for completions

_LEAST_LOGPROB = -9999.0
"""OpenAI's value for an impossible token, because JSON has no infinity."""


def build_chat_logprobs(likelihoods: Likelihoods | None) -> Body | None:
    if likelihoods is None:
        return None
    return {
        "content": [
            {
                **_build_token_logprob_body(token, chance),
                "top_logprobs": [_build_token_logprob_body(*one) for one in likeliest],
            }
            for token, chance, likeliest in likelihoods
        ],
        "refusal": None,
    }


def build_completion_logprobs(likelihoods: Likelihoods | None, *, offset: int = 0) -> Body | None:
    """Return OpenAI's `logprobs` object. `offset`: number of characters before the first token."""
    if likelihoods is None:
        return None
    ends = itertools.accumulate((len(token) for token, _, _ in likelihoods), initial=offset)
    return {
        "tokens": [_format_token(token) for token, _, _ in likelihoods],
        "token_logprobs": [_clamp_logprob_for_json(chance) for _, chance, _ in likelihoods],
        "top_logprobs": [
            None
            if own is None
            else {_format_token(token): _clamp_logprob_for_json(chance) for token, chance in likeliest}
            for _, own, likeliest in likelihoods
        ],
        "text_offset": [max(0, end) for end in ends][: len(likelihoods)],
    }


def _clamp_logprob_for_json(chance: float | None) -> float | None:
    return None if chance is None else max(_LEAST_LOGPROB, chance)


def _build_token_logprob_body(token: str, chance: float | None) -> Body:
    raw: bytes = getattr(token, "raw", None) or token.encode()
    return {"token": str(token), "logprob": _clamp_logprob_for_json(chance), "bytes": list(raw)}


def _format_token(token: str) -> str:
    """Return a token as text, or in OpenAI's `bytes:` notation if the token is a part of a character."""
    raw = getattr(token, "raw", None)
    return str(token) if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
