"""`stoker status` shows models from gateways' notes. No gateway runs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from gateway.loops import in_loop, until

from stoker.protocol.session import (
    GatewayNote,
    ServedModelFigures,
    SessionFolder,
    read_gateway_notes,
    remove_gateway_note,
    write_gateway_note,
)
from stoker.protocol.show_status import format_gateway_rows
from stoker.protocol.status import ContextStatus, LibraryStatus
from stoker.protocol.to_client import Status


def context(key: str, *, hot: int = 0, failure: str = "") -> ContextStatus:
    return ContextStatus(
        key=key, name=f"{key}-1", hot=hot, loading=0, queued=0, running=0, loads=hot, ended=0, load_s=1.0,
        load_total_s=1.0, run_s=0.1, run_total_s=1.0, memory_bytes=1, waits_for="", served=0, last_failure=failure,
    )  # fmt: skip


def library(number: int, recipe: str, pilot: str) -> LibraryStatus:
    return LibraryStatus(number, recipe, "ready", "", pilot, ("cuda:0",), 1, 9, 1, 1)


STATUS = Status(
    session="k3v9", uptime_s=3, queued=0, running=0, done=0, failed=0, rate=0, left_s=0, pilots=(), blocks={},
    lost_pilots=0, rerun_calls=0, refused={}, contexts=(context("llama", hot=2), context("qwen", hot=1)),
    libraries=(library(1, "llama-1", "n014"), library(2, "llama-1", "n015"), library(3, "qwen-1", "n014")),
)  # fmt: skip
LLAMA = ServedModelFigures(
    "llama-8b", "llama", "llama-1", running=14, tokens_per_s=1210.2, ttft_s=0.213, ttft_objective_s=1.0, met=0.997,
    refused=1204,
)  # fmt: skip
QWEN = ServedModelFigures("qwen-7b", "qwen", "qwen-1")
COLD = ServedModelFigures("mixtral", "mixtral", "mixtral-1")
NOTE = GatewayNote("http://127.0.0.1:8000", "login3", 4711, (LLAMA, QWEN, COLD), at=100.0)


def test_status_lists_loaded_models_and_counts_the_others() -> None:
    assert format_gateway_rows([NOTE], STATUS, now=101.0) == [
        "llama-8b   2 hot   14 running   1,210 tokens/s   TTFT 0.21 s (objective 1.0 s)   99.7 % met"
        "   1,204 refused   shares n014 with qwen-7b",
        "qwen-7b    1 hot   0 running   shares n014 with llama-8b",
        "1 other cold",
        "served at http://127.0.0.1:8000 (pid 4711 on login3)",
    ]


def test_status_shows_a_new_gateway_without_loaded_models() -> None:
    note = msgspec.structs.replace(NOTE, models=(COLD, ServedModelFigures("other", "other", "other-1")))
    assert format_gateway_rows([note], STATUS, now=101.0)[0] == "2 models, none hot yet"


def test_status_shows_models_that_cannot_be_used_or_loaded() -> None:
    unread = ServedModelFigures("gone", trouble="there is no folder\n  /models/gone")
    failed = ServedModelFigures("broken", "broken", "broken-1")
    status = msgspec.structs.replace(STATUS, contexts=(context("broken", failure="OSError: no such file"),))
    rows = format_gateway_rows([msgspec.structs.replace(NOTE, models=(unread, failed))], status, now=101.0)
    assert rows[:2] == [
        "gone     cannot be used: there is no folder /models/gone",
        "broken   0 hot   0 running   could not be loaded: OSError: no such file",
    ]


def test_status_shows_a_silent_gateway() -> None:
    (row,) = format_gateway_rows([NOTE], STATUS, now=280.0)
    assert row.startswith("the gateway at http://127.0.0.1:8000 has not answered for 3 min: run `stoker serve` ")


def test_notes_are_written_read_and_removed(tmp_path) -> None:
    write_gateway_note(tmp_path, "models-1f", NOTE)
    write_gateway_note(tmp_path, "models-2f", msgspec.structs.replace(NOTE, address="http://127.0.0.1:7999"))
    found = read_gateway_notes(SessionFolder(tmp_path))
    assert [note.address for note in found] == ["http://127.0.0.1:7999", "http://127.0.0.1:8000"]
    assert found[1].models == NOTE.models
    remove_gateway_note(tmp_path, "models-2f")
    remove_gateway_note(tmp_path, "models-2f")
    assert len(read_gateway_notes(SessionFolder(tmp_path))) == 1


@in_loop
async def test_unwritable_note_is_logged_once(tmp_path, monkeypatch, caplog) -> None:
    pytest.importorskip("starlette")
    from stoker.apps.gateway import http

    (tmp_path / "gateways" / "models-1f.json").mkdir(parents=True)  # a folder blocks the path of the gateway's note
    tries: list[object] = []
    monkeypatch.setattr(http, "WRITTEN_EVERY_S", 0.01)
    monkeypatch.setattr(http, "write_gateway_note", lambda *note: tries.append(note) or write_gateway_note(*note))
    note = http.keep_gateway_note_updated(
        SimpleNamespace(folder=tmp_path), {}, name="models-1f", address="http://127.0.0.1:1"
    )
    keeping = asyncio.create_task(note)
    await until(lambda: len(tries) >= 4)
    keeping.cancel()
    said = [record.message.partition(":")[0] for record in caplog.records]
    assert said == ["stoker status will not show this gateway's models"]


@pytest.mark.parametrize("kept", [b"", b"\xff\xfe", b'{"address": 3}', b"[1]"])
def test_unreadable_gateway_note_is_omitted(tmp_path, kept: bytes) -> None:
    write_gateway_note(tmp_path, "models-1f", NOTE)
    (tmp_path / "gateways" / "bad.json").write_bytes(kept)
    assert len(read_gateway_notes(SessionFolder(tmp_path))) == 1
