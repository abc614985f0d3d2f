"""How a model answers a request in its library process, and the bodies of answers in OpenAI's form.

If the model refuses a request (a prompt that is too long, an option that its engine lacks), it raises ValueError,
which `refusal` turns into an ApiError. `name` identifies an answer.
"""

from __future__ import annotations

import base64
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.apps.common.openai_requests import FIELD_OF, ApiError, ApiRequest, Endpoint, SamplingOptions

if TYPE_CHECKING:
    from stoker.contexts import CausalLM, EncoderModel

Likelihoods = tuple[tuple[str, float, tuple[tuple[str, float], ...]], ...]
"""Per token: its text, its log-probability, and the likeliest tokens at its place with theirs."""
_PARAMS = {Endpoint.CHAT: "messages", Endpoint.COMPLETIONS: "prompt", Endpoint.EMBEDDINGS: "input"}
_AROUND = 16
"""The most tokens that a tokenizer adds around a text."""
_UNKNOWN_LENGTH = 4096
"""Context length of a model that does not state one."""


class Choice(msgspec.Struct, frozen=True):
    """The text after one prompt. `finish_reason`: `stop` or `length`. `logprobs`: None unless requested."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Likelihoods | None = None


class TextBegun(msgspec.Struct, frozen=True):
    """The first piece of a streamed text: the model accepts the prompt."""

    prompt_tokens: int


class TokenPiece(msgspec.Struct, frozen=True):
    """One token of a streamed text with log-probabilities."""

    text: str
    logprobs: Likelihoods


class TextEnded(msgspec.Struct, frozen=True):
    """The last piece of a streamed text."""

    finish_reason: str
    completion_tokens: int


TextPiece = TextBegun | str | TokenPiece | TextEnded


class VectorPiece(msgspec.Struct, frozen=True):
    """A part of the vectors of some texts: bytes of little-endian float32 numbers. All parts together have `width`
    numbers per text; `tokens` counts all texts.
    """

    width: int
    tokens: int
    data: bytes


_LENGTH_IS = "this model's maximum context length is"
"""Clients (LiteLLM) recognize this error by OpenAI's words."""


class ContextTooShort(ValueError):
    """A prompt and the tokens that may follow it exceed the length that the model reads."""


class TemplateRefused(ValueError):
    """The model's chat template rejects a conversation."""


class WidthDiffers(ValueError):
    """A request asks for vectors of another width than the model's."""


def prompts_of(model: CausalLM, request: ApiRequest) -> tuple[str, ...]:
    """Return the prompts of a request; a conversation has one. Raises TemplateRefused."""
    if request.endpoint is not Endpoint.CHAT:
        return request.texts
    messages = [
        {"role": message.role, "content": message.content, **({"name": message.name} if message.name else {})}
        for message in request.messages
    ]
    try:
        return (model.chat_prompt(messages),)
    except Exception as error:  # a template is a program of the model's, and raises what it likes
        raise TemplateRefused(f"the model's chat template refuses the messages: {error}") from error


def complete(model: CausalLM, prompt: str, sampling: SamplingOptions, *, place: int) -> Choice:
    """Return the model's text after one prompt. `place`: the index of the prompt in the request.

    Raises ValueError for a prompt that the model cannot take; ContextTooShort if it is too long.
    """
    _, options = _options(model, prompt, sampling, place=place)
    found = model.complete(prompt, **options)
    return Choice(
        text=found.text,
        finish_reason=found.finish_reason,
        prompt_tokens=found.prompt_tokens,
        completion_tokens=found.completion_tokens,
        logprobs=_cut(found.logprobs, sampling) if sampling.logprobs >= 0 else None,
    )


def stream_text(model: CausalLM, prompt: str, sampling: SamplingOptions, *, place: int) -> Iterator[TextPiece]:
    """Yield the text in pieces as it is generated; with log-probabilities, one token per piece. Raises ValueError
    before the first piece, as `complete`.
    """
    read, options = _options(model, prompt, sampling, place=place)
    tokens = model.stream_completion(prompt, **options)
    yield TextBegun(read)
    written, finish = 0, ""
    for token in tokens:
        written, finish = written + 1, token.finish_reason
        if sampling.logprobs >= 0:
            yield TokenPiece(token.text, _cut(token.logprobs, sampling))
        elif token.text:
            yield token.text
    yield TextEnded(finish, written)


def embed_texts(model: EncoderModel, request: ApiRequest) -> tuple[Any, int]:
    """Return the vectors of a request's texts, float32 `[texts, width]`, and the tokens of all texts. Raises
    ValueError for a text that the model cannot take, and if the request asks for another width.
    """
    if model.longest:
        for text in request.texts:
            # A token is a byte at least, but for those around a text: short texts are not counted.
            length = model.count_tokens(text) if len(text.encode()) + _AROUND > model.longest else 0
            if model.longest < length:
                raise ContextTooShort(f"{_LENGTH_IS} {model.longest} tokens, and a text has {length}")
    vectors, tokens = model.embed_array(list(request.texts))
    if request.dimensions and request.dimensions != vectors.shape[1]:
        raise WidthDiffers(
            f"dimensions is {request.dimensions}, and this model's vectors have {vectors.shape[1]} numbers; leave it"
            " out, or give that"
        )
    return vectors, tokens


def refusal(error: ValueError, endpoint: Endpoint) -> ApiError:
    """Convert a model's refusal into OpenAI's words."""
    message, param, code = str(error).replace("prompt 0 ", "the prompt ", 1), _PARAMS[endpoint], None
    if isinstance(error, ContextTooShort):
        code = "context_length_exceeded"
    elif isinstance(error, WidthDiffers):
        param, code = "dimensions", "invalid_value"
    elif option := getattr(error, "option", ""):  # an engine that does not honour it
        param, code = FIELD_OF.get(option, option), "unsupported_value"
        message = f"{param}: {message}"
    return ApiError(message, param=param, code=code)


def _options(model: CausalLM, prompt: str, sampling: SamplingOptions, *, place: int) -> tuple[int, dict[str, Any]]:
    """Return the tokens of a prompt, and the model's options for it. Raises ContextTooShort."""
    length = model.count_tokens(prompt)
    longest = model.longest or _UNKNOWN_LENGTH
    most = sampling.max_new_tokens or max(1, longest - length)
    if length + most > longest:
        raise ContextTooShort(f"{_LENGTH_IS} {longest} tokens, and the prompt has {length}; {most} more were asked for")
    options: dict[str, Any] = {
        "max_new_tokens": most,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed + place,
        "stop": sampling.stop,
        "logprobs": max(1, sampling.logprobs) if sampling.logprobs >= 0 else 0,
        "json_schema": sampling.json_schema,
    }
    if sampling.engine_options:  # only some engines have the argument
        options["engine_options"] = dict(sampling.engine_options)
    return length, options


def _cut(likelihoods: Likelihoods, sampling: SamplingOptions) -> Likelihoods:
    return tuple((token, chance, likeliest[: sampling.logprobs]) for token, chance, likeliest in likelihoods)


Body = dict[str, Any]
_FLOAT_BYTES = 4
_PART_BYTES = 250_000
_LEAST_LOGPROB = -9999.0
"""OpenAI's value for an impossible token: JSON has no infinity."""


def chat_body(choices: Sequence[Choice], *, name: str, model: str, created: int, usage: Body | None = None) -> Body:
    """Return the answer to a conversation, one message per choice. `usage`: instead of the sum over choices."""
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage or usage_of(choices),
        "system_fingerprint": None,
    }


def completion_body(
    choices: Sequence[Choice], *, name: str, model: str, created: int, usage: Body | None = None
) -> Body:
    """Return the answer to a completion, one text per choice. `usage`: instead of the sum over choices."""
    return {
        "id": f"cmpl-{name}",
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "text": choice.text,
                "logprobs": completion_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage or usage_of(choices),
        "system_fingerprint": None,
    }


def embedding_body(vectors: Vectors, *, model: str, packed: bool) -> Body:
    """Return the vectors of texts; `packed`: in base64."""
    return {
        "object": "list",
        "data": [_embedding(index, vector, packed) for index, vector in enumerate(vectors)],
        **_embedding_facts(vectors, model),
    }


def embedding_parts(vectors: Vectors, *, model: str, packed: bool) -> Iterator[bytes]:
    """Yield the same as JSON in parts of about `_PART_BYTES`: the whole may take hundreds of megabytes."""
    encode = msgspec.json.encode
    part = bytearray(b'{"object":"list","data":[')
    for index, vector in enumerate(vectors):
        part += (b"," if index else b"") + encode(_embedding(index, vector, packed))
        if len(part) > _PART_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part) + b"]," + encode(_embedding_facts(vectors, model))[1:]


class Vectors(msgspec.Struct, frozen=True):
    """Vectors of texts with `tokens` tokens in total: `width` little-endian float32 numbers each, concatenated."""

    width: int
    tokens: int
    data: bytes | bytearray

    def __iter__(self) -> Iterator[bytes]:
        size = self.width * _FLOAT_BYTES
        return (bytes(self.data[start : start + size]) for start in range(0, len(self.data), size))


def chat_logprobs(likelihoods: Likelihoods | None) -> Body | None:
    """Return log-probabilities in the form of a conversation's answer."""
    if likelihoods is None:
        return None
    return {
        "content": [
            {**_chance(token, chance), "top_logprobs": [_chance(*one) for one in likeliest]}
            for token, chance, likeliest in likelihoods
        ],
        "refusal": None,
    }


def completion_logprobs(likelihoods: Likelihoods | None, *, offset: int = 0) -> Body | None:
    """Return log-probabilities in the form of a completion's answer. `offset`: characters of the text before them."""
    if likelihoods is None:
        return None
    ends = itertools.accumulate((len(token) for token, _, _ in likelihoods), initial=offset)
    return {
        "tokens": [_named(token) for token, _, _ in likelihoods],
        "token_logprobs": [max(_LEAST_LOGPROB, chance) for _, chance, _ in likelihoods],
        "top_logprobs": [
            {_named(token): max(_LEAST_LOGPROB, chance) for token, chance in likeliest}
            for _, _, likeliest in likelihoods
        ],
        "text_offset": list(ends)[: len(likelihoods)],
    }


def usage_of(choices: Sequence[Choice]) -> Body:
    """Return the token usage of choices that each read their own prompt."""
    read = sum(choice.prompt_tokens for choice in choices)
    return token_usage(read, sum(choice.completion_tokens for choice in choices))


def token_usage(read: int, written: int) -> Body:
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _chance(token: str, chance: float) -> Body:
    return {"token": str(token), "logprob": max(_LEAST_LOGPROB, chance), "bytes": list(_bytes_of(token))}


def _bytes_of(token: str) -> bytes:
    raw: bytes = getattr(token, "raw", None) or token.encode()
    return raw


def _named(token: str) -> str:
    """Return a token as text; part of a character as its bytes, as OpenAI writes them."""
    raw = getattr(token, "raw", None)
    return str(token) if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _embedding(index: int, vector: bytes, packed: bool) -> Body:
    """Return one vector: base64 of little-endian float32 as OpenAI's, or numbers."""
    numbers = base64.b64encode(vector).decode() if packed else struct.unpack(f"<{len(vector) // _FLOAT_BYTES}f", vector)
    return {"object": "embedding", "index": index, "embedding": numbers}


def _embedding_facts(vectors: Vectors, model: str) -> Body:
    return {"model": model, "usage": {"prompt_tokens": vectors.tokens, "total_tokens": vectors.tokens}}
