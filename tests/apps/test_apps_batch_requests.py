import gzip
import json

import pytest

from stoker.apps.batch_inference.options import EXAMPLE, ModelPaths, read_models
from stoker.apps.batch_inference.request_file import RefusedLine, check_file, parse_request_line, read_requests
from stoker.apps.common.openai_requests import ChatMessage, Endpoint, SamplingOptions
from stoker.datafile import Line
from stoker.errors import ConfigError

ANY = ModelPaths(named={}, every="models/m", engine="continuous")
CHAT, COMPLETIONS, EMBEDDINGS = (endpoint.value for endpoint in Endpoint)
TURN = [{"role": "user", "content": "Hello"}]


def line_of(body, *, url=CHAT, custom_id="a", method="POST", number=3, **more):
    given = {"custom_id": custom_id, "method": method, "url": url, "body": body, **more}
    return Line(number, json.dumps(given).encode())


def read(body, *, max_tokens=0, models=ANY, **about):
    return parse_request_line(line_of(body, **about), seen={}, admit=models.check_model, max_tokens=max_tokens)


def put(path, lines):
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def request(custom_id, **body):
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": {"model": "m", "prompt": "x", **body}}


# ---- honoured fields


def test_conversation_keeps_every_supported_field():
    turns = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "Three", "refusal": None, "tool_calls": None},
    ]
    options = {"temperature": 0, "top_p": 0.5, "seed": -7, "stop": ["a", "b"], "max_completion_tokens": 9}
    found = read({"model": "m", "messages": turns, **options})
    assert found.messages == (
        ChatMessage("system", "Be short."), ChatMessage("user", "One\ntwo"), ChatMessage("assistant", "Three"),
    )  # fmt: skip
    assert found.sampling == SamplingOptions(9, 0.0, 0.5, -7, ("a", "b"))
    assert (found.custom_id, found.line, found.endpoint, found.model) == ("a", 3, Endpoint.CHAT, "m")


def test_sampling_defaults_equal_those_of_openai():
    chat = read({"model": "m", "messages": TURN}).sampling
    assert (chat.max_new_tokens, chat.temperature, chat.top_p, chat.stop) == (0, 1.0, 1.0, ())
    assert read({"model": "m", "prompt": "x"}, url=COMPLETIONS).sampling.max_new_tokens == 16
    assert read({"model": "m", "prompt": "x"}, url=COMPLETIONS, max_tokens=5).sampling.max_new_tokens == 5
    assert read({"model": "m", "messages": TURN, "max_tokens": 3}, max_tokens=5).sampling.max_new_tokens == 3


def test_default_seed_depends_on_the_request_alone():
    def seed(name):
        return read({"model": "m", "messages": TURN}, custom_id=name).sampling.seed

    assert seed("a") == seed("a") != seed("b")


def test_logprobs_and_json_schema_options_are_read():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    options = {"logprobs": True, "top_logprobs": 4, "response_format": form}
    found = read({"model": "m", "messages": TURN, **options})
    assert found.sampling.logprobs == 4
    assert json.loads(found.sampling.json_schema) == schema
    assert read({"model": "m", "messages": TURN, "logprobs": True}).sampling.logprobs == 0
    assert read({"model": "m", "prompt": "x", "logprobs": 0}, url=COMPLETIONS).sampling.logprobs == 0
    assert read({"model": "m", "prompt": "x"}, url=COMPLETIONS).sampling.logprobs == -1


def test_completion_request_accepts_one_or_several_prompts():
    assert read({"model": "m", "prompt": "x", "stop": "."}, url=COMPLETIONS).texts == ("x",)
    assert read({"model": "m", "prompt": ["x", "y"]}, url=COMPLETIONS).texts == ("x", "y")


def test_embeddings_request_accepts_several_texts_and_both_encodings():
    found = read({"model": "m", "input": "x", "encoding_format": "float"}, url=EMBEDDINGS)
    assert (found.endpoint, found.texts, found.packed) == (Endpoint.EMBEDDINGS, ("x",), False)
    found = read({"model": "m", "input": ["x", "y"], "encoding_format": "base64"}, url=EMBEDDINGS)
    assert (found.texts, found.packed) == (("x", "y"), True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1), ("n", None), ("stream", False), ("logit_bias", {}), ("frequency_penalty", 0.0), ("tools", []),
        ("response_format", {"type": "text"}), ("logprobs", False), ("top_logprobs", 0), ("user", "ana"),
        ("metadata", {"run": "7"}), ("service_tier", "flex"), ("store", True), ("tools", None), ("top_k", -1),
        ("safety_identifier", "x"), ("prompt_cache_key", "x"), ("prediction", {"type": "content", "content": "x"}),
        ("repetition_penalty", 1.0), ("verbosity", "medium"), ("modalities", ["text"]), ("min_p", 0.0),
    ],
)  # fmt: skip
def test_value_without_effect_is_accepted(name, value):
    assert read({"model": "m", "messages": TURN, name: value}) == read({"model": "m", "messages": TURN})


# ---- refused fields

WRONG_CHAT = [
    ({"n": 2}, "n", "unsupported_value", "is 2; only 1 is supported"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value", 'must be an object of token ids with numbers'),
    ({"frequency_penalty": 3}, "frequency_penalty", "invalid_value", "must be a number from -2 to 2, and is 3"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_type", "must be an object"),
    ({"response_format": {"type": "json_schema"}}, "response_format", None, "has no json_schema.schema"),
    ({"logprobs": 2}, "logprobs", "invalid_type", "must be true or false, and is 2"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value", "needs logprobs to be true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "from 0 to 20, and is 21"),
    ({"temperature": 1e-9}, "temperature", "invalid_value", "from 1e-6 to 2, or 0, and is 1e-9"),
    ({"temprature": 0.5}, "temprature", "unknown_parameter", "did you mean temperature?"),
    ({"top_k": "x"}, "top_k", "invalid_value", "must be a whole number, -1 or more"),
    ({"top_p": 0}, "top_p", "invalid_value", "above 0, at most 1"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", "a whole number from 1 to 2147483648, and is 0"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "invalid_value", "with max_completion_tokens"),
    ({"seed": 1 << 70}, "seed", "invalid_value", "a whole number of 64 bits"),
    ({"stop": ""}, "stop", "invalid_type", "nonempty texts"),
    ({"model": ""}, "model", "invalid_type", "must be a text"),
    ({"model": None}, "model", "missing_required_parameter", "body.model is missing"),
    ({"messages": []}, "messages", "invalid_type", "must be a list of messages, and is []"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter", "is missing"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value", 'is "robot"; it must be'),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter", "is missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_type", "and is 3"),
    ({"messages": [{**TURN[0], "name": 3}]}, "messages[0].name", "invalid_type", "must be a text, and is 3"),
    ({"messages": [{**TURN[0], "audio": {"id": "x"}}]}, "messages[0].audio", "unsupported_parameter", "leave it"),
    ({"messages": [{**TURN[0], "contents": "x"}]}, "messages[0].contents", "unknown_parameter", "mean content?"),
    ({"messages": [{**TURN[0], "refusal": "no"}]}, "messages[0].refusal", "invalid_value", "together with content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]", "unsupported_value", 'is of type "image_url"; only text is supported',
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", None, "has no text"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code", "says"), WRONG_CHAT)
def test_unsupported_chat_body_is_refused(fields, param, code, says):
    found = read({"model": "m", "messages": TURN, **fields})
    assert isinstance(found, RefusedLine)
    assert found.custom_id == "a"
    assert found.error.param == param
    assert code is None or found.error.code == code
    assert found.error.message.startswith(f"line 3: body.{param} ")
    assert says in found.error.message
    assert found.error.status == 400
    assert found.error.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("url", "fields", "param", "says"),
    [
        (COMPLETIONS, {"prompt": [1, -2, 3]}, "prompt[1]", "must be a token id, and is -2"),
        (COMPLETIONS, {"prompt": [[1, 2], [3, 1.5]]}, "prompt[1][1]", "must be a token id, and is 1.5"),
        (COMPLETIONS, {"prompt": [[1, 2], "a"]}, "prompt[1]", "must be a list of token ids, like prompt[0]"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "is empty"),
        (COMPLETIONS, {"best_of": 3}, "best_of", "only 1 is supported"),
        (COMPLETIONS, {"echo": 1}, "echo", "must be true or false, and is 1"),
        (COMPLETIONS, {"suffix": "end"}, "suffix", 'only "" is supported'),
        (EMBEDDINGS, {"input": [[1, 2]]}, "input[0]", "token ids are not supported"),
        (EMBEDDINGS, {"encoding_format": "int8"}, "encoding_format", "must be float or base64"),
        (EMBEDDINGS, {"dimensions": 0}, "dimensions", "must be a whole number from 1"),
        (EMBEDDINGS, {"input": ["x"] * 2049}, "input", "has 2,049 texts; at most 2,048 are allowed in a request"),
    ],
)
def test_invalid_completion_or_embeddings_request_is_refused(url, fields, param, says):
    found = read({"model": "m", {COMPLETIONS: "prompt", EMBEDDINGS: "input"}[url]: "x", **fields}, url=url)
    assert isinstance(found, RefusedLine)
    assert found.error.param == param
    assert says in found.error.message


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (b'{"custom_id": "half', "invalid_json_line", "is not JSON"),
        (b'{"custom_id": NaN}', "invalid_json_line", "is not JSON"),
        (b"[" * 100_000, "invalid_json_line", "is not JSON"),
        (b"{}", "missing_required_parameter", "custom_id is missing"),
        (b'{"custom_id": 7}', "missing_required_parameter", "custom_id must be a text"),
        (line_of({}, method="GET").data, "invalid_method", "method must be POST"),
        (line_of({}, url="/v1/images").data, "invalid_url", "url must be one of /v1/chat/completions, "),
        (line_of({}, label="x").data, "unknown_parameter", "label is not a field of a request"),
    ],
)
def test_invalid_request_line_is_refused_with_its_number(line, code, says):
    found = parse_request_line(Line(5, line), seen={}, admit=ANY.check_model)
    assert isinstance(found, RefusedLine)
    assert found.error.code == code
    assert found.error.message.startswith("line 5: ")
    assert says in found.error.message


# ---- the file


def test_check_lists_every_refused_request_and_keeps_valid_requests(tmp_path):
    lines = [request("a"), "", request("b", n=3), request("a"), "{", request("c")]
    path = put(tmp_path / "r.jsonl", lines)
    checked = check_file(path, admit=ANY.check_model)
    assert checked.custom_ids == {"a": 1, "c": 6}
    assert [(one.line, one.custom_id, one.error.code) for one in checked.refused] == [
        (3, "b", "unsupported_value"), (4, None, "duplicate_custom_id"), (5, None, "invalid_json_line"),
    ]  # fmt: skip
    assert "custom_id a was already used on line 1" in checked.refused[1].error.message
    assert (checked.line_count, checked.model_counts) == (5, {"m": 2})
    assert checked.endpoint_counts == {Endpoint.COMPLETIONS: 2}
    assert [one.custom_id for one in read_requests(checked)] == ["a", "c"]
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    packed = check_file(tmp_path / "r.jsonl.gz", admit=ANY.check_model)
    assert packed.digest == checked.digest
    assert [one.custom_id for one in read_requests(packed)] == ["a", "c"]


def test_file_changed_during_a_run_is_refused(tmp_path):
    path = put(tmp_path / "r.jsonl", [request("a"), request("b"), request("c")])
    checked = check_file(path, admit=ANY.check_model)
    put(path, [request("a"), request("x"), request("c")])
    reading = read_requests(checked)
    assert next(reading).custom_id == "a"
    with pytest.raises(ConfigError, match="line 2: has changed since the file was checked"):
        next(reading)


@pytest.mark.parametrize(("text", "says"), [("", "has no requests"), ("\n \n", "has no requests")])
def test_file_without_a_request_is_refused(tmp_path, text, says):
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=says):
        check_file(tmp_path / "r.jsonl", admit=ANY.check_model)


def test_example_has_no_refused_request():
    checked = check_file(EXAMPLE, admit=ANY.check_model)
    assert not checked.refused
    assert len(checked.custom_ids) == 8


# ---- models


def test_unnamed_model_serves_requests_for_all_other_names(tmp_path):
    (tmp_path / "a=b").mkdir()
    models = read_models(["one=models/one", "two=org/two", str(tmp_path / "a=b")])
    assert models.named == {"one": "models/one", "two": "org/two"}
    assert models.path_for_name("one") == "models/one"
    assert models.path_for_name("gpt-4o") == str(tmp_path / "a=b")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["m=a", "m=b"], "m is given twice"),
        (["a", "b"], "two models are given twice"),
        (["m="], "write --model PATH, or --model NAME=PATH"),
    ],
)
def test_ambiguous_models_are_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        read_models(given)


def test_request_for_a_missing_model_is_refused():
    found = read({"model": "gpt-4o", "messages": TURN}, models=ModelPaths(named={"one": "a", "two": "b"}))
    assert isinstance(found, RefusedLine)
    assert (found.error.status, found.error.code) == (404, "model_not_found")
    assert "body.model gpt-4o has no --model option (the options name one, two)" in found.error.message
