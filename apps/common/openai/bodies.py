"""What a request's body may ask for; everything else is refused.

A field that would change the answer and that is not honoured is refused, whatever its value, unless the value is the
one that changes nothing (`n` of 1, `logit_bias` of `{}`). Fields that concern OpenAI's service alone are passed over.
A field that is null is one that is not there.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from stoker.apps.common.openai.request import (
    ApiRequest,
    ChatMessage,
    Endpoint,
    RequestRefused,
    SamplingOptions,
)

Body = dict[str, Any]

_SERVICE = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    }
)  # fmt: skip
"""Fields of OpenAI's service: bills, logs, queues. They change no answer."""
_SAMPLING = ("temperature", "top_p", "seed", "stop", "max_tokens", "logprobs")
HONOURED = {
    Endpoint.CHAT: frozenset(
        {"model", "messages", "max_completion_tokens", "top_logprobs", "response_format", *_SAMPLING}
    ),
    Endpoint.COMPLETIONS: frozenset({"model", "prompt", *_SAMPLING}),
    Endpoint.EMBEDDINGS: frozenset({"model", "input", "encoding_format"}),
}
"""The fields of each endpoint's bodies that have their effect."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "echo": (False,), "suffix": ("",), "frequency_penalty": (0,),
    "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "parallel_tool_calls": (True, False), "modalities": (["text"],),
}  # fmt: skip
"""Values that change nothing, of fields that are refused otherwise."""
_TOOLS = ("tools", "tool_choice", "functions", "function_call")
_KNOWN = frozenset(
    {
        "stream_options", "dimensions", "reasoning_effort", "verbosity", "audio",
        "prediction", "web_search_options",
    }
)  # fmt: skip
"""Fields of OpenAI's that are refused with every value."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_COMPLETION_TOKENS = 16
"""What OpenAI writes of a completion whose request does not say how much."""
_MOST_TOKENS = 1 << 31
_MOST_LIKELIEST = 20
_LEAST_TEMPERATURE = 1e-6
_SEEDS = 1 << 63


def read_body(body: Any, *, endpoint: Endpoint, custom_id: str, line: int, max_tokens: int = 0) -> ApiRequest:
    """The request of a body. `max_tokens`: for a request that names none; 0 is OpenAI's own.

    Raises RequestRefused; its message begins with the field, and with nothing before it.
    """
    if not isinstance(body, dict):
        raise RequestRefused(f"body must be an object, and is {_shown(body)}", param="body", code="invalid_type")
    given = {name: value for name, value in body.items() if value is not None and name not in _SERVICE}
    _refuse_others(given, endpoint)
    model = _model(given)
    if endpoint is Endpoint.EMBEDDINGS:
        packed = _is_packed(given)
        return ApiRequest(custom_id, line, endpoint, model, texts=_texts(given, "input"), packed=packed)
    sampling = _sampling(given, endpoint, custom_id=custom_id, max_tokens=max_tokens)
    if endpoint is Endpoint.CHAT:
        return ApiRequest(custom_id, line, endpoint, model, messages=_messages(given), sampling=sampling)
    return ApiRequest(custom_id, line, endpoint, model, texts=_texts(given, "prompt"), sampling=sampling)


def _refuse_others(body: Body, endpoint: Endpoint) -> None:
    """Raise RequestRefused for the first field that would change the answer and that nothing here honours."""
    honoured = HONOURED[endpoint]
    for name, value in body.items():
        if name in honoured:
            continue
        if any(_equals(value, neutral) for neutral in _NEUTRAL.get(name, ())):
            continue
        if name in _TOOLS:
            raise _refused(
                name, "asks for calls of tools, which no engine here reads out of texts", "unsupported_value"
            )
        if name in _NEUTRAL:
            only = " or ".join(_json(neutral) for neutral in _NEUTRAL[name])
            raise _refused(name, f"is {_shown(value)}; only {only} can be had here", "unsupported_value")
        if name in _KNOWN:
            raise _refused(name, "is not supported here; leave it out", "unsupported_parameter")
        near = difflib.get_close_matches(name, sorted({*honoured, *_NEUTRAL}), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise _refused(name, f"is no field that {endpoint.value} is known to have{hint}", "unknown_parameter")


def _model(body: Body) -> str:
    model = _required(body, "model")
    if not isinstance(model, str) or not model:
        raise _refused("model", f"must be a text, and is {_shown(model)}", "invalid_type")
    return model


def _is_packed(body: Body) -> bool:
    form = body.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise _refused("encoding_format", f"is {_shown(form)}; it must be float or base64", "invalid_value")
    return bool(form == "base64")


def _messages(body: Body) -> tuple[ChatMessage, ...]:
    messages = _required(body, "messages")
    if not isinstance(messages, list) or not messages:
        raise _refused("messages", f"must be a list of messages, and is {_shown(messages)}", "invalid_type")
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(messages))


def _message(message: Any, where: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise _refused(where, f"must be an object, and is {_shown(message)}", "invalid_type")
    for name, value in message.items():
        if name not in ("role", "content") and value is not None:
            raise _refused(f"{where}.{name}", "is not supported here; leave it out", "unsupported_parameter")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        what = "is missing" if role is None else f"is {_shown(role)}; it must be system, user or assistant"
        raise _refused(f"{where}.role", what, "invalid_value" if role is not None else "missing_required_parameter")
    return ChatMessage(role=_ROLES[role], content=_content(message.get("content"), f"{where}.content"))


def _content(content: Any, where: str) -> str:
    """A message's text: a text, or the texts of its parts."""
    if isinstance(content, str):
        return content
    if content is None:
        raise _refused(where, "is missing", "missing_required_parameter")
    if not isinstance(content, list) or not content:
        raise _refused(where, f"must be a text or a list of parts, and is {_shown(content)}", "invalid_type")
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            what = f"is of type {_shown(kind)}; only text can be had here" if kind != "text" else "has no text"
            raise _refused(f"{where}[{number}]", what, "unsupported_value")
        texts.append(text)
    return "\n".join(texts)


def _texts(body: Body, name: str) -> tuple[str, ...]:
    """A text, or a list of texts; none of them empty."""
    value = _required(body, name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise _refused(name, f"must be a text or a list of texts, and is {_shown(value)}", "invalid_type")
    for number, text in enumerate(texts):
        where = name if isinstance(value, str) else f"{name}[{number}]"
        if not isinstance(text, str):
            tokens = "; token ids are not read: give the text" if isinstance(text, int | list) else ""
            raise _refused(where, f"must be a text, and is {_shown(text)}{tokens}", "invalid_type")
        if not text:
            raise _refused(where, "is empty", "invalid_value")
    return tuple(texts)


def _sampling(body: Body, endpoint: Endpoint, *, custom_id: str, max_tokens: int) -> SamplingOptions:
    limits = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
    if len(limits) == 2:
        raise _refused("max_tokens", "stands beside max_completion_tokens; give one of them", "invalid_value")
    own = _COMPLETION_TOKENS if endpoint is Endpoint.COMPLETIONS else 0
    return SamplingOptions(
        max_new_tokens=_whole(body, limits[0], least=1, most=_MOST_TOKENS) if limits else max_tokens or own,
        temperature=_number(body, "temperature", _is_temperature, "from 0 to 2, no nearer to 0 than 1e-6"),
        top_p=_number(body, "top_p", lambda value: 0 < value <= 1, "above 0, at most 1"),
        # What is drawn for a request depends on nothing but the request: it may run again elsewhere.
        seed=_whole(body, "seed", least=-_SEEDS, most=_SEEDS) if "seed" in body else zlib.crc32(custom_id.encode()),
        stop=_stops(body.get("stop", [])),
        logprobs=_logprobs(body) if endpoint is Endpoint.CHAT else _completion_logprobs(body),
        json_schema=_json_schema(body.get("response_format", {"type": "text"})),
    )


def _is_temperature(value: float) -> bool:
    """A model's numbers that are divided by a smaller one have no place in a float any more."""
    return value == 0 or _LEAST_TEMPERATURE <= value <= 2


def _logprobs(body: Body) -> int:
    """How many of the likeliest tokens a conversation wants at each place; -1 for no likelihood at all."""
    wants = body.get("logprobs", False)
    if not isinstance(wants, bool):
        raise _refused("logprobs", f"must be true or false, and is {_shown(wants)}", "invalid_type")
    most = _whole(body, "top_logprobs", least=0, most=_MOST_LIKELIEST) if "top_logprobs" in body else 0
    if most and not wants:
        raise _refused("top_logprobs", "wants logprobs to be true", "invalid_value")
    return most if wants else -1


def _completion_logprobs(body: Body) -> int:
    return _whole(body, "logprobs", least=0, most=_MOST_LIKELIEST) if "logprobs" in body else -1


def _json_schema(form: Any) -> str:
    """The schema that a conversation's answer has to satisfy; empty for any text."""
    kind = form.get("type") if isinstance(form, dict) else None
    if form == {"type": "text"}:
        return ""
    named = form.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        what = "has no json_schema.schema" if kind == "json_schema" else f"is {_shown(form)}; it must be of the"
        types = "" if kind == "json_schema" else " type text or json_schema"
        raise _refused("response_format", f"{what}{types}", "unsupported_value")
    return _json(schema)


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _refused("stop", f"must be a text or a list of texts, none empty, and is {_shown(value)}", "invalid_type")
    return tuple(texts)


def _whole(body: Body, name: str, *, least: int, most: int) -> int:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        shape = "a whole number of 64 bits" if least < 0 else f"a whole number from {least} to {most}"
        raise _refused(name, f"must be {shape}, and is {_shown(value)}", "invalid_value")
    return value


def _number(body: Body, name: str, fits: Callable[[float], bool], range_: str) -> float:
    value = body.get(name, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise _refused(name, f"must be a number {range_}, and is {_shown(value)}", "invalid_value")
    return float(value)


def _required(body: Mapping[str, Any], name: str) -> Any:
    if name not in body:
        raise _refused(name, "is missing", "missing_required_parameter")
    return body[name]


def _refused(param: str, problem: str, code: str) -> RequestRefused:
    return RequestRefused(f"{param} {problem}", param=param, code=code)


def _equals(value: Any, other: Any) -> bool:
    """Equality in which true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _json(value: Any) -> str:
    return str(msgspec.json.encode(value), "utf-8")


def _shown(value: Any) -> str:
    """The value in short, as JSON has it."""
    text = _json(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
