"""Measure what `stoker serve` adds to a model: processor time per streamed token, and time to the first token.

An engine without computation writes at a fixed pace (`paced_gateway.py`). All processor time of the gateway, the
manager, the pilot and the library is therefore Stoker's. 1, 8 and 50 streams have the pace of a tiny model; 200 streams
write 20 tokens/s each. At 200 streams, sides alternate: the same requests also run in the session itself (`direct`).
The first round is not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import stoker
from benchmarks.harness import in_turns, percentile, run_side
from benchmarks.serving.gateways import cpu_seconds, paced, request_bytes, us_per_token
from benchmarks.serving.paced_gateway import REQUEST, FakeModel
from benchmarks.tables import Bar, Line, Table

PARTS = ("gateway", "manager", "pilot", "library")
ADDED_MS = {50: 5.0, 99: 20.0}
"""The bar of each percentile of the added time to the first token."""


class Load(NamedTuple):
    """Streams of `tokens` tokens each; a stream gets one token every `every_s` seconds. `bar_us`: bar of processor time
    per token, of all processes.
    """

    streams: int
    every_s: float
    tokens: int
    rounds: int
    bar_us: float


LOADS = (
    Load(1, 0.0014, 2_000, 2, 553.0), Load(8, 0.0017, 1_600, 2, 280.0), Load(50, 0.004, 700, 2, 123.0),
    Load(200, 0.05, 100, 3, 83.0),
)  # fmt: skip


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    repeats, (*fast, slow) = 1 if quick else 3, LOADS

    def one(load: Load, side: str) -> Callable[[], dict[str, Any]]:
        tokens, rounds = (max(load.tokens // 4, 10), 1) if quick else (load.tokens, load.rounds)
        how: dict[str, Any] = {"streams": load.streams, "every_s": load.every_s, "tokens": tokens, "rounds": rounds}
        return partial(run_side, measured, side=side, **how)

    found = in_turns({load: one(load, "gateway") for load in fast[: 1 if quick else None]}, repeats, say)
    pairs = in_turns({side: one(slow, side) for side in ("gateway", "direct")}, repeats, say)
    lines = [_cost(load, runs) for load, runs in {**found, slow: pairs["gateway"]}.items()]
    lines += [_added(percent, bar, slow.streams, pairs) for percent, bar in ADDED_MS.items()]
    notes = ["Processor time is in us per token. The sum leaves out the client."]
    return Table(lines=lines, notes=notes)


def _sum_us(run: dict[str, Any]) -> float:
    return float(sum(run["cpu_us"][part] for part in PARTS))


def _cost(load: Load, runs: list[dict[str, Any]]) -> Line:
    parts = {f"{part}, us": [run["cpu_us"][part] for run in runs] for part in ("client", *PARTS)}
    late = {"late, %": [100 * percentile(run["late"], 50) for run in runs]}
    cells = {**late, **parts, "sum, us": [_sum_us(run) for run in runs]}
    what = f"{load.streams} streams, {load.streams / load.every_s:,.0f} tokens/s"
    return Line(what=what, cells=cells, bar=Bar(at_most=load.bar_us), last_digits=0)


def _added(percent: int, bar_ms: float, streams: int, pairs: dict[str, list[dict[str, Any]]]) -> Line:
    times = {side: [percentile(run["ttft_ms"], percent) for run in runs] for side, runs in pairs.items()}
    added = [ours - theirs for ours, theirs in zip(times["gateway"], times["direct"], strict=True)]
    what = f"first token of {streams} streams, p{percent}, ms"
    return Line(what=what, cells={**times, "added": added}, bar=Bar(at_most=bar_ms), digits=1, last_digits=1)


# ---- one side


async def http_tokens(port: int, tokens: int) -> AsyncIterator[bytes]:
    """Yield the text chunks of one stream over HTTP. A client library would need more processor time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes("/v1/chat/completions", {**REQUEST, "max_tokens": tokens}))
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


Streams = Callable[[int], AsyncIterator[object]]
"""Return the pieces of a new stream with a number of tokens."""


async def ask(make: Streams, *, streams: int, rounds: int, tokens: int, every_s: float) -> dict[str, Any]:
    """Read streams. `late`: delay of each stream beyond its pace, as a share of the pace."""
    ttft_ms, late, here = list[float](), list[float](), os.getcwd()

    async def client() -> None:
        await asyncio.sleep(random.random() * tokens * every_s)
        for number in range(rounds + 1):
            begun = last = time.monotonic()
            first_at = 0.0
            async for _ in make(tokens):
                last = time.monotonic()
                first_at = first_at or last
            if number:
                ttft_ms.append(round((first_at - begun) * 1000, 2))
                late.append(round((last - first_at) / ((tokens - 1) * every_s) - 1, 4))

    before = {**cpu_seconds(here), "client": time.process_time()}
    await asyncio.gather(*(client() for _ in range(streams)))
    after = {**cpu_seconds(here), "client": time.process_time()}
    cpu_us = us_per_token(before, after, tokens=streams * (rounds + 1) * tokens)
    return {"ttft_ms": sorted(ttft_ms), "late": sorted(late), "cpu_us": cpu_us}


def measured(side: str, every_s: float, **how: Any) -> dict[str, Any]:
    """Read streams through a `gateway` or `direct`. `how`: arguments of `ask`."""
    random.seed(1)
    if side == "direct":
        with stoker.load(progress=False) as session:
            model = FakeModel(every_s)
            session.warm(model.context).result()
            return asyncio.run(ask(lambda tokens: direct_tokens(model.writes, tokens), every_s=every_s, **how))
    with paced(Path.cwd(), every_s=every_s) as port:
        return asyncio.run(ask(lambda tokens: http_tokens(port, tokens), every_s=every_s, **how))
