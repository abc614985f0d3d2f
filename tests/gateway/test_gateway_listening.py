"""Several gateways on one session: over TLS, on a Unix socket, and when one dies."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import ssl
import subprocess
import time
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import httpx
import openai
from gateway.running import LIMIT_S, RunningGateway, until

pytestmark = pytest.mark.slow
MODEL = """
[models.small]
path = "models/tiny"
"""
BODY = {"model": "small", "messages": [{"role": "user", "content": "?"}], "max_tokens": 4, "temperature": 0}
CHAT = "/v1/chat/completions"
IDLE_S = 6.0


@pytest.fixture
def beside(gateway):
    """Starts gateways of other files on the session of the first one; they are stopped after the test."""
    made = []

    def start(name, *options):
        (gateway.folder / name).write_text(MODEL)
        other = RunningGateway(gateway.folder, name)
        made.append(other)
        other.start("--session", gateway.session, *options)
        return other

    yield start
    for other in made:
        if other.is_alive:
            other.stop()


@pytest.fixture
def certificate(tmp_path):
    """A self-signed certificate of this machine, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes a certificate, is not installed")
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]],
        check=True, capture_output=True, timeout=LIMIT_S,
    )  # fmt: skip
    return files


def client_of(url, **options):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0, **options)


def answer_of(client):
    """The model's answer in one piece; the streamed answer is the same."""
    text = client.chat.completions.create(**BODY).choices[0].message.content
    pieces = client.chat.completions.create(**BODY, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    return text


def test_clients_trust_a_gateway_by_its_certificate(gateway, beside, certificate):
    cert, key = map(str, certificate)
    secure = beside("secure.toml", "--tls-cert", cert, "--tls-key", key, "--json")
    assert secure.url.startswith("https://127.0.0.1:")
    document = until(lambda: re.search(r"^\{.*?^\}", "".join(secure.said), re.DOTALL | re.MULTILINE), why="--json")
    told = json.loads(document[0])
    assert (told["base_url"], told["session"], told["models"]) == (f"{secure.url}/v1", gateway.session, ["small"])
    trusting = httpx.Client(verify=ssl.create_default_context(cafile=cert), timeout=LIMIT_S)
    with client_of(secure.url, http_client=trusting) as client, client_of(gateway.url) as plain:
        assert answer_of(client) == answer_of(plain)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secure.url}/health", timeout=LIMIT_S)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{secure.url.replace('https', 'http')}/health", timeout=LIMIT_S)


def test_a_certificate_that_is_none_is_refused(beside, certificate):
    cert, key = map(str, certificate)
    with pytest.raises(AssertionError, match=r"--tls-cert .*key.pem: cannot be used"):
        beside("wrong.toml", "--tls-cert", key, "--tls-key", cert)
    with pytest.raises(AssertionError, match="--tls-cert and --tls-key go together"):
        beside("wrong.toml", "--tls-cert", cert)


def test_a_gateway_on_a_unix_socket_answers(gateway, beside, tmp_path):
    path = str(tmp_path / "s")
    other = beside("socket.toml", "--uds", path)
    assert f"curl --unix-socket {path}" in "".join(other.said)
    over = httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=LIMIT_S)
    with client_of("http://stoker", http_client=over) as client, client_of(gateway.url) as plain:
        assert answer_of(client) == answer_of(plain)
    other.kill()
    again = beside("socket.toml", "--uds", path)  # where the killed one has left its socket
    over = httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=LIMIT_S)
    with over:
        assert over.get("http://stoker/health").status_code == 200
    assert again.is_alive


@pytest.mark.long
def test_an_idle_connection_outlives_those_that_clients_keep(gateway):
    """HTTPX uses a connection for 5 s after its last request. A gateway that closes it at that time answers nothing."""
    address = httpx.URL(gateway.url)
    connection = http.client.HTTPConnection(address.host, address.port, timeout=LIMIT_S)
    try:
        connection.connect()
        first = connection.sock
        for pause_s in (0.0, IDLE_S):
            time.sleep(pause_s)
            connection.request("GET", "/v1/models")
            answer = connection.getresponse()
            assert (answer.status, connection.sock) == (200, first)
            answer.read()
    finally:
        connection.close()


@pytest.mark.long
def test_two_gateways_keep_files_and_batches_apart_if_one_dies(gateway, beside):
    other = beside("other.toml")
    assert (other.session, other.url == gateway.url) == (gateway.session, False)
    with client_of(gateway.url) as one, client_of(other.url) as two:
        lines = b"".join(
            json.dumps({"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": BODY}).encode() + b"\n"
            for n in range(3)
        )
        batches = []
        for client in (one, two):
            file = client.files.create(file=("requests.jsonl", lines), purpose="batch")
            batches.append(client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id)
        for client, own, foreign in ((one, *batches), (two, *reversed(batches))):
            assert [batch.id for batch in client.batches.list()] == [own]
            assert len(client.files.list().data) >= 1
            with pytest.raises(openai.NotFoundError):
                client.batches.retrieve(foreign)
        other.kill()
        assert one.chat.completions.create(**BODY).choices
        ended = until(lambda: _completed(one, batches[0]), why="the batch of the gateway that lives")
        assert ended.request_counts.completed == 3
    other.start("--session", gateway.session)
    with client_of(other.url) as two:
        ended = until(lambda: _completed(two, batches[1]), why="the batch of the gateway that was killed")
        assert ended.request_counts.completed == 3


def _completed(client, id):
    found = client.batches.retrieve(id)
    assert found.status in ("in_progress", "completed"), found
    return found if found.status == "completed" else None
