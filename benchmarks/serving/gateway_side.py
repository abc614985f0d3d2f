"""A side of `benchmarks.serving.gateway_cost`: streams of an engine that writes at a fixed pace without computation.

    python -m benchmarks.serving.gateway_side direct|gateway --streams N --rounds N --tokens N --every S

Each step writes one token of each stream. `direct`: in the session itself. `gateway`: over HTTP from another process.
Prints, for all but the first round: times to the first token (ms), delay beyond the pace, processor time per token,
and the gateway's memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator

import msgspec
import psutil
from memoryless_engine import MemorylessEngine

import stoker
from benchmarks.harness import side_options
from stoker.apps.common.models_file import ModelSettings
from stoker.apps.common.openai_answers import TextBegun, TextEnded, TextPiece
from stoker.apps.common.openai_requests import ApiRequest
from stoker.apps.gateway.served import ServedModel, ServedModels
from stoker.contexts.inference.adapter import EngineLoad, Finish, GenerationRequest, NewToken, Sampling
from stoker.contexts.inference.engine_thread import EngineThread
from stoker.contexts.text_writer import CompletionTexts

PARTS = {
    "stoker.manager.main": "manager",
    "stoker.pilot.main": "pilot",
    "stoker.pilot.zygote": "library",
    "benchmarks.serving.gateway_side serve": "gateway",
}


def cpu_seconds() -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for part, process in _processes():
        try:
            times = process.cpu_times()
        except psutil.Error:  # The process has just ended.
            continue
        found[part] += times.user + times.system
    return dict(found)


def memory_bytes() -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for part, process in _processes():
        try:
            found[part] = max(found[part], int(process.memory_info().rss))
        except psutil.Error:
            continue
    return dict(found)


def _processes() -> Iterator[tuple[str, psutil.Process]]:
    here = os.getcwd()
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid():
                yield "client", process
                continue
            command = " ".join(process.cmdline())
            part = next((part for name, part in PARTS.items() if name in command), "")
            if part and (
                process.cwd() == here
                or here in command
                or any(here in " ".join(each.cmdline()) for each in process.parents())
            ):
                yield part, process
        except psutil.Error:  # The process has ended, or belongs to another user.
            continue


MOST_STREAMS = 1000
REQUEST = {"model": "fake", "messages": [{"role": "user", "content": "?"}], "stream": True}


class PacedEngine(MemorylessEngine):
    name, chosen = "paced", "for the benchmark"

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._due = 0.0
        self._left: dict[int, int] = {}

    def add(self, request: GenerationRequest) -> None:
        self._left[request.id] = request.sampling.max_new_tokens

    def abort(self, request: int) -> None:
        self._left.pop(request, None)

    def step(self) -> list[NewToken]:
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._due = max(self._due, time.monotonic() - self._every_s) + self._every_s
        self._left = {id: left - 1 for id, left in self._left.items()}
        tokens = [NewToken(id, left, f"{left} ", None if left else Finish.LENGTH) for id, left in self._left.items()]
        self._left = {id: left for id, left in self._left.items() if left}
        return tokens

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._left))

    def slots(self) -> int:
        return MOST_STREAMS

    def stop(self) -> None:
        pass


@stoker.context(slots=MOST_STREAMS)
def pace(every_s: float) -> EngineThread:
    return EngineThread(lambda: PacedEngine(every_s))


@stoker.app(stream=True)
def write_pieces(thread: EngineThread, request: ApiRequest) -> Iterator[TextPiece | CompletionTexts]:
    sampling = Sampling(max_new_tokens=request.sampling.max_new_tokens)
    yield TextBegun(1)
    texts = CompletionTexts(lambda sink: thread.submit((0,), sampling, pieces=True, sink=sink))
    yield texts
    yield TextEnded(texts.finish_reason, texts.tokens)


class FakeModel(ServedModel):
    def __init__(self, every_s: float) -> None:
        super().__init__("fake", ModelSettings(path="fake"))
        self.recipe = pace(every_s)
        self.writes = write_pieces.with_options(context=self.recipe)
        self._apps = {"pieces": self.writes}


def serve(every_s: float) -> None:
    import uvicorn

    from stoker.apps.gateway.http import Gateway
    from stoker.apps.gateway.keys import Guard, KeyFile
    from stoker.apps.gateway.served import SessionWatch

    with stoker.load(progress=False) as session, socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        models = ServedModels({})
        models["fake"] = FakeModel(every_s)
        assert models["fake"].recipe is not None
        session.warm(models["fake"].recipe).result()
        gateway = Gateway(
            models, SessionWatch(session, models), Guard(KeyFile.usual()), site="fake", most_bytes=1_000_000
        )
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        config = uvicorn.Config(gateway.application(), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listener])


async def http_tokens(port: int, tokens: int) -> AsyncIterator[bytes]:
    """Yield one stream's chunks with text over HTTP, without a client library, which needs more processor time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({**REQUEST, "max_tokens": tokens}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        while line := await reader.readline():
            if b'"content":"' in line and b'"role"' not in line:
                yield line
            elif line.startswith(b"data: [DONE]"):
                return
    finally:
        writer.close()


async def direct_tokens(app: object, tokens: int) -> AsyncIterator[str]:
    from stoker.apps.common.openai_requests import Endpoint
    from stoker.apps.gateway.answering import parse_model_request

    body = json.dumps({**REQUEST, "max_tokens": tokens}).encode()
    [choice] = parse_model_request(body, endpoint=Endpoint.CHAT, name="x").choices
    with stoker.stream(app, choice) as pieces:  # type: ignore[arg-type]
        async for piece in pieces:
            if isinstance(piece, str):
                yield piece


class Found(msgspec.Struct):
    ttft_ms: list[float]
    late: list[float]
    """Each stream's delay beyond its pace, as a share of its pace."""
    cpu_us: dict[str, float]
    memory_bytes: int = 0


async def ask(make, *, streams: int, rounds: int, tokens: int, every_s: float) -> Found:  # type: ignore[no-untyped-def]
    found = Found([], [], {})

    async def client() -> None:
        await asyncio.sleep(random.random() * tokens * every_s)
        for number in range(rounds + 1):
            begun = last = time.monotonic()
            first_at = 0.0
            async for _ in make(tokens):
                last = time.monotonic()
                first_at = first_at or last
            if number:
                found.ttft_ms.append((first_at - begun) * 1000)
                found.late.append((last - first_at) / ((tokens - 1) * every_s) - 1)

    before = cpu_seconds()
    await asyncio.gather(*(client() for _ in range(streams)))
    after, written = cpu_seconds(), streams * (rounds + 1) * tokens
    found.cpu_us = {part: (seconds - before.get(part, 0.0)) / written * 1e6 for part, seconds in after.items()}
    found.ttft_ms = sorted(round(each, 2) for each in found.ttft_ms)
    found.late = sorted(round(each, 4) for each in found.late)
    return found


def main() -> None:
    asked = side_options(__doc__, side=("direct", "gateway", "serve"), streams=200, rounds=3, tokens=100, every=0.05)
    how = {"streams": asked.streams, "rounds": asked.rounds, "tokens": asked.tokens, "every_s": asked.every}
    random.seed(1)
    if asked.side == "serve":
        serve(asked.every)
        return
    if asked.side == "direct":
        with stoker.load(progress=False) as session:
            model = FakeModel(asked.every)
            assert model.recipe is not None
            session.warm(model.recipe).result()
            app = model.writes
            found = asyncio.run(ask(lambda tokens: direct_tokens(app, tokens), **how))
    else:
        command = [sys.executable, "-m", "benchmarks.serving.gateway_side", "serve", "--every", str(asked.every)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
            assert gateway.stdout is not None
            port = int(gateway.stdout.readline())
            try:
                found = asyncio.run(ask(lambda tokens: http_tokens(port, tokens), **how))
                found.memory_bytes = psutil.Process(gateway.pid).memory_info().rss
            finally:
                gateway.terminate()
                gateway.wait(60)
    sys.stdout.write(json.dumps(msgspec.structs.asdict(found)) + "\n")


if __name__ == "__main__":
    main()
