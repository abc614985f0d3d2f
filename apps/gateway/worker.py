"""A worker of a gateway: answers requests for models, and forwards other requests to the gateway process.

A worker process inherits the listening socket. Its standard input is a socket for calls to and from the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import pickle
import signal
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

import stoker
from stoker.apps.common.openai_requests import RequestRefused
from stoker.apps.gateway.answering import ModelEndpoints
from stoker.apps.gateway.figures import GatewayMetrics
from stoker.apps.gateway.http import build_model_routes, build_starlette_app, guard_handler, reduce_garbage_collection
from stoker.apps.gateway.keys import Caller, CountedRequest, KeyFile, KeyGuard
from stoker.apps.gateway.listening import run_server
from stoker.apps.gateway.served import ServedModels, SessionWatch
from stoker.apps.gateway.usage import UsageFile, UsageRecorder
from stoker.apps.gateway.vllm_endpoints import TokenizerEndpoints
from stoker.apps.gateway.workers import GatewayPeer, WorkerReport, WorkerTask
from stoker.sessions import Session, honoured_by

_PR_SET_PDEATHSIG = 1


class GatewayWorker:
    def __init__(self, task: WorkerTask, channel: socket.socket, session: Session) -> None:
        self._channel = channel
        self._peer: GatewayPeer
        self._numbers = itertools.count()
        self._forwarded: dict[int, tuple[Receive, Send]] = {}
        self._models = ServedModels(task.settings, honoured=honoured_by(session) or frozenset())
        self._usage = UsageRecorder(UsageFile.at_default_path())
        self._metrics = GatewayMetrics(self._usage)
        self.stop_server: Callable[[], None] = lambda: None
        guard, watch = KeyGuard(KeyFile.at_default_path()), SessionWatch(session, self._models)
        routes = build_model_routes(
            ModelEndpoints(self._models, watch, self._begin_request, self._metrics, most_bytes=task.most_bytes),
            TokenizerEndpoints(self._models, most_bytes=task.most_bytes),
            partial(guard_handler, guard=guard, on_error=self._metrics.count_error),
        )
        self._paths = frozenset(route.path for route in routes)
        self._app = build_starlette_app(routes, guard, origins=task.origins, lifespan=self._lifespan)

    def build_application(self) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] not in self._paths:
                await self._forward_request(scope, receive, send)
            else:
                await self._app(scope, receive, send)

        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        reduce_garbage_collection()
        self._usage.start_writing()
        reader, writer = await asyncio.open_unix_connection(sock=self._channel)
        self._peer = GatewayPeer(reader, writer, self._execute_call)
        calls = asyncio.create_task(self._stop_when_peer_disconnects(self._peer))
        self._peer.notify_peer("ready")
        try:
            yield
        finally:
            calls.cancel()
            await asyncio.gather(calls, return_exceptions=True)
            await asyncio.to_thread(self._usage.stop_writing)

    async def _stop_when_peer_disconnects(self, peer: GatewayPeer) -> None:
        await peer.process_frames()
        self.stop_server()

    async def _begin_request(self, caller: Caller) -> CountedRequest:
        if not caller.name:
            return CountedRequest()
        number = next(self._numbers)
        held = CountedRequest(lambda tokens, **_now: self._peer.notify_peer("release", number, tokens))
        try:
            refused = await self._peer.call_peer("hold", number, caller.name)
            if refused is not None:
                raise RequestRefused(**refused)
        except BaseException:
            held.end_request()
            raise
        return held

    async def _forward_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = next(self._numbers)
        self._forwarded[number] = receive, send
        try:
            await self._peer.call_peer("forward", number, {**scope, "state": {}})
        finally:
            del self._forwarded[number]

    async def _execute_call(self, name: str, given: list[Any]) -> Any:
        match name:
            case "report":
                meters = {name: model.meter.export_counts() for name, model in self._models.items()}
                return WorkerReport(meters, tuple(self._metrics.collect_samples()))
            case "receive":
                receive, _ = self._forwarded[given[0]]
                return await receive()
            case "send":
                _, send = self._forwarded[given[0]]
                await send(given[1])


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = socket.socket(fileno=os.dup(0))
    length = int.from_bytes(channel.recv(4, socket.MSG_WAITALL), "big")
    data = channel.recv(length, socket.MSG_WAITALL)
    if not data:
        return
    task: WorkerTask = pickle.loads(data)
    if os.getppid() != task.parent:  # the gateway ended before prctl could tie this worker's life to it
        return
    with socket.socket(fileno=task.listener) as listener, stoker.load(session=task.session) as session:
        certificate, key = task.tls or (None, None)
        worker = GatewayWorker(task, channel, session)
        run_server(worker, listener, ssl_certfile=certificate, ssl_keyfile=key)


if __name__ == "__main__":
    main()
