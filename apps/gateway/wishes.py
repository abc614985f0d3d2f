"""What a body asks of the gateway itself, and the requests that its models are asked for it: one a choice.

A request of `n` choices, or of several prompts, is as many calls: each begins and ends by itself, and one that has to
run again writes the same again, whatever the others do.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.apps.common.openai.bodies import Note, read_body
from stoker.apps.common.openai.request import ApiRequest, Endpoint, RequestRefused
from stoker.decoding import why_not_json

_OWN = ("n", "stream", "stream_options")
_MOST_CHOICES = 128
_TOKEN_CHARACTERS = 4
_UNSAID_TOKENS = 1000
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")


class Asked(msgspec.Struct, frozen=True):
    """A request, checked. `choices`: what is asked of the model for each choice of the answer. `prompts`: how many of
    them read a prompt of their own. `include_usage`: a stream's last chunk says how many tokens there were;
    `continuous_usage`: each chunk does."""

    request: ApiRequest
    choices: tuple[ApiRequest, ...]
    prompts: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


def read_asked(data: bytes, *, endpoint: Endpoint, name: str, ignored: Note = lambda _field: None) -> Asked:
    """What the body of a request asks. Raises RequestRefused. `name` tells it from all others: its random draws are
    made of it where it names no seed. `ignored` as in `read_body`."""
    body = _decoded(data)
    own = {key: body.pop(key) for key in _OWN if key in body}
    request = read_body(body, endpoint=endpoint, custom_id=name, line=0, ignored=ignored)
    if endpoint is Endpoint.EMBEDDINGS:
        for key, value in own.items():
            if value is not None:
                raise _refused(key, f"is no field that {endpoint.value} is known to have", "unknown_parameter")
        return Asked(request, (request,))
    number = _number(own.get("n"))
    stream = _truth(own.get("stream"), "stream")
    prompts = max(1, len(request.texts))
    if prompts * number > _MOST_CHOICES:
        param = "prompt" if number == 1 else "n"
        asks = f"has {prompts} prompts" if number == 1 else f"asks for {prompts * number} choices"
        raise _refused(param, f"{asks}, and {_MOST_CHOICES} may be asked for at once", "invalid_value")
    choices = tuple(_choices(request, number))
    usage, continuous = _usage(own.get("stream_options"), stream=stream)
    return Asked(
        request,
        choices,
        prompts=prompts,
        stream=stream,
        include_usage=usage,
        continuous_usage=continuous,
    )


def tokens_asked(asked: Asked) -> int:
    """The tokens that a request asks to be read and written, as OpenAI counts before it knows better: for one whose
    client left before they were counted. A text has about a token for every four characters."""
    texts = [*asked.request.texts, *(message.content for message in asked.request.messages)]
    read = sum(max(1, len(text) // _TOKEN_CHARACTERS) for text in texts)
    if asked.request.endpoint is Endpoint.EMBEDDINGS:
        return read
    return read + sum(choice.sampling.max_new_tokens or _UNSAID_TOKENS for choice in asked.choices)


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {why_not_json(data, error)}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object", code="invalid_json")
    return body


def _choices(request: ApiRequest, number: int) -> list[ApiRequest]:
    """Choice k of a request has the k-th next seed; those of one prompt stand together."""
    prompts = request.texts or ("",)
    found = []
    for place in range(len(prompts) * number):
        sampling = msgspec.structs.replace(request.sampling, seed=request.sampling.seed + place)
        texts = (prompts[place // number],) if request.texts else ()
        found.append(msgspec.structs.replace(request, texts=texts, sampling=sampling))
    return found


def _number(value: Any) -> int:
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_CHOICES:
        raise _refused("n", f"must be a whole number from 1 to {_MOST_CHOICES}", "invalid_value")
    return value


def _truth(value: Any, name: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _refused(name, "must be true or false", "invalid_type")
    return bool(value)


def _usage(options: Any, *, stream: bool) -> tuple[bool, bool]:
    """Whether the last chunk of a stream has the tokens so far, and whether each chunk does."""
    if options is None:
        return False, False
    if not stream:
        raise _refused("stream_options", "wants stream to be true", "invalid_value")
    if not isinstance(options, dict):
        raise _refused("stream_options", "must be an object", "invalid_type")
    for name in options:
        if name not in _STREAM_OPTIONS:
            raise _refused(f"stream_options.{name}", "is no field that is known", "unknown_parameter")
    usage, continuous = (
        _truth(options.get(name), f"stream_options.{name}") for name in ("include_usage", "continuous_usage_stats")
    )
    return usage, usage and continuous


def _refused(param: str, problem: str, code: str) -> RequestRefused:
    return RequestRefused(f"{param} {problem}", param=param, code=code)
