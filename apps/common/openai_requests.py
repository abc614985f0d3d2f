"""The supported part of OpenAI's API: requests, errors, and the fields of a request's body.

- Honoured fields have an effect: `HONOURED`, `ENGINE_FIELDS`, and the fields that require an output format.
- Ignored fields do not change an answer (`IGNORED`). The caller of `parse_request_body` can log them.
- Any other field is an error, unless its value has no effect (`n` of 1, `suffix` of "").

A field with the value null counts as absent.
"""

from __future__ import annotations

import difflib
import enum
import zlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec

from stoker.apps.common.openai_chat import TOOL_FIELDS, ChatMessage, Tools, read_messages, read_tools
from stoker.apps.common.refusals import ApiError as ApiError
from stoker.apps.common.refusals import RequestRefused as RequestRefused
from stoker.apps.common.refusals import (
    are_equal_json_values,
    check_texts,
    check_type,
    check_whole_number,
    encode_json_text,
    format_value,
    require_field,
)
from stoker.apps.common.refusals import field_error as field_error
from stoker.decoding import UNREADABLE, why_not_json


class Endpoint(enum.Enum):
    """The kind of a request. The value is the path of the URL."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"


class SamplingOptions(msgspec.Struct, frozen=True):
    """How the tokens of an answer are chosen, and where the answer ends.

    `max_new_tokens`: 0 if only the context length limits the answer; `logprobs`: number of likeliest tokens to report
    per token, -1 for none; `json_schema`: empty for any text; `engine_options`: further options by vLLM's names;
    `form_field`: the request field that requires an output format; `echo`: True if the answer begins with the prompt;
    `writes`: False if the answer is only the prompt.
    """

    max_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int = -1
    json_schema: str = ""
    engine_options: tuple[tuple[str, Any], ...] = ()
    form_field: str = ""
    adapter: str = ""
    echo: bool = False
    writes: bool = True


class ApiRequest(msgspec.Struct, frozen=True):
    """A checked request. `line`: line number in the request file, 0 without a file.

    Conversations have `messages`. Other requests have `texts`, or `ids` (prompts as token ids). `packed`: True for
    vectors in base64; `dimensions`: width of a vector, 0 for the model's width; `tool_parser`, `reasoning_parser`:
    empty to derive the parsers from the chat template; `pairs`: indices of texts that are scored together.
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
    tools: Tools = Tools()
    template_options: tuple[tuple[str, Any], ...] = ()
    tool_parser: str = ""
    reasoning_parser: str = ""
    ids: tuple[TokenIds, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def input_texts(self) -> tuple[str, ...]:
        """The texts that the model reads, without the texts of its chat template."""
        said = (message.content + "".join(call.arguments for call in message.calls) for message in self.messages)
        tools = (encode_json_text(self.tools.functions),) if self.tools.functions else ()
        return (*tools, *said, *self.texts)


Body = dict[str, Any]
TokenIds = tuple[int, ...]
Note = Callable[[str], None]
"""A function that is called with the name of an ignored field."""

IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "prediction", "priority", "request_id", "cache_salt",
    }
)  # fmt: skip
"""Ignored request fields: they concern the billing, logs, queues or caches of a service."""
_SAMPLING = ("temperature", "top_p", "seed", "stop", "max_tokens", "logprobs")
HONOURED = {
    Endpoint.CHAT: frozenset(
        {
            "model", "messages", "max_completion_tokens", "top_logprobs", "response_format", "chat_template_kwargs",
            *TOOL_FIELDS, *_SAMPLING,
        }
    ),
    Endpoint.COMPLETIONS: frozenset({"model", "prompt", "echo", *_SAMPLING}),
    Endpoint.EMBEDDINGS: frozenset({"model", "input", "encoding_format", "dimensions"}),
}  # fmt: skip
"""Supported body fields of each endpoint."""
_FORMS = {
    "json": "an object, or its JSON text", "regex": "a text", "choice": "a list of texts", "grammar": "a text",
}  # fmt: skip
"""vLLM's names of the structured output formats, with a description of the valid values."""
_FORM_FIELDS = frozenset({*(f"guided_{form}" for form in _FORMS), "structured_outputs", "response_format"})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "suffix": ("",), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "verbosity": ("medium",),
    "skip_special_tokens": (True,), "include_stop_str_in_output": (False,), "use_beam_search": (False,),
    "length_penalty": (1,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
    "documents": ([],), "bad_words": ([],), "vllm_xargs": ({},),
}  # fmt: skip
"""Values of unsupported fields that are accepted, because they have no effect."""
_DEPRECATED = {"functions": "tools", "function_call": "tool_choice"}
REFUSED = frozenset(
    {
        "stream_options", "reasoning_effort", "audio", "web_search_options", "moderation", "chat_template",
        "add_special_tokens", "allowed_token_ids", "prompt_logprobs", "truncate_prompt_tokens",
        "thinking_token_budget",
    }
)  # fmt: skip
_OWN_TEMPLATE_OPTIONS = frozenset(
    {
        "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
        "continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs",
        "padding", "truncation", "max_length",
    }
)  # fmt: skip
"""Arguments of `apply_chat_template` that a request must not set."""
_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for a completion."""
_MOST_TOKENS = 1 << 31
_MOST_LIKELIEST = 20
_MOST_INPUTS = 2048
"""OpenAI's maximum number of texts in an embeddings request."""
_LEAST_TEMPERATURE = 1e-6
"""Minimum temperature above 0. A division by a smaller temperature overflows a float."""
_SEEDS = 1 << 63


def parse_request_body(
    body: Any, *, endpoint: Endpoint, custom_id: str, line: int, max_tokens: int = 0,
    ignored: Note = lambda _field: None,
) -> ApiRequest:  # fmt: skip
    """Parse a request. Raises RequestRefused with a message that begins with the invalid field. `max_tokens`: default
    limit of new tokens, 0 for OpenAI's default.
    """
    check_type(body, dict, "body")
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    _refuse_unsupported_fields(given, endpoint)
    for name in body.keys() & IGNORED:
        if body[name] is not None:
            ignored(name)
    model = read_model_name(given)
    if endpoint is Endpoint.EMBEDDINGS:
        form, width = given.get("encoding_format", "float"), given.get("dimensions")
        if form not in ("float", "base64"):
            raise field_error(
                "encoding_format", f"is {format_value(form)}; it must be float or base64", "invalid_value"
            )
        texts = check_texts(require_field(given, "input"), "input", most=_MOST_INPUTS)
        return ApiRequest(
            custom_id, line, endpoint, model, texts=tuple(texts),
            packed=form == "base64",
            dimensions=check_whole_number(width, "dimensions", least=1, most=_MOST_TOKENS) if width is not None else 0,
        )  # fmt: skip
    sampling = _read_sampling_options(given, endpoint, custom_id=custom_id, max_tokens=max_tokens)
    if endpoint is Endpoint.CHAT:
        tools = read_tools(given)
        if tools.is_call_required:  # the call replaces any other required output format
            options = tuple((name, value) for name, value in sampling.engine_options if name not in _FORMS)
            sampling = msgspec.structs.replace(
                sampling, json_schema=tools.call_schema, engine_options=options, form_field="tool_choice"
            )
        return ApiRequest(
            custom_id, line, endpoint, model, messages=read_messages(require_field(given, "messages"), ignored),
            sampling=sampling, tools=tools, template_options=tuple(_read_template_options(given)),
        )  # fmt: skip
    prompt = require_field(given, "prompt")
    ids = _read_token_id_prompts(prompt)
    texts = [] if ids else check_texts(prompt, "prompt", or_ids=" or token ids")
    return ApiRequest(custom_id, line, endpoint, model, texts=tuple(texts), sampling=sampling, ids=ids)


def parse_json_object(data: bytes) -> Body:
    try:
        body = msgspec.json.decode(data)
    except UNREADABLE as error:
        raise RequestRefused(f"the body is not JSON: {why_not_json(data, error)}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object", code="invalid_json")
    return body


def _refuse_unsupported_fields(body: Body, endpoint: Endpoint) -> None:
    writes = endpoint is not Endpoint.EMBEDDINGS
    honoured = HONOURED[endpoint] | (ENGINE_FIELDS.keys() | _FORM_FIELDS if writes else set())
    for name, value in body.items():
        if name in honoured:
            continue
        if any(are_equal_json_values(value, neutral) for neutral in NEUTRAL.get(name, ())):
            continue
        if name in _DEPRECATED:
            raise field_error(name, f"is deprecated and not supported; use {_DEPRECATED[name]}", "unsupported_value")
        if name in NEUTRAL:
            only = " or ".join(encode_json_text(neutral) for neutral in NEUTRAL[name])
            raise field_error(name, f"is {format_value(value)}; only {only} is supported", "unsupported_value")
        if name in REFUSED:
            raise field_error(name, "is not supported here; leave it out", "unsupported_parameter")
        near = difflib.get_close_matches(name, sorted({*honoured, *NEUTRAL}), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise field_error(name, f"is not a known field of {endpoint.value} requests{hint}", "unknown_parameter")


def read_model_name(body: Body) -> str:
    model = require_field(body, "model")
    if not isinstance(model, str) or not model:
        raise field_error("model", f"must be a text, and is {format_value(model)}", "invalid_type")
    return model


def _read_template_options(body: Body) -> Iterable[tuple[str, Any]]:
    options = check_type(body.get("chat_template_kwargs", {}), dict, "chat_template_kwargs")
    for name in options.keys() & _OWN_TEMPLATE_OPTIONS:
        field = f"chat_template_kwargs.{name}"
        raise field_error(field, "is not supported here; leave it out", "unsupported_parameter")
    return options.items()


def _read_token_id_prompts(prompt: Any) -> tuple[TokenIds, ...]:
    """Return prompts of token ids, or an empty tuple if the prompts are texts."""
    if not isinstance(prompt, list) or not prompt or not any(isinstance(each, int | list) for each in prompt):
        return ()
    prompts = prompt if isinstance(prompt[0], list) else [prompt]
    for number, tokens in enumerate(prompts):
        where = f"prompt[{number}]" if prompts is prompt else "prompt"
        if not isinstance(tokens, list):
            what = f"must be a list of token ids, like prompt[0], and is {format_value(tokens)}"
            raise field_error(where, what, "invalid_type")
        if not tokens:
            raise field_error(where, "is empty", "invalid_value")
        for place, token in enumerate(tokens):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _MOST_TOKENS:
                raise field_error(
                    f"{where}[{place}]", f"must be a token id, and is {format_value(token)}", "invalid_type"
                )
    return tuple(map(tuple, prompts))


def _read_sampling_options(body: Body, endpoint: Endpoint, *, custom_id: str, max_tokens: int) -> SamplingOptions:
    limits = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
    if len(limits) == 2:
        raise field_error(
            "max_tokens", "is given together with max_completion_tokens; give one of them", "invalid_value"
        )
    own = _COMPLETION_TOKENS if endpoint is Endpoint.COMPLETIONS else 0
    form_field, form, value = _read_output_format(body)
    schema, options = (value, ()) if form == "json_schema" else ("", ((form, value),) if form else ())
    echo = check_type(body.get("echo", False), bool, "echo")
    given = _read_whole_number(body, limits[0], least=0 if echo else 1, most=_MOST_TOKENS) if limits else -1
    return SamplingOptions(
        max_new_tokens=given if limits else max_tokens or own,
        temperature=_read_number(
            body, "temperature", lambda value: value == 0 or _LEAST_TEMPERATURE <= value <= 2,
            "from 1e-6 to 2, or 0",
        ),
        top_p=_read_number(body, "top_p", lambda value: 0 < value <= 1, "above 0, at most 1"),
        # The seed must depend only on the request, because the request may run again elsewhere.
        seed=_read_whole_number(body, "seed", least=-_SEEDS, most=_SEEDS)
        if "seed" in body
        else zlib.crc32(custom_id.encode()),
        stop=_read_stop_texts(body.get("stop", [])),
        logprobs=_read_logprob_count(body, endpoint),
        json_schema=schema,
        engine_options=(*_read_engine_options(body), *options),
        form_field=form_field,
        echo=echo,
        writes=given != 0,
    )  # fmt: skip


def _read_engine_options(body: Body) -> Iterable[tuple[str, Any]]:
    for name, (kind, shape, neutral) in ENGINE_FIELDS.items():
        if name in body and not any(are_equal_json_values(body[name], each) for each in neutral):
            try:
                yield name, msgspec.convert(body[name], kind, str_keys=True)
            except msgspec.ValidationError:
                raise field_error(
                    name, f"must be {shape}, and is {format_value(body[name])}", "invalid_value"
                ) from None


def _read_logprob_count(body: Body, endpoint: Endpoint) -> int:
    if endpoint is not Endpoint.CHAT:
        return _read_whole_number(body, "logprobs", least=0, most=_MOST_LIKELIEST) if "logprobs" in body else -1
    wants = check_type(body.get("logprobs", False), bool, "logprobs")
    most = _read_whole_number(body, "top_logprobs", least=0, most=_MOST_LIKELIEST) if "top_logprobs" in body else 0
    if most and not wants:
        raise field_error("top_logprobs", "needs logprobs to be true", "invalid_value")
    return most if wants else -1


def _read_output_format(body: Body) -> tuple[str, str, Any]:
    """Return the field that sets an output format, the engine option, and its value, or three empty values."""
    asked = [(name, name.removeprefix("guided_"), body[name]) for name in body if name.startswith("guided_")]
    outputs = check_type(body.get("structured_outputs", {}), dict, "structured_outputs")
    for name, value in outputs.items():
        field, is_any = f"structured_outputs.{name}", name == "json_object" and value is True
        if not is_any and name not in _FORMS and value not in (None, False):
            raise field_error(field, "is not supported here; leave it out", "unsupported_parameter")
        if value not in (None, False):
            asked.append((field, "json", {"type": "object"}) if is_any else (field, name, value))
    schema = _read_response_schema(body.get("response_format", {"type": "text"}))
    if schema is not None:
        asked.append(("response_format", "json", schema))
    if len(asked) > 1:
        raise field_error(asked[1][0], f"is given together with {asked[0][0]}; give one of them", "invalid_value")
    for field, name, value in asked:
        value = encode_json_text(value) if name == "json" and isinstance(value, dict) else value
        texts = value if name == "choice" else [value]
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise field_error(field, f"must be {_FORMS[name]}, and is {format_value(value)}", "invalid_type")
        return field, "json_schema" if name == "json" else name, value
    return "", "", None


def _read_response_schema(form: Any) -> Body | None:
    kind = form.get("type") if isinstance(form, dict) else None
    if kind in ("text", "json_object"):
        return {"type": "object"} if kind == "json_object" else None
    if kind != "json_schema":
        what = f"is {format_value(form)}; it must be of the type text, json_object or json_schema"
        raise field_error("response_format", what, "unsupported_value")
    named = form.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise field_error("response_format", "has no json_schema.schema", "unsupported_value")
    return schema


def _read_stop_texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise field_error("stop", f"must be one or more nonempty texts, and is {format_value(value)}", "invalid_type")
    return tuple(texts)


def _read_whole_number(body: Body, name: str, *, least: int, most: int) -> int:
    return check_whole_number(body[name], name, least=least, most=most)


def _read_number(body: Body, name: str, fits: Callable[[float], bool], range_: str) -> float:
    value = body.get(name, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise field_error(name, f"must be a number {range_}, and is {format_value(value)}", "invalid_value")
    return float(value)


_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]
_Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
ENGINE_FIELDS: dict[str, tuple[Any, str, tuple[Any, ...]]] = {
    "frequency_penalty": (_Penalty, "a number from -2 to 2", (0,)),
    "presence_penalty": (_Penalty, "a number from -2 to 2", (0,)),
    "logit_bias": (dict[_Tokens, _Bias], "an object of token ids with numbers from -100 to 100", ({},)),
    "repetition_penalty": (Annotated[float, msgspec.Meta(ge=1e-3, le=100)], "a number above 0", (1,)),
    "top_k": (Annotated[int, msgspec.Meta(ge=-1, le=_MOST_TOKENS)], "a whole number, -1 or more", (-1, 0)),
    "min_p": (Annotated[float, msgspec.Meta(ge=0, le=1)], "a number from 0 to 1", (0,)),
    "min_tokens": (_Tokens, "a whole number, 0 or more", (0,)),
    "ignore_eos": (bool, "true or false", (False,)),
    "stop_token_ids": (list[_Tokens], "a list of token ids", ([],)),
}
"""Request fields for engine options: type, valid values in words, and values without effect."""
