from __future__ import annotations

import time

import pytest

pytest.importorskip("starlette")

from gateway.program_batches import ProgramBatches
from tiny_model import write_tiny_model

from stoker.apps.batch_inference.options import read_models
from stoker.apps.common.models_file import read_models as read_models_file
from stoker.apps.common.openai_requests import ApiRequest, Endpoint, RequestRefused
from stoker.apps.gateway.batch_files import KEPT_S, FileStore, GatewayBatch, read_upload
from stoker.apps.gateway.served import ServedModels


def test_file_is_visible_to_its_owner_alone(tmp_path):
    store = FileStore(tmp_path / "files")
    made = store.add(b"x", filename="x", purpose="batch", owner="ana")
    assert store.all(owner="ana") == [made]
    assert store.all(owner="bo") == []
    for id in (made.id, "../../etc", "file-" + "0" * 24):
        with pytest.raises(RequestRefused):
            store.get(id, owner="bo")


def test_old_files_are_removed_unless_a_running_batch_reads_them(tmp_path):
    batches = ProgramBatches(tmp_path)
    used, unused = (batches.files.add(b"x", filename="x", purpose="batch", owner="") for _ in range(2))
    (tmp_path / "files" / ("file-" + "0" * 24)).mkdir()  # an interrupted upload leaves an empty folder
    then = used.created_at
    for id, status in (("1" * 24, "in_progress"), ("2" * 24, "completed")):
        batches._keep(
            GatewayBatch(f"batch_{id}", "", "/v1/chat/completions", used.id, then, status=status, ended_at=then)
        )
    batches.remove_old(then + KEPT_S - 10)
    assert len(batches.all(owner="")) == 2
    assert len(list((tmp_path / "files").iterdir())) == 3
    batches.remove_old(time.time() + KEPT_S + 10)
    assert [batch.id for batch in batches.all(owner="")] == ["batch_" + "1" * 24]
    assert [path.name for path in (tmp_path / "files").iterdir()] == [used.id]
    assert unused.body["expires_at"] == unused.created_at + KEPT_S


@pytest.mark.long
def test_batch_uses_the_contexts_of_the_gateway(tmp_path):
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
def test_form_upload_keeps_its_bytes(data):
    form = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    form += b"Content-Type: application/octet-stream\r\n\r\n" + data + b"\r\n--B--\r\n"
    assert read_upload("multipart/form-data; boundary=B", form) == ("a.jsonl", "batch", data)
