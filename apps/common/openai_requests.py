"""The part of OpenAI's API that Stoker has: a request, its errors, and the fields of its body.

- Honoured fields have their effect: `HONOURED`, and `ENGINE_FIELDS` if the model's engine has the option.
- Ignored fields concern OpenAI's service or the client alone and change no answer (`IGNORED`). `read_body` reports
  them, so that its caller can log each once.
- All other fields, known or not, are refused by name, unless the value changes nothing (`n` of 1, `logit_bias` of
  `{}`).

A null field counts as absent. Messages have their own table: clients send back the messages of earlier answers, so
every field of OpenAI's answers is accepted.
"""

from __future__ import annotations

import difflib
import enum
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from stoker.decoding import UNREADABLE, why_not_json


class Endpoint(enum.Enum):
    """The kind of a request; the value is its `url`."""

    CHAT = "/v1/chat/completions"
    """The next message of a conversation."""
    COMPLETIONS = "/v1/completions"
    """The part after a text."""
    EMBEDDINGS = "/v1/embeddings"
    """A vector for each text."""


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation. `role`: system, user or assistant; `name`: its author, for chat templates that
    show it.
    """

    role: str
    content: str
    name: str = ""


class SamplingOptions(msgspec.Struct, frozen=True):
    """How tokens are chosen, and when the text ends.

    `max_new_tokens` 0: no limit but the context length. `logprobs`: the number of likely tokens to report at each
    place in addition to the chosen one; -1: no log-probabilities. `json_schema`: the schema that the text must
    satisfy; empty: none. `engine_options`: options that only some engines have, by vLLM's names.
    """

    max_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int = -1
    json_schema: str = ""
    engine_options: tuple[tuple[str, Any], ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that only some engines have."""
        return (*(["json_schema"] if self.json_schema else []), *(name for name, _ in self.engine_options))


class ApiRequest(msgspec.Struct, frozen=True):
    """One checked request. `line`: its line in a file; 0: it comes from no file.

    A conversation has `messages`; the other endpoints have `texts`, with an answer to each. `packed`: vectors in
    base64. `dimensions`: the expected width of a vector; 0: the model's.
    """

    custom_id: str
    line: int
    endpoint: Endpoint
    model: str
    messages: tuple[ChatMessage, ...] = ()
    texts: tuple[str, ...] = ()
    sampling: SamplingOptions = SamplingOptions()
    packed: bool = False
    dimensions: int = 0


class ApiError(msgspec.Struct, frozen=True):
    """Why a request has no answer, in OpenAI's words. `param`: the path of the field in the body."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    status: int = 400

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class RequestRefused(Exception):
    """A request cannot be answered; `error` says why."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400,
        type: str = "invalid_request_error",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.error = ApiError(message, type=type, param=param, code=code, status=status)


Body = dict[str, Any]
Note = Callable[[str], None]
"""Takes the name of an ignored field."""

IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "prediction", "priority", "request_id", "cache_salt",
    }
)  # fmt: skip
"""Fields of a service (bills, logs, queues, caches). They change no answer."""
_SAMPLING = ("temperature", "top_p", "seed", "stop", "max_tokens", "logprobs")
HONOURED = {
    Endpoint.CHAT: frozenset(
        {"model", "messages", "max_completion_tokens", "top_logprobs", "response_format", *_SAMPLING}
    ),
    Endpoint.COMPLETIONS: frozenset({"model", "prompt", *_SAMPLING}),
    Endpoint.EMBEDDINGS: frozenset({"model", "input", "encoding_format", "dimensions"}),
}
"""Body fields of each endpoint that every engine honours."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "echo": (False,), "suffix": ("",), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "modalities": (["text"],), "verbosity": ("medium",),
    "skip_special_tokens": (True,), "include_stop_str_in_output": (False,), "use_beam_search": (False,),
    "length_penalty": (1,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "chat_template_kwargs": ({},),
    "documents": ([],), "bad_words": ([],), "vllm_xargs": ({},),
}  # fmt: skip
"""Values without effect of fields that are otherwise refused, OpenAI's and vLLM's."""
_TOOLS = ("tools", "tool_choice", "functions", "function_call")
REFUSED = frozenset(
    {
        "stream_options", "reasoning_effort", "audio", "web_search_options", "moderation", "chat_template",
        "add_special_tokens", "allowed_token_ids", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "structured_outputs", "prompt_logprobs", "truncate_prompt_tokens", "thinking_token_budget",
    }
)  # fmt: skip
"""Fields that are refused whatever their value."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MESSAGE_HONOURED = ("role", "content", "name", "refusal")
_MESSAGE_IGNORED = frozenset(
    {
        "annotations", "metadata", "id", "object", "created", "status", "weight", "reasoning", "reasoning_content",
        "reasoning_details", "provider_specific_fields", "cache_control", "logprobs", "finish_reason", "index",
    }
)  # fmt: skip
"""Message fields that never reach a prompt: facts of earlier answers, and notes of clients."""
_MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "function_call": ({},), "audio": ({},)}
_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for a completion."""
_MOST_TOKENS = 1 << 31
_MOST_LIKELIEST = 20
_MOST_INPUTS = 2048
"""The most texts of one embeddings request, as with OpenAI."""
_LEAST_TEMPERATURE = 1e-6
_SEEDS = 1 << 63


def read_body(
    body: Any,
    *,
    endpoint: Endpoint,
    custom_id: str,
    line: int,
    max_tokens: int = 0,
    ignored: Note = lambda _field: None,
) -> ApiRequest:
    """Parse the body of a request.

    Args:
        max_tokens: the limit for a request that names none; 0 is OpenAI's default.
        ignored: called with the name of each ignored field.

    Raises:
        RequestRefused: its message begins with the field.
    """
    if not isinstance(body, dict):
        raise RequestRefused(f"body must be an object, and is {_shown(body)}", param="body", code="invalid_type")
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    _refuse_others(given, endpoint)
    for name in body.keys() & IGNORED:
        if body[name] is not None:
            ignored(name)
    model = _model(given)
    if endpoint is Endpoint.EMBEDDINGS:
        return ApiRequest(
            custom_id, line, endpoint, model, texts=_texts(given, "input", most=_MOST_INPUTS), packed=_is_packed(given),
            dimensions=_whole(given, "dimensions", least=1, most=_MOST_TOKENS) if "dimensions" in given else 0,
        )  # fmt: skip
    sampling = _sampling(given, endpoint, custom_id=custom_id, max_tokens=max_tokens)
    if endpoint is Endpoint.CHAT:
        messages = _messages(given, ignored)
        return ApiRequest(custom_id, line, endpoint, model, messages=messages, sampling=sampling)
    return ApiRequest(custom_id, line, endpoint, model, texts=_texts(given, "prompt"), sampling=sampling)


def read_object(data: bytes) -> Body:
    """Parse the JSON object of a request's body. Raises RequestRefused."""
    try:
        body = msgspec.json.decode(data)
    except UNREADABLE as error:
        raise RequestRefused(f"the body is not JSON: {why_not_json(data, error)}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object", code="invalid_json")
    return body


def refuse_engine_fields(request: ApiRequest, honoured: frozenset[str]) -> None:
    """Raise RequestRefused for an option that the engine does not have. `honoured`: the names of those it has
    (`stoker.contexts.engine_options`).
    """
    for option in request.sampling.options:
        if option not in honoured:
            what = "is no option of the engine of this model"
            if option == "json_schema":
                what = "asks for JSON, and the engine of this model cannot hold a text to a JSON schema"
            raise refused(FIELD_OF.get(option, option), f'{what}; engine = "vllm" can', "unsupported_value")


FIELD_OF = {"json_schema": "response_format"}
"""The request field of an engine option with another name."""


def _refuse_others(body: Body, endpoint: Endpoint) -> None:
    """Raise RequestRefused for the first field that would change the answer and is not honoured."""
    honoured = HONOURED[endpoint] | (ENGINE_FIELDS.keys() if endpoint is not Endpoint.EMBEDDINGS else set())
    for name, value in body.items():
        if name in honoured:
            continue
        if any(_equals(value, neutral) for neutral in NEUTRAL.get(name, ())):
            continue
        if name in _TOOLS:
            raise refused(name, "asks for calls of tools, which no engine here reads out of texts", "unsupported_value")
        if name in NEUTRAL:
            only = " or ".join(_json(neutral) for neutral in NEUTRAL[name])
            raise refused(name, f"is {_shown(value)}; only {only} is supported", "unsupported_value")
        if name in REFUSED:
            raise refused(name, "is not supported here; leave it out", "unsupported_parameter")
        near = difflib.get_close_matches(name, sorted({*honoured, *NEUTRAL}), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise refused(name, f"is no field that {endpoint.value} is known to have{hint}", "unknown_parameter")


def _model(body: Body) -> str:
    model = _required(body, "model")
    if not isinstance(model, str) or not model:
        raise refused("model", f"must be a text, and is {_shown(model)}", "invalid_type")
    return model


def _is_packed(body: Body) -> bool:
    form = body.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise refused("encoding_format", f"is {_shown(form)}; it must be float or base64", "invalid_value")
    return bool(form == "base64")


def _messages(body: Body, ignored: Note) -> tuple[ChatMessage, ...]:
    messages = _required(body, "messages")
    if not isinstance(messages, list) or not messages:
        raise refused("messages", f"must be a list of messages, and is {_shown(messages)}", "invalid_type")
    return tuple(_message(message, f"messages[{number}]", ignored) for number, message in enumerate(messages))


def _message(message: Any, where: str, ignored: Note) -> ChatMessage:
    if not isinstance(message, dict):
        raise refused(where, f"must be an object, and is {_shown(message)}", "invalid_type")
    for name, value in message.items():
        if value is None or name in _MESSAGE_HONOURED:
            continue
        if name in _MESSAGE_IGNORED:
            ignored(f"messages[].{name}")
        elif not any(_equals(value, neutral) for neutral in _MESSAGE_NEUTRAL.get(name, ())):
            _refuse_message_field(name, f"{where}.{name}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        what = "is missing" if role is None else f"is {_shown(role)}; it must be system, user or assistant"
        raise refused(f"{where}.role", what, "invalid_value" if role is not None else "missing_required_parameter")
    name = message.get("name") or ""
    if not isinstance(name, str):
        raise refused(f"{where}.name", f"must be a text, and is {_shown(name)}", "invalid_type")
    return ChatMessage(role=_ROLES[role], content=_content_or_refusal(message, where), name=name)


def _refuse_message_field(name: str, where: str) -> None:
    if name in _MESSAGE_NEUTRAL or name == "tool_call_id":
        raise refused(where, "is not supported here; leave it out", "unsupported_parameter")
    near = difflib.get_close_matches(name, ["role", "content", "name"], n=1)
    hint = f"; did you mean {near[0]}?" if near else "; leave it out"
    raise refused(where, f"is no field that a message is known to have{hint}", "unknown_parameter")


def _content_or_refusal(message: Body, where: str) -> str:
    """Return the text of a message; an assistant's refusal replaces its content."""
    refusal, content = message.get("refusal"), message.get("content")
    if not refusal:
        return _content(content, f"{where}.content")
    if not isinstance(refusal, str):
        raise refused(f"{where}.refusal", f"must be a text, and is {_shown(refusal)}", "invalid_type")
    if content:
        raise refused(f"{where}.refusal", "stands next to a content; give one of them", "invalid_value")
    return refusal


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise refused(where, "is missing", "missing_required_parameter")
    if not isinstance(content, list) or not content:
        raise refused(where, f"must be a text or a list of parts, and is {_shown(content)}", "invalid_type")
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            what = (
                f"is of type {_shown(kind)}; only text is supported"
                if kind not in ("text", "refusal")
                else "has no text"
            )
            raise refused(f"{where}[{number}]", what, "unsupported_value")
        texts.append(text)
    return "\n".join(texts)


def _texts(body: Body, name: str, *, most: int = 0) -> tuple[str, ...]:
    """Return a text or a list of at most `most` texts (0: any number), none empty."""
    value = _required(body, name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise refused(name, f"must be a text or a list of texts, and is {_shown(value)}", "invalid_type")
    if most and len(texts) > most:
        raise refused(name, f"has {len(texts):,} texts, and {most:,} may be asked for at once", "invalid_value")
    for number, text in enumerate(texts):
        where = name if isinstance(value, str) else f"{name}[{number}]"
        if not isinstance(text, str):
            tokens = "; token ids are not read: give the text" if isinstance(text, int | list) else ""
            raise refused(where, f"must be a text, and is {_shown(text)}{tokens}", "invalid_type")
        if not text:
            raise refused(where, "is empty", "invalid_value")
    return tuple(texts)


def _sampling(body: Body, endpoint: Endpoint, *, custom_id: str, max_tokens: int) -> SamplingOptions:
    limits = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
    if len(limits) == 2:
        raise refused("max_tokens", "is given together with max_completion_tokens; give one of them", "invalid_value")
    own = _COMPLETION_TOKENS if endpoint is Endpoint.COMPLETIONS else 0
    return SamplingOptions(
        max_new_tokens=_whole(body, limits[0], least=1, most=_MOST_TOKENS) if limits else max_tokens or own,
        temperature=_number(body, "temperature", _is_temperature, "from 0 to 2, no nearer to 0 than 1e-6"),
        top_p=_number(body, "top_p", lambda value: 0 < value <= 1, "above 0, at most 1"),
        # The random draw for a request depends on the request alone: it may run again elsewhere.
        seed=_whole(body, "seed", least=-_SEEDS, most=_SEEDS) if "seed" in body else zlib.crc32(custom_id.encode()),
        stop=_stops(body.get("stop", [])),
        logprobs=_logprobs(body) if endpoint is Endpoint.CHAT else _completion_logprobs(body),
        json_schema=_json_schema(body.get("response_format", {"type": "text"})),
        engine_options=tuple(_engine_options(body)),
    )


def _engine_options(body: Body) -> Iterable[tuple[str, Any]]:
    """Yield options that only some engines have, without neutral values."""
    for name, (fits, shape, neutral) in ENGINE_FIELDS.items():
        if name not in body or any(_equals(body[name], each) for each in neutral):
            continue
        if not fits(body[name]):
            raise refused(name, f"must be {shape}, and is {_shown(body[name])}", "invalid_value")
        value = body[name]
        yield name, {int(token): bias for token, bias in value.items()} if name == "logit_bias" else value


def _is_temperature(value: float) -> bool:
    """False for values so small that dividing by them overflows a float."""
    return value == 0 or _LEAST_TEMPERATURE <= value <= 2


def _logprobs(body: Body) -> int:
    """Return the number of likely tokens that a conversation asks for at each place; -1 for no log-probabilities."""
    wants = body.get("logprobs", False)
    if not isinstance(wants, bool):
        raise refused("logprobs", f"must be true or false, and is {_shown(wants)}", "invalid_type")
    most = _whole(body, "top_logprobs", least=0, most=_MOST_LIKELIEST) if "top_logprobs" in body else 0
    if most and not wants:
        raise refused("top_logprobs", "wants logprobs to be true", "invalid_value")
    return most if wants else -1


def _completion_logprobs(body: Body) -> int:
    return _whole(body, "logprobs", least=0, most=_MOST_LIKELIEST) if "logprobs" in body else -1


def _json_schema(form: Any) -> str:
    """Return the schema that the answer must satisfy; empty for any text."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return _json({"type": "object"})
    named = form.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        what = "has no json_schema.schema" if kind == "json_schema" else f"is {_shown(form)}; it must be of the"
        types = "" if kind == "json_schema" else " type text, json_object or json_schema"
        raise refused("response_format", f"{what}{types}", "unsupported_value")
    return _json(schema)


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise refused("stop", f"must be a text or a list of texts, none empty, and is {_shown(value)}", "invalid_type")
    return tuple(texts)


def _whole(body: Body, name: str, *, least: int, most: int) -> int:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        shape = "a whole number of 64 bits" if least < 0 else f"a whole number from {least} to {most}"
        raise refused(name, f"must be {shape}, and is {_shown(value)}", "invalid_value")
    return value


def _number(body: Body, name: str, fits: Callable[[float], bool], range_: str) -> float:
    value = body.get(name, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise refused(name, f"must be a number {range_}, and is {_shown(value)}", "invalid_value")
    return float(value)


def _required(body: Mapping[str, Any], name: str) -> Any:
    if name not in body:
        raise refused(name, "is missing", "missing_required_parameter")
    return body[name]


def refused(param: str, problem: str, code: str) -> RequestRefused:
    return RequestRefused(f"{param} {problem}", param=param, code=code)


def _equals(value: Any, other: Any) -> bool:
    """Equality in which true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _json(value: Any) -> str:
    return str(msgspec.json.encode(value), "utf-8")


def _shown(value: Any) -> str:
    text = _json(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_whole(value: Any, least: int = 0, most: int = _MOST_TOKENS) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        token.isdecimal() and len(token) < 10 and _is_number(bias, -100, 100) for token, bias in value.items()
    )


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


ENGINE_FIELDS: dict[str, tuple[Callable[[Any], bool], str, tuple[Any, ...]]] = {
    "frequency_penalty": (lambda value: _is_number(value, -2, 2), "a number from -2 to 2", (0,)),
    "presence_penalty": (lambda value: _is_number(value, -2, 2), "a number from -2 to 2", (0,)),
    "logit_bias": (_is_bias, "an object of token ids with numbers from -100 to 100", ({},)),
    "repetition_penalty": (lambda value: _is_number(value, 1e-3, 100), "a number above 0", (1,)),
    "top_k": (lambda value: _is_whole(value, -1), "a whole number, -1 or more", (-1, 0)),
    "min_p": (lambda value: _is_number(value, 0, 1), "a number from 0 to 1", (0,)),
    "min_tokens": (_is_whole, "a whole number, 0 or more", (0,)),
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false", (False,)),
    "stop_token_ids": (_are_tokens, "a list of token ids", ([],)),
}
"""Request fields for engine options: a check, the valid values in words, and neutral values."""
