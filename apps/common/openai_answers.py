"""How a model answers a request, in its library process; and the bodies of answers in OpenAI's form.

What the model refuses (a prompt that is too long, an option that its engine lacks) is a ValueError, and an ApiError for
the client (`refusal`). `name` identifies an answer.
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
"""Of each token its text, its log-likelihood, and the likeliest tokens there with theirs."""
_PARAMS = {Endpoint.CHAT: "messages", Endpoint.COMPLETIONS: "prompt", Endpoint.EMBEDDINGS: "input"}
_AROUND = 16
"""Tokens that a tokenizer puts around a text, at most."""
_UNKNOWN_LENGTH = 4096
"""The length of a model that does not say how many tokens it reads."""


class Choice(msgspec.Struct, frozen=True):
    """The text after one prompt. `finish_reason`: `stop` or `length`. `logprobs` is None unless the request asks for
    it."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Likelihoods | None = None


class TextBegun(msgspec.Struct, frozen=True):
    """The first piece of a text that is streamed: the model takes the prompt."""

    prompt_tokens: int


class TokenPiece(msgspec.Struct, frozen=True):
    """A piece of a text whose likelihoods are wanted: one token."""

    text: str
    logprobs: Likelihoods


class TextEnded(msgspec.Struct, frozen=True):
    """The last piece of a text that is streamed."""

    finish_reason: str
    completion_tokens: int


TextPiece = TextBegun | str | TokenPiece | TextEnded


class VectorPiece(msgspec.Struct, frozen=True):
    """A part of the vectors of some texts: the bytes of little-endian float32 numbers. All parts together have `width`
    numbers a text; `tokens` counts all texts."""

    width: int
    tokens: int
    data: bytes


_LENGTH_IS = "this model's maximum context length is"
"""Clients by others (LiteLLM) tell this error from others by OpenAI's words."""


class ContextTooShort(ValueError):
    """A prompt and the tokens that may follow it exceed the length that the model reads."""


class TemplateRefused(ValueError):
    """The model's chat template rejects a conversation."""


class WidthDiffers(ValueError):
    """A request wants vectors of another width than the model's."""


def prompts_of(model: CausalLM, request: ApiRequest) -> tuple[str, ...]:
    """The prompts of a request: a conversation has one. Raises TemplateRefused."""
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
    """What the model writes after one prompt; `place` is its place in the request.

    Raises ValueError for a prompt that the model cannot take, as ContextTooShort where it is too long.
    """
    found = model.complete(
        prompt,
        max_new_tokens=_room(model, prompt, sampling)[1],
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed + place,
        stop=sampling.stop,
        logprobs=_asked(sampling),
        json_schema=sampling.json_schema,
        **_engine_options(sampling),
    )
    return Choice(
        text=found.text,
        finish_reason=found.finish_reason,
        prompt_tokens=found.prompt_tokens,
        completion_tokens=found.completion_tokens,
        logprobs=_cut(found.logprobs, sampling) if sampling.logprobs >= 0 else None,
    )


def stream_text(model: CausalLM, prompt: str, sampling: SamplingOptions, *, place: int) -> Iterator[TextPiece]:
    """The same in pieces, as they are written; likelihoods have a piece a token. Raises ValueError before the first
    piece, as `complete`."""
    read, most = _room(model, prompt, sampling)
    tokens = model.stream_completion(
        prompt,
        max_new_tokens=most,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed + place,
        stop=sampling.stop,
        logprobs=_asked(sampling),
        json_schema=sampling.json_schema,
        **_engine_options(sampling),
    )
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
    """The vectors of a request's texts as an array of float32, `[texts, width]`, and the tokens of all texts. Raises
    ValueError for a text that the model cannot take, and for another width than the request wants."""
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
    """What a model has refused, as OpenAI words it."""
    message, param, code = str(error).replace("prompt 0 ", "the prompt ", 1), _PARAMS[endpoint], None
    if isinstance(error, ContextTooShort):
        code = "context_length_exceeded"
    elif isinstance(error, WidthDiffers):
        param, code = "dimensions", "invalid_value"
    elif option := getattr(error, "option", ""):  # an engine that does not honour it
        param, code = FIELD_OF.get(option, option), "unsupported_value"
        message = f"{param}: {message}"
    return ApiError(message, param=param, code=code)


def _room(model: CausalLM, prompt: str, sampling: SamplingOptions) -> tuple[int, int]:
    """The tokens of a prompt, and how many may follow. Raises ContextTooShort."""
    length = model.count_tokens(prompt)
    longest = model.longest or _UNKNOWN_LENGTH
    most = sampling.max_new_tokens or max(1, longest - length)
    if length + most > longest:
        raise ContextTooShort(f"{_LENGTH_IS} {longest} tokens, and the prompt has {length}; {most} more were asked for")
    return length, most


def _engine_options(sampling: SamplingOptions) -> dict[str, Any]:
    """The argument of a model's method for what only some engines can do; nothing where nothing is asked."""
    return {"engine_options": dict(sampling.engine_options)} if sampling.engine_options else {}


def _asked(sampling: SamplingOptions) -> int:
    """How many likely tokens the engine is asked for; 0: no likelihood."""
    return max(1, sampling.logprobs) if sampling.logprobs >= 0 else 0


def _cut(likelihoods: Likelihoods, sampling: SamplingOptions) -> Likelihoods:
    return tuple((token, chance, likeliest[: sampling.logprobs]) for token, chance, likeliest in likelihoods)


Body = dict[str, Any]
_FLOAT_BYTES = 4
_PART_BYTES = 250_000
_LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that cannot come: JSON has no infinity."""


def chat_body(choices: Sequence[Choice], *, name: str, model: str, created: int, usage: Body | None = None) -> Body:
    """The answer to a conversation: a message a choice. `usage`: other than the sum of the choices'."""
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
    """The answer to a completion: a text a choice. `usage`: other than the sum of the choices'."""
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
    """The vectors of texts; `packed`: as base64."""
    return {
        "object": "list",
        "data": [_embedding(index, vector, packed) for index, vector in enumerate(vectors)],
        **_embedding_facts(vectors, model),
    }


def embedding_parts(vectors: Vectors, *, model: str, packed: bool) -> Iterator[bytes]:
    """The same as JSON in parts of `_PART_BYTES` and a vector more: the whole may have hundreds of megabytes."""
    encode = msgspec.json.encode
    part = bytearray(b'{"object":"list","data":[')
    for index, vector in enumerate(vectors):
        part += (b"," if index else b"") + encode(_embedding(index, vector, packed))
        if len(part) > _PART_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part) + b"]," + encode(_embedding_facts(vectors, model))[1:]


class Vectors(msgspec.Struct, frozen=True):
    """The vectors of texts, which have `tokens` tokens in all: `width` float32 numbers each, little-endian, one after
    the other."""

    width: int
    tokens: int
    data: bytes | bytearray

    def __iter__(self) -> Iterator[bytes]:
        """The bytes of each vector."""
        size = self.width * _FLOAT_BYTES
        return (bytes(self.data[start : start + size]) for start in range(0, len(self.data), size))


def chat_logprobs(likelihoods: Likelihoods | None) -> Body | None:
    """Likelihoods as a conversation's answer has them."""
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
    """Likelihoods as a completion's answer has them. `offset`: the characters of the text before them."""
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
    """The tokens of choices, each of which has read a prompt of its own."""
    read = sum(choice.prompt_tokens for choice in choices)
    return token_usage(read, sum(choice.completion_tokens for choice in choices))


def token_usage(read: int, written: int) -> Body:
    """Tokens read and written."""
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _chance(token: str, chance: float) -> Body:
    return {"token": str(token), "logprob": max(_LEAST_LOGPROB, chance), "bytes": list(_bytes_of(token))}


def _bytes_of(token: str) -> bytes:
    raw: bytes = getattr(token, "raw", None) or token.encode()
    return raw


def _named(token: str) -> str:
    """A token in a list of texts; one that is part of a character as its bytes, as OpenAI writes them."""
    raw = getattr(token, "raw", None)
    return str(token) if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _embedding(index: int, vector: bytes, packed: bool) -> Body:
    """One vector: little-endian float32 in base64, as OpenAI's, or numbers."""
    numbers = base64.b64encode(vector).decode() if packed else struct.unpack(f"<{len(vector) // _FLOAT_BYTES}f", vector)
    return {"object": "embedding", "index": index, "embedding": numbers}


def _embedding_facts(vectors: Vectors, model: str) -> Body:
    return {"model": model, "usage": {"prompt_tokens": vectors.tokens, "total_tokens": vectors.tokens}}
