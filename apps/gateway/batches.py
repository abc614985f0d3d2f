"""`/v1/batches`: each batch is a `stoker batch` process that joins the gateway's session.

A restarted gateway finds the running process of a batch, or starts a new process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import shutil
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.common.batch_state import replace_file
from stoker.apps.common.openai_requests import RequestRefused
from stoker.apps.gateway.batch_files import (
    KEPT_S,
    FileStore,
    GatewayBatch,
    copy_errors_for_client,
    count_answers,
    write_batch_output_files,
)
from stoker.apps.gateway.batch_process import BatchPermitGranter, MonitoredBatch, find_batch_process
from stoker.apps.gateway.failures import log
from stoker.apps.gateway.keys import KeyGuard
from stoker.apps.gateway.usage import BatchUsageReader, UsageRecorder

_ID = re.compile(r"batch_[0-9a-f]{24}")
_OPEN = ("in_progress", "finalizing", "cancelling")
_EARLY_ENDS = {
    "cancelling": ("cancelled", "batch_cancelled", "the batch was cancelled before this request was answered"),
    "finalizing": ("expired", "batch_expired", "the batch expired before this request was answered"),
    "in_progress": ("failed", "batch_failed", "the batch failed before this request was answered"),
}
"""For each status in which a batch can end early: the final status, and the error code and message of unanswered
requests.
"""
_WINDOW_LOOK_S = 30.0
_COUNT_EVERY_S = 1.0
_LOG = "results.jsonl.part"
"""File in the run folder with the answers of a running batch."""
_KEPT, _CLEANED = "responses.kept.jsonl", "errors.cleaned.jsonl"
_EXIT_CODES_WITH_FILES = (0, 1)
"""Exit codes of a batch process that has written output files. 1: some requests have no answer."""


class GatewayBatches:
    def __init__(
        self, folder: Path, files: FileStore, *, models: Path, session: str, guard: KeyGuard, usage: UsageRecorder,
        names: Collection[str],
    ) -> None:  # fmt: skip
        """`usage`: records the batches' requests. `names`: the models whose requests are recorded."""
        self._folder = folder
        self.files = files
        self._models = models
        self._session = session
        self._guard = guard
        self._usage = usage
        self._names = names
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._followed: dict[str, MonitoredBatch] = {}

    def resume_open_batches(self) -> None:
        for id in self._list_batch_ids():
            batch = None
            with contextlib.suppress(OSError):
                batch = self._read_batch(id)
                if batch is None or batch.status not in _OPEN:
                    continue
            self._start_batch_task(id)  # also after an OSError, because the task reads the file again

    async def stop_all(self) -> None:
        """Stop all batches. A restarted gateway resumes open batches."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def add_batch(self, batch: GatewayBatch) -> GatewayBatch:
        self.files.get_file(batch.input_file_id, owner=batch.owner)
        data = self.files.content_path(batch.input_file_id)
        batch.total, batch.problem = await asyncio.to_thread(_check_input_file, data, batch.endpoint)
        if batch.problem:
            batch.status, batch.ended_at = "failed", int(time.time())
        self._write_batch(batch)
        if not batch.problem:
            self._start_batch_task(batch.id)
        return batch

    def get_batch(self, id: str, *, owner: str) -> GatewayBatch:
        """Return a batch of this owner with its progress. Raises RequestRefused."""
        found = self._read_batch(id) if _ID.fullmatch(id) else None
        if found is None or found.owner != owner:
            raise RequestRefused(f"there is no batch {id!r:.80}", param="id", code="batch_not_found", status=404)
        if found.status in _OPEN:
            with contextlib.suppress(OSError):
                found.completed, found.failed = count_answers(self._run_folder(found) / _LOG)
            if followed := self._followed.get(id):
                found.waits = followed.retry_reason
        return found

    def list_batches(self, *, owner: str) -> list[GatewayBatch]:
        own = [self.get_batch(batch.id, owner=owner) for batch in self._read_all_batches() if batch.owner == owner]
        return sorted(own, key=lambda one: one.created_at, reverse=True)

    def cancel_batch(self, id: str, *, owner: str) -> GatewayBatch:
        """Stop a batch and keep its answers so far. Raises RequestRefused."""
        batch = self.get_batch(id, owner=owner)
        if batch.status not in _OPEN:
            said = f"batch {id} cannot be cancelled: it is {batch.status}"
            raise RequestRefused(said, param="id", code="batch_is_over", status=409)
        batch.status, batch.cancelling_at = "cancelling", int(time.time())
        self._write_batch(batch)
        if followed := self._followed.get(id):
            followed.stop_process()
            followed.retry_now.set()
        return batch

    def remove_file(self, id: str, *, owner: str) -> None:
        """Delete a file that no open batch reads. Raises RequestRefused."""
        self.files.get_file(id, owner=owner)
        for batch in self._read_all_batches():
            if batch.input_file_id == id and batch.status in _OPEN:
                said = f"file {id} cannot be deleted: batch {batch.id} reads it; cancel the batch first"
                raise RequestRefused(said, param="id", code="file_in_use", status=409)
        self.files.remove_file(id, owner=owner)

    def remove_old_batches(self, now: float) -> None:
        needed = set()
        for batch in self._read_all_batches():
            if batch.status in _OPEN:
                needed.add(batch.input_file_id)
            elif (batch.ended_at or batch.created_at) + KEPT_S < now:
                shutil.rmtree(self._run_folder(batch), ignore_errors=True)
                for ending in ("log", "permits", "use", "json"):
                    (self._folder / f"{batch.id}.{ending}").unlink(missing_ok=True)
        self.files.remove_old_files(now, needed=needed)

    # ---- one batch, to its end

    def _start_batch_task(self, id: str) -> None:
        self._followed[id] = MonitoredBatch(id)
        task = asyncio.create_task(self._run_to_end(self._followed[id]))
        self._tasks[id] = task
        task.add_done_callback(lambda _task: (self._tasks.pop(id), self._followed.pop(id)))

    async def _run_to_end(self, followed: MonitoredBatch) -> None:
        is_over = False
        try:
            while not is_over:
                await followed.retry_until_done(lambda: self._find_or_start_process(followed))
                code = await self._wait_for_batch_process_end(followed)
                is_over = await followed.retry_until_done(functools.partial(self._store_outcome, followed, code))
        except asyncio.CancelledError:
            followed.stop_process()
            raise

    async def _find_or_start_process(self, followed: MonitoredBatch) -> None:
        """Find or start the process. After an OSError, call again."""
        batch = self._expire_if_due(followed)
        if batch is None or batch.status not in _OPEN:
            return
        if followed.child is None and followed.process is None:
            followed.process = await asyncio.to_thread(find_batch_process, self._run_folder(batch))
            batch = self._read_batch(followed.id) or batch  # the batch may have been cancelled
            pace = self._make_permit_granter(batch)
            if followed.process is not None:
                if pace is not None:
                    pace.take_over_permits(unanswered=self._count_unanswered_requests(batch))
            elif batch.status == "in_progress":
                if pace is not None:
                    pace.start_granting(unanswered=self._count_unanswered_requests(batch))
                followed.child = await self._start_process(batch)
            else:
                return
            if pace is not None:
                followed.permit_task = asyncio.create_task(pace.grant_until_cancelled())
        if (self._read_batch(followed.id) or batch).status != "in_progress":
            followed.stop_process()

    async def _wait_for_batch_process_end(self, followed: MonitoredBatch) -> int | None:
        ending = asyncio.create_task(followed.wait_for_process_end())
        counting = asyncio.create_task(self._count_usage_until_cancelled(followed.id))
        try:
            while not ending.done():
                with contextlib.suppress(OSError):  # the loop repeats the check
                    self._expire_if_due(followed)
                await asyncio.wait({ending}, timeout=_WINDOW_LOOK_S)
            return ending.result()
        finally:
            ending.cancel()
            counting.cancel()
            if followed.permit_task is not None:
                followed.permit_task.cancel()
                followed.permit_task = None

    async def _count_usage_until_cancelled(self, id: str) -> None:
        batch = None
        with contextlib.suppress(OSError):
            batch = self._read_batch(id)
        if batch is None:
            return  # at the end, `_record_batch_usage` counts the usage
        reader = self._make_usage_reader(batch)
        while True:
            more = False
            with contextlib.suppress(OSError):
                more = await asyncio.to_thread(reader.read_new_log_lines)
            self._usage.set_batch_totals(id, reader.totals, key=batch.owner)
            await asyncio.sleep(0 if more else _COUNT_EVERY_S)

    async def _record_batch_usage(self, batch: GatewayBatch) -> None:
        run, reader = self._run_folder(batch), self._make_usage_reader(batch)
        if batch.status == "completed":
            await asyncio.to_thread(reader.count_output_files, run / "responses.jsonl", run / "errors.jsonl")
        else:
            while await asyncio.to_thread(reader.read_new_log_lines):
                pass
        self._usage.set_batch_totals(batch.id, reader.totals, key=batch.owner)

    def _make_usage_reader(self, batch: GatewayBatch) -> BatchUsageReader:
        return BatchUsageReader(
            self.files.content_path(batch.input_file_id), self._run_folder(batch) / _LOG, models=self._names
        )

    def _expire_if_due(self, followed: MonitoredBatch) -> GatewayBatch | None:
        batch = self._read_batch(followed.id)
        if batch is not None and batch.status == "in_progress" and time.time() >= batch.created_at + batch.window_s:
            batch.status = "finalizing"
            self._write_batch(batch)
            followed.stop_process()
        return batch

    def _make_permit_granter(self, batch: GatewayBatch) -> BatchPermitGranter | None:
        """Return None if the batch's API key has no limits. A batch of a deleted key gets no permits."""
        if self._guard.is_open or not batch.owner:
            return None
        caller = self._guard.find_caller_by_key_name(batch.owner)
        if caller is not None and not caller.has_limits:
            return None
        return BatchPermitGranter(self._folder / f"{batch.id}.permits", self._guard, owner=batch.owner)

    def _count_unanswered_requests(self, batch: GatewayBatch) -> int:
        with contextlib.suppress(OSError):
            return batch.total - sum(count_answers(self._run_folder(batch) / _LOG))
        return batch.total

    async def _start_process(self, batch: GatewayBatch) -> asyncio.subprocess.Process:
        """Start the process of a batch. The process continues if the gateway is killed."""
        requests = str(self.files.content_path(batch.input_file_id))
        words = [sys.executable, "-P", "-m", "stoker.manager.cli.main", "batch", requests]
        words += [
            "--models",
            str(self._models),
            "--session",
            self._session,
            "--out",
            str(self._run_folder(batch)),
            "--json",
        ]
        if self._make_permit_granter(batch) is not None:
            words += ["--permits", str(self._folder / f"{batch.id}.permits")]
        with (self._folder / f"{batch.id}.log").open("wb") as said:
            return await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=said,
                start_new_session=True,
            )  # fmt: skip

    async def _store_outcome(self, followed: MonitoredBatch, code: int | None) -> bool:
        """Store the outcome, or return False if the process must start again. `code`: exit code, None if unknown."""
        batch = self._read_batch(followed.id)
        if batch is None or batch.status not in _OPEN:
            return True
        run = self._run_folder(batch)
        summary: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            summary = msgspec.json.decode((run / "summary.json").read_bytes())
        responses, errors = run / "responses.jsonl", run / "errors.jsonl"
        if summary and (code is None or code in _EXIT_CODES_WITH_FILES):
            batch.status = "completed"
            batch.completed, batch.failed = summary["answered"], summary["errors"]
            if errors.exists():
                await asyncio.to_thread(copy_errors_for_client, errors, run / _CLEANED)
        elif batch.status == "in_progress" and code is None:  # the process ended while no gateway ran: start it again
            return False
        else:
            batch.status, why, message = _EARLY_ENDS[batch.status]
            if batch.status == "failed":
                said = f"stoker batch exited with code {code}"
                with contextlib.suppress(OSError, IndexError):
                    said = (self._folder / f"{batch.id}.log").read_text(errors="replace").strip().splitlines()[-1]
                log.warning("batch %s failed: %s", batch.id, said)
                batch.problem = "the batch failed before all requests were answered; the gateway's log says why"
            run.mkdir(exist_ok=True)
            responses = run / _KEPT
            batch.completed, batch.failed = await asyncio.to_thread(
                write_batch_output_files, run / _LOG, self.files.content_path(batch.input_file_id), responses=responses,
                errors=run / _CLEANED, code=why, message=message,
            )  # fmt: skip
        batch.output_file_id = self._store_output_file(followed, batch, responses, name="responses.jsonl")
        batch.error_file_id = self._store_output_file(followed, batch, run / _CLEANED, name="errors.jsonl")
        batch.ended_at = int(time.time())
        await self._record_batch_usage(batch)
        self._write_batch(batch)
        return True

    def _store_output_file(self, followed: MonitoredBatch, batch: GatewayBatch, path: Path, *, name: str) -> str | None:
        if not path.exists() or not path.stat().st_size:
            return None
        name = f"{batch.id}_{name}"
        if name not in followed.stored_file_ids:
            stored = self.files.add_file(path, filename=name, purpose="batch_output", owner=batch.owner)
            followed.stored_file_ids[name] = stored.id
        return followed.stored_file_ids[name]

    # ---- on disk

    def _run_folder(self, batch: GatewayBatch) -> Path:
        return self._folder / f"{batch.id}.run"

    def _read_all_batches(self) -> list[GatewayBatch]:
        return [found for id in self._list_batch_ids() if (found := self._read_batch(id)) is not None]

    def _list_batch_ids(self) -> list[str]:
        return [path.stem for path in self._folder.glob("batch_*.json")]

    def _read_batch(self, id: str) -> GatewayBatch | None:
        try:
            return msgspec.json.decode((self._folder / f"{id}.json").read_bytes(), type=GatewayBatch)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _write_batch(self, batch: GatewayBatch) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = msgspec.json.encode(msgspec.structs.replace(batch, waits=""))
        replace_file(self._folder / f"{batch.id}.json", data)


def _check_input_file(path: Path, endpoint: str) -> tuple[int, str]:
    """Return the number of requests, and why the file is invalid for this endpoint (empty if valid)."""
    total = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            total += 1
            try:
                found = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue  # `stoker batch` reports the error of this request
            url = found.get("url") if isinstance(found, dict) else None
            if isinstance(url, str) and url != endpoint:
                return total, f"line {number}: url is {url!r:.60}, and the batch is for {endpoint}"
    return total, "" if total else "the file has no requests"
