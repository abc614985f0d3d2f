"""Measure the tokens per second that clients receive behind one gateway process, and behind four workers.

`tiny`: `stoker serve` with a tiny random model, whose computation uses the same cores. `free`: one gateway process, and
an engine without computation that writes faster than the gateway delivers (`paced_gateway.py`). The clients are two
separate processes that read raw sockets. All streams of a round begin at once; a first round warms up.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tiny_model import write_tiny_model

from benchmarks.harness import in_turns, need, run_side
from benchmarks.serving.gateways import cpu_seconds, paced, request_bytes, served, us_per_token
from benchmarks.starting import keep_state_in
from benchmarks.tables import Bar, Line, Table

STREAMS, TOKENS = (50, 200), 80_000
"""`TOKENS`: tokens of all streams of a round."""
BARS = {1: 20_000.0, 4: 50_000.0}
"""Minimum tokens/s by the number of gateway processes."""


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need("torch", "transformers")
    tokens = TOKENS // 20 if quick else TOKENS
    sides = {
        (engine, workers): partial(run_side, side, engine=engine, workers=workers, streams=streams, tokens=tokens)
        for engine, workers, streams in (("tiny", 1, STREAMS), ("tiny", 4, STREAMS), ("free", 1, STREAMS[-1:]))
    }
    lines = []
    for (engine, workers), runs in in_turns(sides, 1 if quick else 3, say).items():
        for number in runs[0]:
            rounds = [run[number] for run in runs]
            cells = {f"{part}, us": [each["cpu_us"][part] for each in rounds] for part in rounds[0]["cpu_us"]}
            cells["tokens/s"] = [each["tokens_per_s"] for each in rounds]
            what = f"{_ENGINES[engine]}, {number} streams, --workers {workers}"
            lines.append(Line(what=what, cells=cells, bar=Bar(at_least=BARS[workers]), last_digits=0))
    notes = [
        f"Clients, gateway, session and model shared {len(os.sched_getaffinity(0))} cores.",
        "Processor time is in us per token. The library's includes the model's computation.",
    ]
    return Table(lines=lines, notes=notes)


_ENGINES = {"tiny": "tiny model", "free": "without computation"}


# ---- one side

MODELS = '[models.tiny]\npath = "tiny"\nmemory = "1 GB"\nmin = 1\nmax = 1\n'
LAYERS, LONGEST = 2, 1_500
CLIENTS = 2
OFFERED = 100_000
"""Tokens/s that the engine without computation offers."""


def side(engine: str, workers: int, streams: list[int], tokens: int) -> dict[int, Any]:
    forked = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="gateway-rate-") as place,
        ProcessPoolExecutor(CLIENTS, mp_context=forked) as clients,
    ):
        folder = Path(place)
        keep_state_in(folder)
        if engine == "tiny":
            write_tiny_model(folder / "tiny", ends=False, ascii_only=True, layers=LAYERS)
            model, gateway = "tiny", served(folder, MODELS, workers=workers)
        else:
            [count] = streams
            model, gateway = "fake", paced(folder, every_s=count / OFFERED)
        with gateway as port:
            return {count: _measured(clients, port, model, folder, streams=count, tokens=tokens) for count in streams}


def _measured(
    clients: ProcessPoolExecutor, port: int, model: str, folder: Path, *, streams: int, tokens: int
) -> dict[str, Any]:
    each = min(LONGEST, tokens // streams)
    shares = [len(range(number, streams, CLIENTS)) for number in range(min(CLIENTS, streams))]
    for length in (min(each, 50), each):  # the first round warms up
        before = cpu_seconds(folder)
        times = list(clients.map(partial(_read_streams, port, model, length), shares))
        took_s = max(end for _, end in times) - min(begun for begun, _ in times)
        after = cpu_seconds(folder)
    written = streams * each
    return {"tokens_per_s": written / took_s, "cpu_us": us_per_token(before, after, tokens=written)}


def _read_streams(port: int, model: str, tokens: int, streams: int) -> tuple[float, float]:
    """Read streams at once. Return when the first stream began and the last stream ended, in seconds of the machine's
    clock.
    """

    async def read_all() -> None:
        await asyncio.gather(*(_read_stream(port, model, tokens) for _ in range(streams)))

    begun = time.monotonic()
    asyncio.run(read_all())
    return begun, time.monotonic()


async def _read_stream(port: int, model: str, tokens: int) -> None:
    """Read a text. Raises RuntimeError if the text does not have `tokens` tokens."""
    asked = {
        "model": model, "prompt": "a prompt", "max_tokens": tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request_bytes("/v1/completions", asked, headers={"Prefer": "wait=600"}))
        status, end = await reader.readline(), b""
        while b" 200 " in status and b"data: [DONE]" not in end and (chunk := await reader.read(1 << 16)):
            end = end[-500:] + chunk
        if f'"completion_tokens":{tokens}'.encode() not in end:
            raise RuntimeError(f"a stream without {tokens} tokens: {status!r} {end[-500:]!r}")
    finally:
        writer.close()
