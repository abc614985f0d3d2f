"""Test a gateway's session, restarts, keys and browser page, other gateways, and the model settings `max` and
`keep_alive`.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from cli.command_line import Stoker
from faults.world import kill
from gateway.asking import (
    BODY,
    CHAT,
    SITE,
    answer_of,
    batch_lines,
    begin_batch,
    chat,
    client_at,
    client_of,
    figures,
    model_of,
    preflight_of,
    text_of,
)
from gateway.browser import with_browser
from gateway.running import LIMIT_S, RunningGateway, stoker, until
from polling import polls
from tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
MODEL = """
[models.small]
path = "models/tiny"
"""
IDLE_S = 6.0
MOST = 30_000
"""Tokens of a text that the model needs minutes to write."""
OVERFLOW = "document.documentElement.scrollWidth - innerWidth"


@pytest.fixture(scope="module")
def write_models():
    def write(folder):
        shutil.rmtree(folder / "models" / "tiny")
        write_tiny_model(folder / "models" / "tiny", ends=False, longest=32_768)

    return write


# ---- restarts


def test_restarted_gateway_keeps_its_address_and_loaded_models(gateway):
    with client_of(gateway) as client:
        text = text_of(chat(client, stream=True))
        url, session = gateway.url, gateway.session
        body = {**BODY, "max_tokens": MOST, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LIMIT_S) as half:
            lines = half.iter_lines()
            next(lines)
            gateway.kill()
            with pytest.raises(httpx.HTTPError):
                list(lines)
    gateway.start()
    assert (gateway.url, gateway.session) == (url, session)
    assert "which was already running for this site" in "".join(gateway.said)
    with client_of(gateway) as client:
        assert text_of(chat(client, stream=True)) == text
        until(lambda: figures(gateway)["models"][0]["hot"] == 1, why="the one library is shown")
    until(lambda: figures(gateway)["calls"]["running"] == 0, why="the calls of the killed gateway end")


@pytest.mark.long
def test_stream_continues_when_its_pilot_is_killed(gateway, world):
    with client_of(gateway) as client:
        whole = text_of(chat(client, stream=True, max_tokens=700))
        stream = iter(chat(client, stream=True, max_tokens=700))
        before = [next(stream) for _ in range(10)]
        kill([world.pilot()])
        assert text_of([*before, *stream]) == whole
        assert chat(client).choices


def test_gateway_stream_continues_when_the_manager_is_killed(gateway, world):
    with client_of(gateway) as client:
        stream = iter(chat(client, stream=True, max_tokens=700))
        before = [next(stream) for _ in range(10)]
        kill([world.manager()])
        assert [*before, *stream][-1].choices[0].finish_reason
        assert chat(client).choices


@pytest.mark.long
def test_gateway_ends_with_its_session_and_can_restart(gateway, world):
    url, session = gateway.url, gateway.session
    stoker("down", session)
    until(lambda: gateway.has_ended, why="the end of the gateway")
    said = "".join(gateway.said)
    assert f"the gateway ends: session {session} is over: stoker down" in said
    assert "to serve again at the same address, run the same command" in said
    gateway.start()
    assert (gateway.url, gateway.session == session) == (url, False)
    with client_of(gateway) as client:
        assert chat(client).choices


# ---- other gateways


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "stoker serve keys add NAME"),
        (["--tls-cert", "{key}", "--tls-key", "{cert}"], r"--tls-cert .*key.pem: cannot be used"),
        (["--tls-cert", "{cert}"], "--tls-cert and --tls-key need each other"),
    ],
)
def test_wrong_addresses_and_certificates_are_refused(world, certificate, tmp_path, options, said):
    cert, key = certificate
    (tmp_path / "m.toml").write_text(MODEL)
    refused = Stoker()("serve", str(tmp_path / "m.toml"), *(each.format(cert=cert, key=key) for each in options))
    assert re.search(said, str(refused.exception))


@pytest.fixture
def beside(gateway):
    """Return a function that starts another gateway on the first gateway's session. Stop them after the test."""
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
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes a certificate, is not installed")
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]],
        check=True, capture_output=True, timeout=LIMIT_S,
    )  # fmt: skip
    return files


def test_gateway_uses_its_certificate_and_allowed_sites(gateway, beside, certificate, key):
    cert, private = map(str, certificate)
    secure = beside("secure.toml", "--tls-cert", cert, "--tls-key", private, "--origin", SITE, "--json")
    assert secure.url.startswith("https://127.0.0.1:")
    document = until(lambda: re.search(r"^\{.*?^\}", "".join(secure.said), re.DOTALL | re.MULTILINE), why="--json")
    told = json.loads(document[0])
    assert (told["base_url"], told["session"], told["models"]) == (f"{secure.url}/v1", gateway.session, ["small"])
    trusting = httpx.Client(verify=ssl.create_default_context(cafile=cert), timeout=LIMIT_S)
    with client_at(secure.url, http_client=trusting) as client, client_of(gateway) as plain:
        assert answer_of(client) == answer_of(plain)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secure.url}/health", timeout=LIMIT_S)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{secure.url.replace('https', 'http')}/health", timeout=LIMIT_S)
    key()  # pages of other sites may send requests only if a key exists
    with httpx.Client(base_url=secure.url, verify=ssl.create_default_context(cafile=cert), timeout=LIMIT_S) as http:
        named, other = (http.options(CHAT, headers=preflight_of(site)) for site in (SITE, "https://other.example"))
    assert named.headers["access-control-allow-origin"] == SITE
    assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)


@pytest.mark.long
def test_gateway_keeps_idle_connections_longer_than_clients_do(gateway):
    """HTTPX keeps an idle connection for 5 s after the last request. A gateway that closes the connection earlier may
    lose a request.
    """
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
    with client_of(gateway) as one, client_of(other) as two:
        batches = [begin_batch(client, batch_lines(3)).id for client in (one, two)]
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
    with client_of(other) as two:
        ended = until(lambda: _completed(two, batches[1]), why="the batch of the gateway that was killed")
        assert ended.request_counts.completed == 3


def _completed(client, id):
    found = client.batches.retrieve(id)
    assert found.status in ("in_progress", "completed"), found
    return found if found.status == "completed" else None


# ---- the page


def row_of(page, model):
    return page.value(
        f"[...document.querySelectorAll('#models tr')].map(r => r.innerText).find(t => t.startsWith('{model}')) || ''"
    )


@with_browser
def test_page_shows_models_devices_queues_and_rates_live(gateway, page, tmp_path):
    with client_of(gateway) as client:
        page.open(gateway.url)
        until(lambda: "cold" in row_of(page, "vectors"), why="a model that is cold")
        assert "cannot be used" in row_of(page, "gone")
        with chat(client, max_tokens=MOST, stream=True) as stream:
            next(iter(stream))
            until(lambda: " hot" in row_of(page, "small"), why="the model is hot, without another load of the page")
            until(lambda: page.value("figures.models.some(each => each.tokens_per_s > 0)"), why="tokens a second")
            until(lambda: page.text("#tile-running") == "1", why="the call is counted")
        assert "cpu:0" in page.text("#pilots")
        assert "small (ready)" in page.text("#pilots")
    for width in (1280, 390):
        page.resize(width=width)
        until(lambda: page.value(OVERFLOW) <= 0, why=f"the page fits a window of {width} pixels")
        assert page.screenshot(tmp_path / f"{width}.png").stat().st_size > 5_000
    page.darken(True)
    dark = page.screenshot(tmp_path / "dark.png").read_bytes()
    page.darken(False)
    assert dark != page.screenshot(tmp_path / "light.png").read_bytes()
    assert page.errors == []


@with_browser
@pytest.mark.long
def test_page_asks_for_a_key_and_keeps_it_out_of_addresses(gateway, page, key):
    own = key()
    page.open(gateway.url)
    until(lambda: page.value("document.readyState") == "complete", why="the page")
    until(lambda: "a key is required" in page.text("#about"), why="the form")
    assert page.value("document.getElementById('main').hidden")
    page.value("document.getElementById('key').value = 'sk-wrong'; document.querySelector('#ask button').click()")
    until(lambda: "not valid" in page.text("#about"), why="the page reports a wrong key")
    page.value(f"document.getElementById('key').value = '{own}'; document.querySelector('#ask button').click()")
    until(lambda: row_of(page, "small"), why="the figures")
    assert own not in page.value("location.href")
    assert page.errors == []


# ---- limits of a model


def test_model_with_max_one_gets_no_second_library(gateway):
    [pilot] = until(lambda: figures(gateway)["pilots"], why="a pilot is here")
    assert len(pilot["devices"]) == 3

    def loads():
        return next((one["loads"] for one in figures(gateway)["contexts"] if one["name"] == "fleeting"), 0)

    until(lambda: model_of(gateway, "fleeting")["state"] == "cold", why="a second of idling is over")
    before, seen = loads(), []
    with client_of(gateway) as client, ThreadPoolExecutor(20) as threads:
        asked = [threads.submit(chat, client, model="fleeting", max_tokens=20) for _ in range(20)]
        for _ in polls(LIMIT_S):
            model = model_of(gateway, "fleeting")
            seen.append(model["hot"] + model["loading"])
            if all(one.done() for one in asked):
                break
    assert all(one.result().choices for one in asked)
    assert max(seen) <= 1  # a sample may miss a library, so the loads are counted below
    until(lambda: loads() == before + 1, why="one load served them all")
