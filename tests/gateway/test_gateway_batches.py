"""Files and batches with OpenAI's client: answered, continued after a kill of the gateway, cancelled."""

from __future__ import annotations

import io
import json
import time
from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import openai
from gateway.running import LIMIT_S, until
from openai.types import Batch, FileObject
from tiny_model import write_tiny_model

from stoker.apps.batch_inference.options import read_models
from stoker.apps.common.models_file import read_models as read_models_file
from stoker.apps.common.openai_requests import ApiRequest, Endpoint, RequestRefused
from stoker.apps.gateway.batch_files import KEPT_S, FileStore, read_upload
from stoker.apps.gateway.batches import Batches, GatewayBatch
from stoker.apps.gateway.served import ServedModels

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"


def lines(count, *, url=CHAT, max_tokens=8):
    body = {"model": "small", "messages": [{"role": "user", "content": "?"}], "max_tokens": max_tokens}
    requests = ({"custom_id": f"r{n}", "method": "POST", "url": url, "body": body} for n in range(count))
    return "".join(json.dumps(one) + "\n" for one in requests).encode()


def begin(client, data):
    file = client.files.create(file=("requests.jsonl", io.BytesIO(data)), purpose="batch")
    FileObject.model_validate(file.model_dump(), strict=True)
    assert client.files.content(file.id).read() == data
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def over(client, batch, *, status="completed"):
    def look():
        found = client.batches.retrieve(batch.id)
        return found if found.status not in ("in_progress", "cancelling") else None

    found = until(look, why="the end of the batch")
    Batch.model_validate(found.model_dump(), strict=True)
    assert found.status == status, found
    return found


@pytest.fixture
def client(gateway):
    def make():
        return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0)

    return make


def test_a_batch_is_answered(client):
    api = client()
    wrong = b'{"custom_id": "w", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "other"}}\n'
    done = over(api, begin(api, lines(5) + wrong))
    assert done.request_counts.model_dump() == {"total": 6, "completed": 5, "failed": 1}
    answers = api.files.content(done.output_file_id).text.splitlines()
    assert [json.loads(line)["custom_id"] for line in answers] == [f"r{n}" for n in range(5)]
    [error] = api.files.content(done.error_file_id).text.splitlines()
    assert json.loads(error)["custom_id"] == "w"
    assert done.id in [batch.id for batch in api.batches.list(limit=5)]
    assert api.files.delete(done.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve(done.input_file_id)


@pytest.mark.long
def test_a_batch_goes_on_when_the_gateway_is_killed(client, gateway):
    api = client()
    batch = begin(api, lines(40, max_tokens=60))
    until(lambda: api.batches.retrieve(batch.id).request_counts.completed, why="the first answer")
    gateway.kill()
    gateway.start()
    assert over(client(), batch).request_counts.completed == 40


def test_a_batch_can_be_stopped(client):
    api = client()
    batch = begin(api, lines(40, max_tokens=1500))
    assert api.batches.cancel(batch.id).status == "cancelling"
    over(api, batch, status="cancelled")
    with pytest.raises(openai.ConflictError):
        api.batches.cancel(batch.id)


def test_what_is_no_batch_is_refused(client):
    api = client()
    assert over(api, begin(api, lines(1, url="/v1/embeddings")), status="failed").errors.data[0].message
    assert over(api, begin(api, b"\n"), status="failed").errors.data[0].message == "the file holds no requests"
    with pytest.raises(openai.NotFoundError):
        api.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        api.batches.retrieve("batch_x")
    with pytest.raises(openai.BadRequestError):
        api.files.create(file=("x", b"x"), purpose="fine-tune")


def test_a_file_is_its_owners_alone(tmp_path):
    store = FileStore(tmp_path / "files")
    made = store.add(b"x", filename="x", purpose="batch", owner="ana")
    assert store.all(owner="ana") == [made]
    assert store.all(owner="bo") == []
    for id in (made.id, "../../etc", "file-" + "0" * 24):
        with pytest.raises(RequestRefused):
            store.get(id, owner="bo")


def test_what_is_old_is_removed_but_for_what_a_running_batch_reads(tmp_path):
    batches = Batches(tmp_path / "batches", FileStore(tmp_path / "files"), models=tmp_path / "m.toml", session="s")
    used, unused = (batches.files.add(b"x", filename="x", purpose="batch", owner="") for _ in range(2))
    (tmp_path / "files" / ("file-" + "0" * 24)).mkdir()  # an upload that was cut off
    then = used.created_at
    for id, status in (("1" * 24, "in_progress"), ("2" * 24, "completed")):
        batches._keep(GatewayBatch(f"batch_{id}", "", CHAT, used.id, then, status=status, ended_at=then))
    batches.remove_old(then + KEPT_S - 10)
    assert len(batches.all(owner="")) == 2
    assert len(list((tmp_path / "files").iterdir())) == 3
    batches.remove_old(time.time() + KEPT_S + 10)
    assert [batch.id for batch in batches.all(owner="")] == ["batch_" + "1" * 24]
    assert [path.name for path in (tmp_path / "files").iterdir()] == [used.id]
    assert unused.body["expires_at"] == unused.created_at + KEPT_S


@pytest.mark.long
def test_a_batch_has_the_contexts_of_the_gateway(tmp_path):
    write_tiny_model(tmp_path / "tiny")
    models = tmp_path / "models.toml"
    models.write_text(
        '[models.a]\npath = "tiny"\nmemory = "2 GB"\nengine = "static"\n'
        '[models.e]\npath = "tiny"\nkind = "embedding"\ndtype = "bfloat16"\n'
    )
    served, paths = ServedModels(read_models_file(models)), read_models([], file=str(models))
    for name, endpoint in (("a", Endpoint.CHAT), ("e", Endpoint.EMBEDDINGS)):
        served[name].prepare()
        assert paths.recipe(name, endpoint) == served[name].recipe
    with pytest.raises(RequestRefused, match="model e makes embeddings"):
        paths.admit(ApiRequest("c", 1, Endpoint.CHAT, "e"))


@pytest.mark.parametrize("data", [b"", b"a\r\nb\n", b"\r\n", b"--b\r\n", bytes(range(256)) * 50, "é\n".encode() * 3])
def test_a_form_gives_the_bytes_that_were_sent(data):
    form = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    form += b"Content-Type: application/octet-stream\r\n\r\n" + data + b"\r\n--B--\r\n"
    assert read_upload("multipart/form-data; boundary=B", form) == ("a.jsonl", "batch", data)
