"""Batches of requests: `/v1/batches`. Each is a `stoker batch` of its own, which joins the gateway's session.

What a batch has come to lies in its folder, so it goes on when the gateway is killed and started again: a `stoker
batch` that still runs is found by its process, one that was stopped is started with the same command.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from stoker.apps.common.openai.request import RequestRefused
from stoker.apps.gateway.batch_bodies import AskedBatch
from stoker.apps.gateway.uploads import KEPT_S, FileStore

_ID = re.compile(r"batch_[0-9a-f]{24}")
_DAY_S = 86400
_LOOK_S = 0.5
_OPEN, _ENDS = ("in_progress", "cancelling"), ("completed", "failed", "cancelled")
_ENDED_WELL = (0, 1)
"""What `stoker batch` returns once its files are written: 1 if some requests have no answer."""


class GatewayBatch(msgspec.Struct):
    """One batch, as OpenAI has it but for `owner` (the name of its key) and `pid` (of its `stoker batch`)."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    metadata: dict[str, str] | None = None
    status: str = "in_progress"
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    ended_at: int | None = None
    cancelling_at: int | None = None
    problem: str = ""
    pid: int = 0

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI has it."""
        problem = {"code": "batch_failed", "message": self.problem, "line": None, "param": None}
        ends = {f"{end}_at": self.ended_at if self.status == end else None for end in _ENDS}
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "completion_window": "24h",
            "errors": {"object": "list", "data": [problem]} if self.problem else None, "status": self.status,
            "input_file_id": self.input_file_id, "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id, "created_at": self.created_at, "in_progress_at": self.created_at,
            "expires_at": self.created_at + _DAY_S, "cancelling_at": self.cancelling_at, **ends,
            "finalizing_at": None, "expired_at": None, "metadata": self.metadata,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
        }  # fmt: skip


class Batches:
    """The batches in a folder."""

    def __init__(self, folder: Path, files: FileStore, *, models: Path, session: str) -> None:
        """`models`: the models file, by which a batch finds the contexts that the gateway has."""
        self._folder = folder
        self.files = files
        self._models = models
        self._session = session
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def resume(self) -> None:
        """Go on with the batches that have not ended."""
        for batch in self._all():
            if batch.status in _OPEN:
                self._follow(batch)

    async def leave(self) -> None:
        """Let go of them: what runs is stopped, keeps its answers, and goes on with the next gateway."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def add(self, asked: AskedBatch, *, owner: str) -> GatewayBatch:
        """Begin a batch. Raises RequestRefused (404) for a file that is not there."""
        endpoint, file = asked.endpoint, asked.input_file_id
        self.files.get(file, owner=owner)
        batch = GatewayBatch(f"batch_{secrets.token_hex(12)}", owner, endpoint, file, int(time.time()), asked.metadata)
        batch.total, batch.problem = await asyncio.to_thread(_checked, self.files.data(file), endpoint)
        if batch.problem:
            batch.status, batch.ended_at = "failed", int(time.time())
        self._keep(batch)
        if not batch.problem:
            self._follow(batch)
        return batch

    def get(self, id: str, *, owner: str) -> GatewayBatch:
        """A batch of this owner, with what it has come to. Raises RequestRefused (404)."""
        found = self._read(id) if _ID.fullmatch(id) else None
        if found is None or found.owner != owner:
            raise RequestRefused(f"there is no batch {id!r:.80}", param="id", code="batch_not_found", status=404)
        if found.status in _OPEN:
            with contextlib.suppress(OSError):
                found.completed = (self._run(found) / "results.jsonl.part").read_bytes().count(b"\n")
        return found

    def all(self, *, owner: str) -> list[GatewayBatch]:
        """The batches of this owner, the newest first."""
        own = [self.get(batch.id, owner=owner) for batch in self._all() if batch.owner == owner]
        return sorted(own, key=lambda one: one.created_at, reverse=True)

    def cancel(self, id: str, *, owner: str) -> GatewayBatch:
        """Stop a batch; its answers so far are kept. Raises RequestRefused (404, or 409 where it is over)."""
        batch = self.get(id, owner=owner)
        if batch.status not in _OPEN:
            raise RequestRefused(f"batch {id} is {batch.status}", param="id", code="batch_is_over", status=409)
        batch.status, batch.cancelling_at = "cancelling", int(time.time())
        self._keep(batch)
        _stop(_process_of(batch, self._run(batch)))
        return batch

    def remove_old(self, now: float) -> None:
        """Remove batches that ended long ago, and files that are as old and that no open batch reads."""
        needed = set()
        for batch in self._all():
            if batch.status in _OPEN:
                needed.add(batch.input_file_id)
            elif (batch.ended_at or batch.created_at) + KEPT_S < now:
                shutil.rmtree(self._run(batch), ignore_errors=True)
                for ending in ("log", "json"):
                    (self._folder / f"{batch.id}.{ending}").unlink(missing_ok=True)
        self.files.remove_old(now, needed=needed)

    # ---- one batch, to its end

    def _follow(self, batch: GatewayBatch) -> None:
        task = asyncio.create_task(self._see_through(batch.id))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _task: self._tasks.pop(batch.id, None))

    async def _see_through(self, id: str) -> None:
        batch = self._read(id)
        assert batch is not None
        run = self._run(batch)
        code: int | None = None
        running = _process_of(batch, run)
        try:
            if running is None and batch.status == "in_progress":
                process = await self._spawn(batch)
                running = psutil.Process(process.pid)
                batch = self._read(id) or batch  # it may have been cancelled meanwhile
                batch.pid = process.pid
                self._keep(batch)
                if batch.status == "cancelling":
                    _stop(running)
                code = await process.wait()
            while running is not None and running.is_running() and running.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(_LOOK_S)
        except psutil.NoSuchProcess:
            pass
        except asyncio.CancelledError:
            _stop(running)
            raise
        self._end(id, code)

    async def _spawn(self, batch: GatewayBatch) -> asyncio.subprocess.Process:
        """Its `stoker batch`, which a gateway that is killed does not take along."""
        words = [sys.executable, "-m", "stoker.manager.cli.main", "batch", str(self.files.data(batch.input_file_id))]
        words += ["--models", str(self._models), "--session", self._session, "--out", str(self._run(batch)), "--json"]
        with (self._folder / f"{batch.id}.log").open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _end(self, id: str, code: int | None) -> None:
        """Its process is over. `code`: what it returned; None where that is not known."""
        batch = self._read(id)
        assert batch is not None
        run = self._run(batch)
        summary: dict[str, Any] = {}
        with contextlib.suppress(OSError, msgspec.DecodeError):
            summary = msgspec.json.decode((run / "summary.json").read_bytes())
        if summary and (code is None or code in _ENDED_WELL):
            batch.status = "completed"
            batch.completed, batch.failed = summary["answered"], summary["errors"]
            batch.output_file_id = self._given(batch, run / "responses.jsonl")
            batch.error_file_id = self._given(batch, run / "errors.jsonl")
        elif batch.status == "cancelling":
            batch.status = "cancelled"
        elif code is None:  # it was stopped while no gateway was here
            self._follow(batch)
            return
        else:
            batch.status, batch.problem = "failed", self._last_words(id) or f"stoker batch ended with {code}"
        batch.ended_at = int(time.time())
        self._keep(batch)

    def _given(self, batch: GatewayBatch, path: Path) -> str | None:
        if not path.exists() or not path.stat().st_size:
            return None
        name = f"{batch.id}_{path.name}"
        return self.files.add(path, filename=name, purpose="batch_output", owner=batch.owner).id

    def _last_words(self, id: str) -> str:
        with contextlib.suppress(OSError):
            lines = (self._folder / f"{id}.log").read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else ""
        return ""

    # ---- on disk

    def _run(self, batch: GatewayBatch) -> Path:
        return self._folder / f"{batch.id}.run"

    def _all(self) -> list[GatewayBatch]:
        return [found for path in self._folder.glob("batch_*.json") if (found := self._read(path.stem)) is not None]

    def _read(self, id: str) -> GatewayBatch | None:
        try:
            return msgspec.json.decode((self._folder / f"{id}.json").read_bytes(), type=GatewayBatch)
        except (OSError, msgspec.DecodeError):
            return None

    def _keep(self, batch: GatewayBatch) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._folder / f".{batch.id}.json"
        draft.write_bytes(msgspec.json.encode(batch))
        draft.replace(self._folder / f"{batch.id}.json")


def _checked(path: Path, endpoint: str) -> tuple[int, str]:
    """How many requests a file has, and why it is no batch for this endpoint (empty: it is one)."""
    total = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            total += 1
            try:
                found = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue  # this request is answered with an error
            url = found.get("url") if isinstance(found, dict) else None
            if isinstance(url, str) and url != endpoint:
                return total, f"line {number}: url is {url!r:.60}, and the batch is for {endpoint}"
    return total, "" if total else "the file holds no requests"


def _process_of(batch: GatewayBatch, run: Path) -> psutil.Process | None:
    """The `stoker batch` of a batch, if it runs."""
    try:
        process = psutil.Process(batch.pid)
        return process if batch.pid and str(run) in process.cmdline() else None
    except psutil.Error:
        return None


def _stop(process: psutil.Process | None) -> None:
    if process is not None:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)
