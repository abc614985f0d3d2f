"""A key's limits apply to its batches; an interrupted batch keeps its answers; files belong to their owners."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from gateway.loops import in_loop, until
from gateway.program_batches import CHAT, ProgramBatches
from tiny_model import write_tiny_model

from stoker.apps.batch_inference.options import read_models
from stoker.apps.batch_inference.run import BatchPermits
from stoker.apps.common.models_file import read_models as read_models_file
from stoker.apps.common.openai_requests import ApiRequest, Endpoint, RequestRefused
from stoker.apps.gateway.batch_files import KEPT_S, FileStore, GatewayBatch, parse_file_upload
from stoker.apps.gateway.batch_process import BatchPermitGranter
from stoker.apps.gateway.batches import GatewayBatches
from stoker.apps.gateway.keys import KeyFile, KeyGuard, KeyLimits
from stoker.apps.gateway.served import ServedModels


@pytest.fixture
def keys(tmp_path):
    return KeyFile(tmp_path / "keys.json")


async def half_answered(folder: Path) -> tuple[ProgramBatches, GatewayBatch]:
    batches = ProgramBatches(folder)
    batch = await batches.begun()
    await until(lambda: batches.get_batch(batch.id, owner="").completed == 2)
    return batches, batch


def contents(batches: GatewayBatches, id: str | None) -> list[dict]:
    assert id is not None
    return [json.loads(line) for line in batches.files.content_path(id).read_text().splitlines()]


def check_kept(batches: GatewayBatches, batch: GatewayBatch, *, status: str, code: str) -> None:
    assert (batch.status, batch.completed, batch.failed, batch.total) == (status, 2, 1, 5)
    assert [line["custom_id"] for line in contents(batches, batch.output_file_id)] == ["r0", "r2"]
    refused, *others = contents(batches, batch.error_file_id)
    assert refused["response"]["status_code"] == 400
    assert [(line["custom_id"], line["error"]["code"]) for line in others] == [("r3", code), ("r4", code)]
    assert batch.body[f"{status}_at"]


@in_loop
async def test_cancelled_batch_keeps_its_answers(tmp_path):
    batches, batch = await half_answered(tmp_path)
    assert batches.cancel_batch(batch.id, owner="").status == "cancelling"
    check_kept(batches, await batches.over(batch.id), status="cancelled", code="batch_cancelled")


@in_loop
async def test_expired_batch_keeps_its_answers(tmp_path):
    batches, batch = await half_answered(tmp_path)
    await batches.stop_all()
    file = tmp_path / "batches" / f"{batch.id}.json"
    kept = json.loads(file.read_bytes())
    file.write_text(json.dumps({**kept, "created_at": int(time.time()) - 86_400}))
    later = ProgramBatches(tmp_path)
    later.resume_open_batches()
    check_kept(later, await later.over(batch.id), status="expired", code="batch_expired")


@in_loop
async def test_batch_keeps_its_answers_when_its_process_dies(tmp_path):
    batches, batch = await half_answered(tmp_path)
    child = batches._followed[batch.id].child
    assert child is not None
    child.kill()
    found = await batches.over(batch.id)
    check_kept(batches, found, status="failed", code="batch_failed")
    assert str(tmp_path) not in json.dumps(found.body)


# ---- limits


def paced(
    keys: KeyFile, tmp_path: Path, limits: KeyLimits, *, left: int = 100
) -> tuple[KeyGuard, BatchPermitGranter, BatchPermits]:
    keys.add_key("ana", limits)
    guard, file = KeyGuard(keys), tmp_path / "b.permits"
    pace = BatchPermitGranter(file, guard, owner="ana")
    pace.start_granting(unanswered=left)
    return guard, pace, BatchPermits(file)


def take_all(pace: BatchPermitGranter, permits: BatchPermits) -> int:
    pace.grant_due_permits()
    permits._looked_at = float("-inf")
    taken = 0
    while permits.take_permit():
        taken += 1
    return taken


def test_batch_requests_count_for_the_concurrent_limit(keys, tmp_path):
    guard, pace, permits = paced(keys, tmp_path, KeyLimits(concurrent=4))
    assert take_all(pace, permits) == 3  # one permit stays free for requests outside batches
    assert take_all(pace, permits) == 0
    live = guard.begin_request(guard.find_caller_by_key_name("ana"))
    with pytest.raises(Exception, match="4 requests of this key are running"):
        guard.begin_request(guard.find_caller_by_key_name("ana"))
    permits.count_ended_call(10)
    permits.count_ended_call(10)
    assert take_all(pace, permits) == 1  # the live request has the other permit
    live.end_request()
    assert take_all(pace, permits) == 1


def test_batch_requests_count_towards_the_limit_per_minute(keys, tmp_path):
    guard, pace, permits = paced(keys, tmp_path, KeyLimits(requests_per_minute=3))
    assert take_all(pace, permits) == 2
    permits.count_ended_call(5)
    permits.count_ended_call(5)
    assert take_all(pace, permits) == 0
    guard.begin_request(guard.find_caller_by_key_name("ana")).end_request()
    with pytest.raises(Exception, match="may send 3 requests a minute"):
        guard.begin_request(guard.find_caller_by_key_name("ana"))


def test_batch_tokens_count_towards_the_token_limit_of_its_key(keys, tmp_path):
    guard, pace, permits = paced(keys, tmp_path, KeyLimits(tokens_per_minute=1000))
    assert take_all(pace, permits) == 1  # the token counts are still unknown
    permits.count_ended_call(100)
    assert take_all(pace, permits) == 8  # at 100 tokens a request, the remaining 800 tokens allow 8
    for _ in range(8):
        permits.count_ended_call(125)
    assert take_all(pace, permits) == 0
    with pytest.raises(Exception, match="has used 1,100"):
        guard.begin_request(guard.find_caller_by_key_name("ana"))


def test_batch_takes_at_most_one_permit_per_remaining_request(keys, tmp_path):
    guard, pace, permits = paced(keys, tmp_path, KeyLimits(requests_per_minute=30, concurrent=20), left=2)
    assert take_all(pace, permits) == 2
    caller = guard.find_caller_by_key_name("ana")
    live = [guard.begin_request(caller) for _ in range(18)]
    permits.count_ended_call(1)
    assert take_all(pace, permits) == 0
    again = BatchPermitGranter(tmp_path / "b.permits", KeyGuard(keys), owner="ana")
    again.take_over_permits(unanswered=1)
    assert take_all(again, permits) == 0
    assert len(live) == 18


def test_batch_stops_and_starts_no_request_after_its_key_is_removed(keys, tmp_path):
    keys.add_key("ana", KeyLimits(concurrent=2))
    keys.add_key("ben", KeyLimits())
    batches = ProgramBatches(tmp_path)
    batch = GatewayBatch("batch_1", "ana", CHAT, "file-1", int(time.time()))
    (tmp_path / "batches").mkdir()
    permits = BatchPermits(tmp_path / "batches" / "batch_1.permits")
    pace = batches._make_permit_granter(batch)
    pace.start_granting(unanswered=5)
    assert take_all(pace, permits) == 1
    keys.remove_key("ana")
    permits.count_ended_call(1)
    assert take_all(pace, permits) == 0
    later = batches._make_permit_granter(batch)
    later.start_granting(unanswered=5)
    assert take_all(later, BatchPermits(tmp_path / "batches" / "batch_1.permits")) == 0
    batch.owner = "ben"
    assert batches._make_permit_granter(batch) is None, "its key has no limits"


def test_restarted_gateway_counts_running_requests(keys, tmp_path):
    _, pace, permits = paced(keys, tmp_path, KeyLimits(concurrent=4))
    assert take_all(pace, permits) == 3
    permits.count_ended_call(1)
    again = BatchPermitGranter(tmp_path / "b.permits", KeyGuard(keys), owner="ana")
    again.take_over_permits(unanswered=99)
    assert take_all(again, permits) == 1


# ---- files


def test_file_is_visible_to_its_owner_alone(tmp_path):
    store = FileStore(tmp_path / "files")
    made = store.add_file(b"x", filename="x", purpose="batch", owner="ana")
    assert store.list_files(owner="ana") == [made]
    assert store.list_files(owner="bo") == []
    for id in (made.id, "../../etc", "file-" + "0" * 24):
        with pytest.raises(RequestRefused):
            store.get_file(id, owner="bo")


def test_file_that_an_open_batch_reads_cannot_be_deleted(tmp_path):
    batches = ProgramBatches(tmp_path)
    file = batches.files.add_file(b"x", filename="x", purpose="batch", owner="ana")
    batch = GatewayBatch("batch_" + "1" * 24, "ana", "/v1/chat/completions", file.id, file.created_at)
    batches._write_batch(batch)
    with pytest.raises(RequestRefused, match=f"batch {batch.id} reads it; cancel the batch first") as refused:
        batches.remove_file(file.id, owner="ana")
    assert (refused.value.error.status, refused.value.error.code) == (409, "file_in_use")
    with pytest.raises(RequestRefused, match="there is no file"):
        batches.remove_file(file.id, owner="bo")
    batch.status = "completed"
    batches._write_batch(batch)
    batches.remove_file(file.id, owner="ana")
    assert batches.files.list_files(owner="ana") == []


def test_old_files_are_removed_unless_a_running_batch_reads_them(tmp_path):
    batches = ProgramBatches(tmp_path)
    used, unused = (batches.files.add_file(b"x", filename="x", purpose="batch", owner="") for _ in range(2))
    (tmp_path / "files" / ("file-" + "0" * 24)).mkdir()  # an interrupted upload leaves an empty folder
    then = used.created_at
    for id, status in (("1" * 24, "in_progress"), ("2" * 24, "completed")):
        batches._write_batch(
            GatewayBatch(f"batch_{id}", "", "/v1/chat/completions", used.id, then, status=status, ended_at=then)
        )
    batches.remove_old_batches(then + KEPT_S - 10)
    assert len(batches.list_batches(owner="")) == 2
    assert len(list((tmp_path / "files").iterdir())) == 3
    batches.remove_old_batches(time.time() + KEPT_S + 10)
    assert [batch.id for batch in batches.list_batches(owner="")] == ["batch_" + "1" * 24]
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
        served[name].prepare_recipe()
        assert paths.make_recipe(name, endpoint) == served[name].recipe
    with pytest.raises(RequestRefused, match="model e makes embeddings"):
        paths.check_model(ApiRequest("c", 1, Endpoint.CHAT, "e"))


@pytest.mark.parametrize("data", [b"", b"a\r\nb\n", b"\r\n", b"--b\r\n", bytes(range(256)) * 50, "é\n".encode() * 3])
def test_form_upload_keeps_its_bytes(data):
    form = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    form += b"Content-Type: application/octet-stream\r\n\r\n" + data + b"\r\n--B--\r\n"
    assert parse_file_upload("multipart/form-data; boundary=B", form) == ("a.jsonl", "batch", data)
