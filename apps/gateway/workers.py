"""Start, watch and restart the worker processes of a gateway (`stoker serve --workers N`).

Workers inherit the listening socket, so a waiting connection survives the end of a worker. A worker answers requests
for models over its own connection to the session. It forwards other requests to the gateway process, and asks the
gateway process before each request of a key. Only the gateway process enforces limits, runs batches, and collects
figures.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp

from stoker.apps.common.models_file import ModelSettings
from stoker.apps.common.openai_requests import RequestRefused
from stoker.apps.gateway.failures import error_for_client, log
from stoker.apps.gateway.figures import Sample, sum_samples
from stoker.apps.gateway.keys import CountedRequest, KeyGuard
from stoker.apps.gateway.listening import GRACE_S
from stoker.apps.gateway.served import ServedModels
from stoker.sessions import WorkerFacts

_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STABLE_S = 60.0
"""Seconds that a worker must run before its restart delay is reset to `_PAUSE_S`."""
_REPORT_S = 1.0
_KILLED_AFTER_S = GRACE_S + 5.0


# ---- calls in both directions over one socket, in frames of a length and a MessagePack list

_LENGTH = struct.Struct(">I")
_CALL, _NOTE, _CANCEL, _RESULT, _ERROR = range(5)
_ENDED = "the other process has ended"


class GatewayPeer:
    """One end of the socket between the gateway process and a worker. `do`: executes a call of the other process."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        do: Callable[[str, list[Any]], Awaitable[Any]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._do = do
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._work: dict[int, asyncio.Task[None]] = {}
        """Running calls for the other process, by call number."""
        self._is_over = False

    async def call_peer(self, name: str, *given: Any) -> Any:
        """Run a call in the other process and return its result. Cancellation also cancels that call. Raises
        ConnectionError.
        """
        if self._is_over:
            raise ConnectionError(_ENDED)
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._write_frame(_CALL, number, name, given)
            await self._writer.drain()
            return await waiting
        except asyncio.CancelledError:
            self._write_frame(_CANCEL, number)
            raise
        finally:
            del self._waiting[number]

    def notify_peer(self, name: str, *given: Any) -> None:
        """Send a call without waiting for a result."""
        self._write_frame(_NOTE, next(self._numbers), name, given)

    async def process_frames(self) -> None:
        """Execute calls and receive results until the other process ends."""
        try:
            while True:
                [length] = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                kind, number, *rest = msgspec.msgpack.decode(await self._reader.readexactly(length))
                self._process_frame(kind, number, rest)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._is_over = True
            for task in self._work.values():
                task.cancel()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionError(_ENDED))
            self._writer.close()

    def _process_frame(self, kind: int, number: int, rest: list[Any]) -> None:
        if kind in (_CALL, _NOTE):
            task = self._work[number] = asyncio.create_task(self._answer_call(number, *rest, has_result=kind == _CALL))
            task.add_done_callback(lambda _task: self._work.pop(number, None))
        elif kind == _CANCEL:
            if number in self._work:
                self._work[number].cancel()
        elif (waiting := self._waiting.get(number)) is not None and not waiting.done():
            if kind == _RESULT:
                waiting.set_result(rest[0])
            else:
                waiting.set_exception(ConnectionError(rest[0]))

    async def _answer_call(self, number: int, name: str, given: list[Any], *, has_result: bool) -> None:
        try:
            kind, result = _RESULT, await self._do(name, given)
        except Exception as error:
            log.warning("a call between the gateway's processes failed", exc_info=True)
            kind, result = _ERROR, str(error)
        if has_result:
            self._write_frame(kind, number, result)

    def _write_frame(self, *frame: Any) -> None:
        data = msgspec.msgpack.encode(frame)
        self._writer.write(_LENGTH.pack(len(data)) + data)


# ---- workers


class WorkerTask(msgspec.Struct, frozen=True, kw_only=True):
    parent: int
    listener: int
    """The descriptor of the listening socket."""
    session: str
    settings: Mapping[str, ModelSettings]
    most_bytes: int
    origins: tuple[str, ...]
    tls: tuple[str, str] | None


class WorkerReport(msgspec.Struct, frozen=True):
    """The statistics of a worker: counts by model (`meters`), and samples for Prometheus."""

    meters: dict[str, dict[str, Any]] = {}
    samples: tuple[Sample, ...] = ()


class _RunningWorker:
    """A running worker. `held`: running requests that count for a key, by the worker's request numbers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.peer: GatewayPeer
        self.report = WorkerReport()
        self.is_ready = False
        self.held: dict[int, CountedRequest] = {}


class GatewayWorkers:
    """Starts workers, and restarts workers that end. `models`: models whose meters get the sums over all workers."""

    def __init__(self, task: WorkerTask, *, number: int, models: ServedModels, guard: KeyGuard) -> None:
        self._task = task
        self._number = number
        self._models = models
        self._guard = guard
        self._workers: list[_RunningWorker] = []
        self._ended = WorkerReport()
        self._restarts = 0
        self._stops = False

    @property
    def worker_facts(self) -> WorkerFacts:
        return WorkerFacts(self._number, sum(each.is_ready for each in self._workers), self._restarts)

    async def keep_workers_running(self, app: ASGIApp) -> None:
        """Keep the workers running until this task is cancelled. `app`: answers forwarded requests."""
        await asyncio.gather(*(self._keep_worker_running(app) for _ in range(self._number)))

    async def stop_workers(self) -> None:
        self._stops = True
        ending = [asyncio.create_task(each.process.wait()) for each in self._workers]
        for number, wait_s in ((signal.SIGINT, _KILLED_AFTER_S), (signal.SIGKILL, None)):
            for each in self._workers:
                with suppress(ProcessLookupError):
                    each.process.send_signal(number)
            if ending:
                await asyncio.wait(ending, timeout=wait_s)

    async def collect_reports(self) -> Sequence[Sample]:
        await asyncio.gather(*(self._request_report(each) for each in self._workers if each.is_ready))
        reports = [self._ended, *(each.report for each in self._workers)]
        for name, model in self._models.items():
            model.meter.sum_worker_counts([report.meters[name] for report in reports if name in report.meters])
        return sum_samples(sample for report in reports for sample in report.samples)

    async def _request_report(self, worker: _RunningWorker) -> None:
        with suppress(ConnectionError, TimeoutError):  # without an answer, the last report is used
            given = await asyncio.wait_for(worker.peer.call_peer("report"), _REPORT_S)
            worker.report = msgspec.convert(given, WorkerReport)

    async def _keep_worker_running(self, app: ASGIApp) -> None:
        pause_s = _PAUSE_S
        while True:
            began = time.monotonic()
            try:
                how = f"ended with {await self._run_worker(app)}"
            except OSError as error:
                how = f"could not start: {error}"
            if self._stops:
                return
            if time.monotonic() - began >= _STABLE_S:
                pause_s = _PAUSE_S
            log.warning("a worker of the gateway %s; the next worker starts in %g s", how, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._restarts += 1

    async def _run_worker(self, app: ASGIApp) -> int:
        here, there = socket.socketpair()
        try:
            with there:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", "stoker.apps.gateway.worker", stdin=there.fileno(),
                    stdout=subprocess.DEVNULL, pass_fds=(self._task.listener,), start_new_session=True,
                )  # fmt: skip
            reader, writer = await asyncio.open_unix_connection(sock=here)
        except BaseException:
            here.close()
            raise
        worker = _RunningWorker(process)
        self._workers.append(worker)
        worker.peer = GatewayPeer(reader, writer, partial(self._execute_call, worker, app))
        task = pickle.dumps(self._task)
        writer.write(len(task).to_bytes(4, "big") + task)
        try:
            await worker.peer.process_frames()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILLED_AFTER_S)
        finally:
            self._workers.remove(worker)
            self._add_final_report(worker)
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
        return await process.wait()

    def _add_final_report(self, worker: _RunningWorker) -> None:
        for held in worker.held.values():
            held.end_request()
        gone = worker.report
        meters = dict(self._ended.meters)
        for name, counts in gone.meters.items():
            before = meters.get(name, {})
            meters[name] = {
                each: [] if isinstance(value, list) else before.get(each, 0) + value for each, value in counts.items()
            }
            meters[name]["running"] = 0
        self._ended = WorkerReport(meters, tuple(sum_samples((*self._ended.samples, *gone.samples))))

    async def _execute_call(self, worker: _RunningWorker, app: ASGIApp, name: str, given: list[Any]) -> Any:
        match name:
            case "hold":
                number, key = given
                try:
                    worker.held[number] = self._guard.begin_request_for_key_name(key)
                except RequestRefused as error:
                    return error_for_client(error)
            case "release":
                if (held := worker.held.pop(given[0], None)) is not None:
                    held.tokens = given[1]
                    held.end_request()
            case "forward":
                return await self._answer_forwarded_request(worker, app, *given)
            case "ready":
                worker.is_ready = True

    async def _answer_forwarded_request(
        self, worker: _RunningWorker, app: ASGIApp, number: int, scope: dict[str, Any]
    ) -> None:
        """Answer a forwarded request. After each message, wait until the worker has sent it to the client."""
        await app(
            scope, partial(worker.peer.call_peer, "receive", number), partial(worker.peer.call_peer, "send", number)
        )
