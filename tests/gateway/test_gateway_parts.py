from __future__ import annotations

import errno
import json
import os
import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from stoker.apps.common.models_file import ColdRequestAction, ModelKind, make_recipe_from_settings, parse_models
from stoker.apps.common.openai_answers import TextBegun, TextEnded, TokenPiece
from stoker.apps.common.openai_requests import Endpoint, RequestRefused
from stoker.apps.gateway import session_figures
from stoker.apps.gateway.answering import estimate_request_tokens, parse_model_request
from stoker.apps.gateway.batch_files import FileStore, parse_batch_request
from stoker.apps.gateway.failures import error_for_client
from stoker.apps.gateway.keys import KeyFile, KeyGuard, KeyLimits, KeyUse
from stoker.apps.gateway.listening import listen_on_path, listen_on_port
from stoker.apps.gateway.run import GatewayFolder, GatewayState
from stoker.apps.gateway.streaming import DONE, ChunkEncoder
from stoker.apps.gateway.vllm_endpoints import RERANK, SCORE, parse_scoring_request
from stoker.apps.gateway.wire import make_error_response
from stoker.contexts import causal_lm
from stoker.contexts.inference.adapter import EngineLoad
from stoker.errors import (
    CallTimeoutError,
    ConfigError,
    ContextError,
    NoDeviceError,
    RecipeError,
    SessionError,
    StreamDiffersError,
)

# ---- models.toml


def models(text: str, folder: Path = Path("/nowhere")):
    return parse_models(text, file="models.toml", folder=folder)


def test_model_has_its_settings_and_the_defaults(tmp_path):
    (tmp_path / "there").mkdir()
    found = models(
        '[models.small]\npath = "there"\nttft = "1 s"\n[models."e.5"]\npath = "org/name"\nkind = "embedding"\n'
        'cold = "refuse"\nmemory = "4 GB"\n',
        tmp_path,
    )
    assert found["small"].path == str(tmp_path / "there")
    assert (found["small"].ttft, found["small"].kind, found["small"].cold) == (1.0, ModelKind.CHAT, None)
    assert (found["e.5"].path, found["e.5"].memory, found["e.5"].cold) == (
        "org/name",
        4_000_000_000,
        ColdRequestAction.REFUSE,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[models.a]\npath = "x"\nmemory = 16\n', "line 3: [models.a] memory: 16 is not a size: the unit of 16 is"),
        ('[models.a]\npath = "x"\npaht = 1\n', "line 3: [models.a] paht is not a setting; did you mean path"),
        ('[models.a]\nkind = "chat"\n', "models.toml: line 1: [models.a] path is missing"),
        ('[models.a]\npath = "x"\nkind = "chta"\n', "[models.a] kind = 'chta' is not available; did you mean 'chat'"),
        ('[models.a]\npath = "x"\n[models.b]\npath = "y"\nmin = -1\n', "line 5: [models.b] min must be"),
        ('[models.a]\npath = "x"\ncold = "no"\n', "cold = 'no' is not available; there are 'wait', 'refuse'"),
        ('[models.a]\npath = "x"\ndtype = "int8"\n', "dtype = 'int8' is not available; there are auto, float32, b"),
        ('[models.a]\npath = "x"\nkind = "embedding"\nengine = "vllm"\n', "[models.a] engine is for models that"),
        ('[models.a]\npath = "x"\nkind = "embedding"\ngraphs = true\n', "[models.a] graphs is for models that"),
        ('[models.a]\npath = "x"\nengine = "vllm"\ngraphs = true\n', '"continuous"; vllm does not support it'),
        ('[models.a]\npath = "x"\ndevices = 2\ngraphs = true\n', "leave out graphs or devices"),
        ('[models.a]\npath = "x"\nkind = "embedding"\ndevices = 2\n', "devices is for models that"),
        ('[models.a]\npath = "x"\nmin = 3\nmax = 2\n', "[models.a] min = 3 is more than max = 2"),
        ('[models.a]\npath = "x"\nkeep_alive = 1\n', "line 3: [models.a] keep_alive: 1 is not a duration"),
        ("[models]\n", "names no model"),
        ("[models.a\n", "line 1: not TOML"),
        ('[model.a]\npath = "x"\n', "model is not a setting; did you mean models"),
    ],
)  # fmt: skip
def test_error_of_a_models_file_names_its_line_and_its_setting(text, said):
    with pytest.raises(ConfigError) as error:
        models(text)
    assert said in str(error.value)


@pytest.mark.parametrize(("named", "meant"), [("fp16", "float16"), ("bf16", "bfloat16"), ("float32", "float32")])
def test_short_name_of_a_dtype_means_the_same_as_its_full_name(tmp_path, named, meant):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    short, long = (
        make_recipe_from_settings(models(f'[models.a]\npath = "m"\ndtype = "{dtype}"\n', tmp_path)["a"])
        for dtype in (named, meant)
    )
    assert short.key == long.key


@pytest.mark.parametrize("architecture", ["BertModel", "XLMRobertaForMaskedLM", "T5EncoderModel"])
def test_encoder_model_without_the_embedding_kind_is_refused(tmp_path, architecture):
    (tmp_path / "enc").mkdir()
    (tmp_path / "enc" / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(ConfigError, match=rf"\[models.a\] .*enc is an encoder \({architecture}\)"):
        models('[models.a]\npath = "enc"\n', tmp_path)
    assert models('[models.a]\npath = "enc"\nkind = "embedding"\n', tmp_path)
    with pytest.raises(RecipeError, match=r"use stoker\.encoder"):
        causal_lm(tmp_path / "enc")


# ---- limits and keys


def test_requests_are_limited_per_minute_and_at_a_time():
    use, limits = KeyUse(), KeyLimits(requests_per_minute=2, concurrent=1)
    assert use.find_exceeded_limit(limits, now=0.0) is None
    use.count_request_start(0.0)
    assert use.find_exceeded_limit(limits, now=1.0).error.code == "concurrent_requests"
    use.count_request_end(0, now=2.0)
    use.count_request_start(3.0)
    use.count_request_end(0, now=4.0)
    reached = use.find_exceeded_limit(limits, now=10.0)
    assert (reached.error.code, reached.error.retry_after_s) == ("requests_per_minute", 50.0)
    # The first request began over a minute ago and no longer counts.
    assert use.find_exceeded_limit(limits, now=60.0) is None


def test_tokens_are_limited_once_they_are_known():
    use, limits = KeyUse(), KeyLimits(tokens_per_minute=100)
    for at, tokens in ((0.0, 60), (10.0, 60)):
        assert use.find_exceeded_limit(limits, now=at) is None
        use.count_request_start(at)
        use.count_request_end(tokens, now=at)
    reached = use.find_exceeded_limit(limits, now=20.0)
    assert (reached.error.code, reached.error.retry_after_s) == ("tokens_per_minute", 40.0)
    assert use.find_exceeded_limit(limits, now=60.5) is None


def test_key_is_kept_as_a_digest_in_a_private_file(tmp_path):
    file = KeyFile(tmp_path / "serve" / "keys.json")
    assert KeyGuard(file).is_open
    key = file.add_key("ana", KeyLimits(concurrent=3))
    assert key not in file.path.read_text()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    guard = KeyGuard(file)
    assert guard.identify_caller({"authorization": f"Bearer {key}"}).name == "ana"
    assert guard.identify_caller({"authorization": f"bearer {key}"}).limits == KeyLimits(concurrent=3)
    for wrong in ("", "Bearer", "Bearer sk-stoker-x", f"Basic {key}", "Bearer " + "x" * 10_000, "Bearer é"):
        with pytest.raises(RequestRefused) as refused:
            guard.identify_caller({"authorization": wrong})
        assert refused.value.error.status == 401
    with pytest.raises(ConfigError, match="there is a key ana already"):
        file.add_key("ana", KeyLimits())
    with pytest.raises(ConfigError, match="is not a name for a key"):
        file.add_key("a b", KeyLimits())
    file.remove_key("ana")  # the guard notices that the file has no keys, and refuses all callers
    with pytest.raises(RequestRefused, match="not valid"):
        guard.identify_caller({"authorization": f"Bearer {key}"})
    with pytest.raises(ConfigError, match="there is no key ana; there are: none"):
        file.remove_key("ana")


def test_key_file_that_others_may_read_or_is_damaged_is_refused(tmp_path):
    file = KeyFile(tmp_path / "keys.json")
    file.add_key("ana", KeyLimits())
    file.path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users may read it; chmod 600"):
        file.read_current()
    file.path.chmod(0o600)
    file.path.write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        file.read_current()


def test_ended_request_frees_its_place_in_the_concurrency_limit(tmp_path):
    file = KeyFile(tmp_path / "keys.json")
    guard = KeyGuard(file)
    key = file.add_key("ana", KeyLimits(concurrent=1))
    caller = guard.identify_caller({"authorization": f"Bearer {key}"})
    held = guard.begin_request(caller)
    with pytest.raises(RequestRefused) as refused:
        guard.begin_request(guard.identify_caller({"authorization": f"Bearer {key}"}))
    assert error_for_client(refused.value).status == 429
    assert error_for_client(refused.value).retry_after_s > 0
    held.end_request()
    held.end_request()
    guard.begin_request(caller).end_request()


@pytest.mark.parametrize(
    ("host", "origin", "may"),
    [
        ("127.0.0.1:8000", None, True), ("localhost:8000", None, True), ("login3", None, True),
        ("[::1]:8000", "http://[::1]:8000", True), ("localhost:8000", "http://localhost:8000", True),
        ("localhost:8000", "https://evil.example", False), ("evil.example:8000", None, False),
        ("evil.example:8000", "http://evil.example:8000", False), ("localhost:8000", "null", False),
    ],
)  # fmt: skip
def test_page_of_another_site_is_refused_without_keys(tmp_path, host, origin, may):
    guard = KeyGuard(KeyFile(tmp_path / "keys.json"))
    headers = {"host": host} | ({"origin": origin} if origin is not None else {})
    if may:
        guard.identify_caller(headers)
        return
    with pytest.raises(RequestRefused) as refused:
        guard.identify_caller(headers)
    assert refused.value.error.status == 403


# ---- requests


def asked(endpoint=Endpoint.CHAT, **body):
    words = {"messages": [{"role": "user", "content": "?"}]} if endpoint is Endpoint.CHAT else {}
    return parse_model_request(json.dumps({"model": "m", **words, **body}).encode(), endpoint=endpoint, name="r1")


def test_each_choice_of_each_prompt_gets_its_own_seed():
    found = asked(Endpoint.COMPLETIONS, prompt=["a", "b"], n=2, seed=7)
    assert [(one.texts, one.sampling.seed) for one in found.choices] == [
        (("a",), 7), (("a",), 8), (("b",), 9), (("b",), 10),
    ]  # fmt: skip
    assert found.prompts == 2
    assert asked(stream=True, stream_options={"include_usage": True}).include_usage
    assert not asked(stream=None, n=None).stream
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert asked(stream=True, stream_options=options).continuous_usage
    assert not asked(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage


def test_abandoned_request_counts_its_prompt_and_maximum_tokens():
    two = asked(messages=[{"role": "user", "content": "x" * 40}], max_tokens=50, n=2)
    assert estimate_request_tokens(two) == (10, 100)
    assert estimate_request_tokens(asked(Endpoint.COMPLETIONS, prompt=["a", "b"], max_tokens=5)) == (2, 10)
    assert estimate_request_tokens(asked(Endpoint.EMBEDDINGS, input=["x" * 8, "y"])) == (3, 0)
    assert estimate_request_tokens(asked()) == (1, 1000)


@pytest.mark.parametrize(
    ("endpoint", "body", "param", "says"),
    [
        (Endpoint.COMPLETIONS, {"n": 3, "best_of": 2}, "best_of", "must be a whole number from 3 to 128"),
        (Endpoint.COMPLETIONS, {"best_of": 200}, "best_of", "must be a whole number from 1 to 128"),
        (Endpoint.COMPLETIONS, {"best_of": 2, "stream": True}, "best_of", "cannot be streamed; leave it out, or do"),
        (Endpoint.COMPLETIONS, {"best_of": 65, "prompt": ["a", "b"]}, "best_of", "asks for 130 choices; at most 128"),
        (Endpoint.COMPLETIONS, {"prompt": ["a"] * 129}, "prompt", "has 129 prompts"),
        (Endpoint.COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "n", "asks for 130 choices"),
        (Endpoint.CHAT, {"n": 0}, "n", ""), (Endpoint.CHAT, {"n": True}, "n", ""), (Endpoint.CHAT, {"n": 129}, "n", ""),
        (Endpoint.CHAT, {"stream": "yes"}, "stream", ""),
        (Endpoint.CHAT, {"stream_options": {"include_usage": True}}, "stream_options", ""),
        (Endpoint.CHAT, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", ""),
        (Endpoint.CHAT, {"tempreature": 1}, "tempreature", ""),
    ],
)  # fmt: skip
def test_error_for_an_unsupported_request_names_the_field(endpoint, body, param, says):
    prompt = {"prompt": "a"} if endpoint is Endpoint.COMPLETIONS else {}
    with pytest.raises(RequestRefused) as refused:
        asked(endpoint, **{**prompt, **body})
    assert refused.value.error.param == param
    assert refused.value.error.message.startswith(f"{param} {says}")


@pytest.mark.parametrize(
    ("address", "body", "param"),
    [
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        (SCORE, {"text_1": "a", "text_2": "b", "top_n": 1}, "top_n"),
        (RERANK, {"query": ["a"], "documents": ["b"]}, "query"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"] * 2049}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
def test_error_for_a_wrong_score_request_names_the_field(address, body, param):
    with pytest.raises(RequestRefused) as refused:
        parse_scoring_request(json.dumps({"model": "m", **body}).encode(), address, name="r")
    assert refused.value.error.param == param
    assert refused.value.error.message.startswith(param)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 100_000])
def test_body_that_is_no_json_object_is_refused(data):
    with pytest.raises(RequestRefused) as refused:
        parse_model_request(data, endpoint=Endpoint.CHAT, name="r1")
    assert (refused.value.error.status, refused.value.error.code) == (400, "invalid_json")


# ---- events


def test_prompt_tokens_count_once_for_several_choices():
    chunks = ChunkEncoder(endpoint=Endpoint.COMPLETIONS, name="n", model="m", created=1, per_prompt=2, usage=True)
    for index in range(4):
        chunks.encode_pieces(index, [TextBegun(10)])
    chunks.encode_pieces(0, [TokenPiece("ab", (("ab", -1.0, ()),))])
    offset = json.loads(chunks.encode_pieces(0, [TokenPiece("c", (("c", -float("inf"), ()),))]).removeprefix(b"data: "))
    assert offset["choices"][0]["logprobs"]["text_offset"] == [2]
    assert offset["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
    for index in range(4):
        chunks.encode_pieces(index, [TextEnded("stop", 3)])
    last, _, done = chunks.encode_end().partition(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["usage"] == {
        "prompt_tokens": 20, "completion_tokens": 12, "total_tokens": 32,
    }  # fmt: skip
    assert done == DONE


def test_each_chunk_counts_the_tokens_so_far_on_request():
    chunks = ChunkEncoder(
        endpoint=Endpoint.CHAT, name="n", model="m", created=1, per_prompt=1, usage=True, continuous=True
    )
    events = chunks.encode_pieces(0, [TextBegun(3), "a", "b", TextEnded("stop", 2)]).decode().split("\n\n")[:-1]
    found = [json.loads(event.removeprefix("data: "))["usage"]["total_tokens"] for event in events]
    assert found == [3, 4, 5, 5]


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
def test_pieces_received_together_become_separate_events(endpoint):
    chunks = ChunkEncoder(endpoint=endpoint, name="n", model='m"\0é', created=1, per_prompt=1, usage=True)
    texts = ['a"b\n', "", "é\0", "z"]
    events = chunks.encode_pieces(1, texts).decode().split("\n\n")
    found = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events if event]
    assert [each["index"] for each in found] == [1] * 4
    assert [each["delta"]["content"] if endpoint is Endpoint.CHAT else each["text"] for each in found] == texts
    assert chunks.read + chunks.written == 4


@pytest.mark.parametrize(
    ("kind", "status", "code", "is_retried"),
    [
        (NoDeviceError, 503, "model_fits_nowhere", False), (ContextError, 503, "model_unavailable", False),
        (SessionError, 503, "session_unavailable", True), (StreamDiffersError, 500, "stream_differs", False),
        (CallTimeoutError, 504, "timeout", False), (ValueError, 500, "call_failed", False),
        (OSError, 500, "call_failed", False),
    ],
)  # fmt: skip
def test_error_of_a_call_says_whether_to_retry_and_names_no_host(kind, status, code, is_retried):
    error = kind("call c-12 on node014: /scratch/ana/cache/x: no such file\n  its last lines")
    found, answer = error_for_client(error), make_error_response(error)
    assert (found.status, found.code, found.type) == (status, code, "server_error")
    assert not any(inside in found.message for inside in ("c-12", "node014", "/scratch", "\n"))
    assert ("retry-after" in answer.headers, "x-should-retry" in answer.headers) == (is_retried, not is_retried)


def test_refused_request_does_not_say_whether_to_retry():
    assert "x-should-retry" not in make_error_response(RequestRefused("x")).headers


def test_metrics_sum_prefix_hits_of_a_models_libraries():
    loads = [EngineLoad(prompt_tokens=30, reused_tokens=10), EngineLoad(prompt_tokens=5, reused_tokens=15), None]
    status = SimpleNamespace(libraries=[SimpleNamespace(recipe="small-1a2b", batch=load) for load in loads])
    samples = {
        sample.name: (sample.labels["model_name"], sample.value)
        for family in session_figures._engine_metrics(status, {"small-1a2b": "small"})
        for sample in family.samples
    }
    assert samples["stoker_prefix_cache_queries_total"] == ("small", 60)
    assert samples["stoker_prefix_cache_hits_total"] == ("small", 25)


# ---- addresses


def test_gateway_reuses_its_port_and_a_second_gateway_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    place = GatewayFolder("", tmp_path / "models.toml")
    assert place.lock_and_read_state() == GatewayState()
    with listen_on_port("127.0.0.1", 0, last_port=0) as first:
        port = first.getsockname()[1]
        place.write_state(GatewayState(port=port, session="s1", pid=os.getpid()))
        with pytest.raises(SessionError, match=rf"runs already at port {port} \(pid {os.getpid()}\)"):
            GatewayFolder("", tmp_path / "models.toml").lock_and_read_state()
        with pytest.raises(ConfigError, match="taken by another program"):
            listen_on_port("127.0.0.1", 0, last_port=port)
        with pytest.raises(ConfigError, match="choose another port with --port"):
            listen_on_port("127.0.0.1", port, last_port=0)
    with listen_on_port("127.0.0.1", 0, last_port=port) as again:
        assert again.getsockname()[1] == port
    assert GatewayFolder("", tmp_path / "other.toml").lock_and_read_state() == GatewayState()


def test_first_gateway_avoids_the_ports_of_stopped_gateways(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    place = GatewayFolder("", tmp_path / "models.toml")
    place.lock_and_read_state()
    with listen_on_port("127.0.0.1", 0, last_port=0) as free:
        port = free.getsockname()[1]
    # no process listens at this port, as after the kill of a gateway
    place.write_state(GatewayState(port=port, session="s1", pid=1))
    other = GatewayFolder("", tmp_path / "other.toml")
    other.lock_and_read_state()
    assert (place.find_ports_of_other_gateways(), other.find_ports_of_other_gateways()) == (frozenset(), {port})
    (other.folder.parent / "damaged").mkdir()
    (other.folder.parent / "damaged" / "gateway.json").write_bytes(b"\xff{")
    with listen_on_port("127.0.0.1", 0, last_port=0, excluded_ports=other.find_ports_of_other_gateways()) as first:
        assert first.getsockname()[1] != port


def test_unix_socket_is_private_and_replaces_that_of_a_dead_gateway(tmp_path):
    path = str(tmp_path / "s")
    listen_on_path(path).close()  # a killed gateway leaves such a socket
    with listen_on_path(path) as listener:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with pytest.raises(ConfigError, match="in use"):
            listen_on_path(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
        assert listener.family is socket.AF_UNIX
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError):
        listen_on_path(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


# ---- batches


def asked_batch(**fields):
    return msgspec.json.encode(
        {"endpoint": "/v1/embeddings", "input_file_id": "file-1", "completion_window": "24h", **fields}
    )


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"endpoint": {"a": 1}}, "endpoint", "invalid_value"),
        ({"completion_window": "0h"}, "completion_window", "invalid_value"),
        ({"input_file_id": None}, "input_file_id", "missing_required_parameter"),
        ({"metadata": "x"}, "metadata", "invalid_type"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_value"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "invalid_value"),
        ({"output_expires_after": {"seconds": 5}}, "output_expires_after", "unsupported_parameter"),
        ({"priority": 1}, "priority", "unknown_parameter"),
    ],
)  # fmt: skip
def test_error_for_an_invalid_batch_body_names_the_field(fields, param, code):
    with pytest.raises(RequestRefused) as refused:
        parse_batch_request(asked_batch(**fields))
    assert (refused.value.error.param, refused.value.error.code, refused.value.error.status) == (param, code, 400)


def test_full_disk_is_reported_and_failed_upload_leaves_no_file(tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device", "/x")
    refusal = error_for_client(error)
    assert (refusal.status, refusal.code, refusal.retry_after_s > 0) == (507, "disk_full", True)
    assert "No space left on device" in refusal.message
    assert error_for_client(OSError(errno.EIO, "Input/output error")).code == "call_failed"
    store = FileStore(tmp_path / "files")
    with pytest.raises(OSError, match="No such file"):
        store.add_file(tmp_path / "absent", filename="x", purpose="batch", owner="")
    assert list((tmp_path / "files").iterdir()) == []


def test_metrics_count_refused_offers_by_model_and_case():
    zero = dict.fromkeys(("running", "queued", "hot", "loading", "asleep", "loads", "served"), 0)
    seconds = dict.fromkeys(("load_total_s", "run_total_s"), 0.0)
    counts = {"small-1a2b": {"decode-round": 3, "memory": 1}, "other-3c4d": {}}
    contexts = [SimpleNamespace(name=name, refused_offers=each, **zero, **seconds) for name, each in counts.items()]
    found = {
        tuple(sample.labels.values()): sample.value
        for family in session_figures._context_metrics(SimpleNamespace(contexts=contexts), {"small-1a2b": "small"})
        for sample in family.samples
        if sample.name == "stoker_refused_offers_total"
    }
    assert found == {("small", "decode-round"): 3, ("small", "memory"): 1}
