from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path

import pytest
from gateway.loops import in_loop, until
from gateway.program_batches import CHAT, ProgramBatches

from stoker.apps.gateway import batch_process
from stoker.apps.gateway.batch_files import KEPT_S, FileStore, GatewayBatch, StoredFile

ANSWERS = """
import pathlib, sys
run = pathlib.Path(sys.argv[2])
run.mkdir()
(run / "responses.jsonl").write_text("{}\\n")
(run / "errors.jsonl").write_text("{}\\n")
(run / "summary.json").write_text('{"answered": 1, "errors": 1}')
"""
SLEEPS = "import time; time.sleep(60)"


class Room:
    """Resources, for example the disk; resources in `lacking` raise errors."""

    def __init__(self) -> None:
        self.lacking: dict[str, int] = {}
        self.tried: list[str] = []

    def use(self, what: str) -> None:
        self.tried.append(what)
        if what in self.lacking:
            raise OSError(self.lacking[what], os.strerror(self.lacking[what]))


class SmallBatches(ProgramBatches):
    """Batches with the resources `room`."""

    def __init__(self, folder: Path, room: Room, program: str) -> None:
        super().__init__(folder, program, files=CrowdedStore(folder / "files", room))
        self.room = room

    async def _start_process(self, batch: GatewayBatch) -> asyncio.subprocess.Process:
        self.room.use("spawn")
        return await super()._start_process(batch)

    def _write_batch(self, batch: GatewayBatch) -> None:
        self.room.use("keep")
        super()._write_batch(batch)

    def _read_batch(self, id: str) -> GatewayBatch | None:
        self.room.use("read")
        return super()._read_batch(id)

    async def waits_for(self, id: str, why: str) -> None:
        await until(lambda: why in str(self.get_batch(id, owner="").body["errors"]))


class CrowdedStore(FileStore):
    """A file store on a disk that may be full."""

    def __init__(self, folder: Path, room: Room) -> None:
        super().__init__(folder)
        self._room = room

    def add_file(self, data: bytes | Path, *, filename: str, purpose: str, owner: str) -> StoredFile:
        self._room.use(filename.partition("_")[2].partition("_")[2])
        return super().add_file(data, filename=filename, purpose=purpose, owner=owner)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_process, "PAUSE_S", 0.02)
    monkeypatch.setattr(batch_process, "LONGEST_PAUSE_S", 0.05)


@in_loop
async def test_finished_batch_waits_until_a_full_disk_has_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room()
    batches = SmallBatches(tmp_path, room, ANSWERS)
    room.lacking["errors.jsonl"] = errno.ENOSPC
    id = (await batches.begun(count=1)).id
    await batches.waits_for(id, "No space left on device")
    assert batches.get_batch(id, owner="").body["errors"]["data"][0]["code"] == "batch_waits"
    await until(lambda: room.tried.count("errors.jsonl") >= 3)
    room.lacking.clear()
    done = await batches.over(id)
    assert (done.status, done.body["errors"]) == ("completed", None)
    assert (done.completed, done.failed, len(batches.started)) == (1, 1, 1)
    names = sorted(file.filename for file in batches.files.list_files(owner=""))
    assert names == [f"{id}_errors.jsonl", f"{id}_responses.jsonl", "f"], "each file is stored once"
    assert [record.message.count("waits for a retry") for record in caplog.records] == [1]


@pytest.mark.parametrize("lacks", ["spawn", "read"])
@in_loop
async def test_unstartable_batch_is_retried(tmp_path: Path, lacks: str) -> None:
    room = Room()
    batches = SmallBatches(tmp_path, room, ANSWERS)
    id = (await batches.begun(count=1)).id
    room.tried.clear()
    room.lacking[lacks] = errno.EMFILE
    await until(lambda: room.tried.count(lacks) >= 3)
    room.lacking.clear()
    assert (await batches.over(id)).status == "completed"
    assert len(batches.started) == 1


@in_loop
async def test_unstartable_batch_can_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_process, "PAUSE_S", 3600.0)
    monkeypatch.setattr(batch_process, "LONGEST_PAUSE_S", 3600.0)
    room = Room()
    batches = SmallBatches(tmp_path, room, ANSWERS)
    room.lacking["spawn"] = errno.EMFILE
    id = (await batches.begun(count=1)).id
    await batches.waits_for(id, "Too many open files")
    assert batches.cancel_batch(id, owner="").status == "cancelling"
    ended = await batches.over(id)
    assert (ended.status, ended.body["errors"]) == ("cancelled", None)


@in_loop
async def test_restarted_gateway_finds_the_unrecorded_process_of_a_batch(tmp_path: Path) -> None:
    room = Room()
    killed, id = SmallBatches(tmp_path, room, SLEEPS), f"batch_{'1' * 24}"
    batch = GatewayBatch(id, "", CHAT, "file-x", int(time.time()), total=1)
    killed._write_batch(batch)
    orphan = await killed._start_process(batch)
    batches = SmallBatches(tmp_path, room, SLEEPS)
    batches.resume_open_batches()
    await until(lambda: batches._followed[id].process)
    assert batches._followed[id].process.pid == orphan.pid
    batches.cancel_batch(id, owner="")
    assert (await batches.over(id)).status == "cancelled"
    assert await orphan.wait() != 0
    assert not batches.started


@in_loop
async def test_unreadable_batch_is_followed_once_it_can_be_read(tmp_path: Path) -> None:
    room = Room()
    batches = SmallBatches(tmp_path, room, ANSWERS)
    id = f"batch_{'1' * 24}"
    batches._write_batch(GatewayBatch(id, "", CHAT, "file-x", int(time.time()), total=1))
    room.lacking["read"] = errno.EMFILE
    batches.resume_open_batches()
    await until(lambda: room.tried.count("read") >= 3)
    room.lacking.clear()
    assert (await batches.over(id)).status == "completed"


def test_file_of_an_unreadable_batch_is_kept(tmp_path: Path) -> None:
    room = Room()
    batches = SmallBatches(tmp_path, room, ANSWERS)
    file = batches.files.add_file(b"x", filename="f", purpose="batch", owner="")
    batches._write_batch(GatewayBatch(f"batch_{'1' * 24}", "", CHAT, file.id, 1, total=1))
    room.lacking["read"] = errno.EMFILE
    with pytest.raises(OSError, match="Too many open files"):
        batches.remove_old_batches(time.time() + 2 * KEPT_S)
    assert batches.files.get_file(file.id, owner="") == file
