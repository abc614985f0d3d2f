"""A worker of a gateway: answers requests for models, and forwards other requests to the gateway process.

A worker gets the listening socket, and a socket for calls as standard input.
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
from stoker.apps.gateway.answering import Answering
from stoker.apps.gateway.figures import GatewayMetrics
from stoker.apps.gateway.http import build_starlette_app, guarded, model_routes, reduce_garbage_collection
from stoker.apps.gateway.keys import Caller, Guard, HeldRequest, KeyFile
from stoker.apps.gateway.listening import run_server
from stoker.apps.gateway.served import ServedModels, SessionWatch
from stoker.apps.gateway.usage import UsageFile, UsageRecorder
from stoker.apps.gateway.vllm_endpoints import Tokenizing
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
        self._usage = UsageRecorder(UsageFile.usual())
        self._metrics = GatewayMetrics(self._usage)
        self.when_over: Callable[[], None] = lambda: None
        guard, watch = Guard(KeyFile.usual()), SessionWatch(session, self._models)
        routes = model_routes(
            Answering(self._models, watch, self._hold, self._metrics, most_bytes=task.most_bytes),
            Tokenizing(self._models, most_bytes=task.most_bytes),
            partial(guarded, guard=guard, failed=self._metrics.count_error),
        )
        self._paths = frozenset(route.path for route in routes)
        self._app = build_starlette_app(routes, guard, origins=task.origins, lifespan=self._lifespan)

    def application(self) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] not in self._paths:
                await self._forward(scope, receive, send)
            else:
                await self._app(scope, receive, send)

        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        reduce_garbage_collection()
        self._usage.begin()
        reader, writer = await asyncio.open_unix_connection(sock=self._channel)
        self._peer = GatewayPeer(reader, writer, self._do)
        calls = asyncio.create_task(self._stop_when_peer_disconnects(self._peer))
        self._peer.note("ready")
        try:
            yield
        finally:
            calls.cancel()
            await asyncio.gather(calls, return_exceptions=True)
            await asyncio.to_thread(self._usage.end)

    async def _stop_when_peer_disconnects(self, peer: GatewayPeer) -> None:
        await peer.run()
        self.when_over()

    async def _hold(self, caller: Caller) -> HeldRequest:
        if not caller.name:
            return HeldRequest()
        number = next(self._numbers)
        held = HeldRequest(lambda tokens, **_now: self._peer.note("release", number, tokens))
        try:
            refused = await self._peer.call("hold", number, caller.name)
            if refused is not None:
                raise RequestRefused(**refused)
        except BaseException:
            held.end()
            raise
        return held

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = next(self._numbers)
        self._forwarded[number] = receive, send
        try:
            await self._peer.call("forward", number, {**scope, "state": {}})
        finally:
            del self._forwarded[number]

    async def _do(self, name: str, given: list[Any]) -> Any:
        match name:
            case "report":
                meters = {name: model.meter.counts() for name, model in self._models.items()}
                return WorkerReport(meters, tuple(self._metrics.samples()))
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
    if os.getppid() != task.parent:  # the parent ended before the call of prctl
        return
    with socket.socket(fileno=task.listener) as listener, stoker.load(session=task.session) as session:
        certificate, key = task.tls or (None, None)
        worker = GatewayWorker(task, channel, session)
        run_server(worker, listener, ssl_certfile=certificate, ssl_keyfile=key)


if __name__ == "__main__":
    main()
