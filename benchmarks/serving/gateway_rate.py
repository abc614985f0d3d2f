"""Tokens per second that clients receive behind one gateway process, and behind four workers.

`tiny`: `stoker serve` with a tiny random model, whose computation uses the same cores. `free`: one gateway process, and
an engine without computation that writes faster than the gateway delivers (`gateway_side.py`). The clients have two
processes of their own and read raw sockets. All streams of a round begin at once; a first round warms up.

    python -m benchmarks.serving.gateway_rate tiny|free [--workers N] [--streams N ...] [--tokens N]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from free_port import free_port
from tiny_model import write_tiny_model

from benchmarks.harness import ROOT, in_turns, missing, run_side, side_options, until
from benchmarks.tables import Bar, Line, Table

NAME, TITLE = "gateway_rate", "tokens/s that clients receive, behind one gateway process and four workers"
SIDE = "benchmarks.serving.gateway_rate"
REPEATS, STREAMS, TOKENS = 3, (50, 200), 80_000
"""`TOKENS`: of all streams of a round."""
BARS = {1: 20_000.0, 4: 50_000.0}
"""Tokens/s by the number of gateway processes."""


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    if reason := missing("torch", "transformers"):
        return Table(name=NAME, title=TITLE, skipped=reason)
    tokens = ["--tokens", str(TOKENS // 20 if quick else TOKENS)]
    streams = ["--streams", *map(str, STREAMS)]
    sides = {
        ("tiny", 1): partial(run_side, SIDE, "tiny", *tokens, *streams),
        ("tiny", 4): partial(run_side, SIDE, "tiny", *tokens, *streams, "--workers", "4"),
        ("free", 1): partial(run_side, SIDE, "free", *tokens, "--streams", str(STREAMS[-1])),
    }
    found = in_turns(sides, 1 if quick else REPEATS, say, _told)
    lines = []
    for (engine, workers), runs in found.items():
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
    return Table(name=NAME, title=TITLE, lines=lines, notes=notes)


_ENGINES = {"tiny": "tiny model", "free": "without computation"}


def _told(side: tuple[str, int], run: dict[str, Any]) -> str:
    rates = ", ".join(f"{number}: {each['tokens_per_s']:,.0f}" for number, each in run.items())
    return f"{_ENGINES[side[0]]}, --workers {side[1]}, tokens/s by streams: {rates}"


# ---- one side

COMMAND = [sys.executable, "-m", "stoker.manager.cli.main"]
SITE = '[pilot]\ndevices = "cpu:1"\ninit_blocks = 1\nmax_blocks = 1\n'
MODELS = '[models.tiny]\npath = "tiny"\nmemory = "1 GB"\nmin = 1\nmax = 1\n'
LAYERS, LONGEST = 2, 1_500
CLIENTS = 2
OFFERED = 100_000
"""Tokens/s that the engine without computation offers."""
PARTS = {
    "stoker.manager.main": "manager", "stoker.pilot.main": "pilot", "stoker.pilot.zygote": "library",
    "serve site.toml": "gateway", "stoker.apps.gateway.worker": "gateway", "gateway_side serve": "gateway",
}  # fmt: skip


def main() -> None:
    asked = side_options(__doc__, engine=("tiny", "free"), workers=1, streams=[200], tokens=TOKENS)
    forked = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="gateway-rate-") as place,
        ProcessPoolExecutor(CLIENTS, mp_context=forked) as clients,
    ):
        folder = Path(place)
        os.environ |= {"STOKER_HOME": f"{place}/home", "STOKER_SCRATCH": f"{place}/scratch"}
        found = {}
        if asked.engine == "tiny":
            write_tiny_model(folder / "tiny", ends=False, ascii_only=True, layers=LAYERS)
            with served(folder, MODELS, workers=asked.workers) as port:
                for streams in asked.streams:
                    found[streams] = _measured(clients, port, "tiny", folder, streams=streams, tokens=asked.tokens)
        else:
            [streams] = asked.streams
            with _free(folder, streams=streams) as port:
                found[streams] = _measured(clients, port, "fake", folder, streams=streams, tokens=asked.tokens)
    print(json.dumps(found))


@contextlib.contextmanager
def served(folder: Path, models: str, *, workers: int = 1) -> Iterator[int]:
    """Yield the port of `stoker serve` in a folder. `models`: the text of its models file."""
    (folder / "site.toml").write_text(SITE)
    (folder / "models.toml").write_text(models)
    port, log = free_port(), folder / "gateway.log"
    command = [*COMMAND, "serve", "site.toml", "models.toml", "--port", str(port), "--workers", str(workers)]
    with log.open("w") as said:
        gateway = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
    try:
        until(lambda: "/v1" in log.read_text() or gateway.poll() is not None, 120.0, "the gateway", every_s=0.1)
        yield port
    finally:
        gateway.terminate()
        gateway.wait(120)
        if session := re.search(r"session (\S+?)[,\s]", log.read_text()):
            subprocess.run([*COMMAND, "down", session[1]], cwd=folder, capture_output=True, check=False)


@contextlib.contextmanager
def _free(folder: Path, *, streams: int) -> Iterator[int]:
    """Yield the port of a gateway whose engine writes `OFFERED` tokens/s."""
    command = [sys.executable, "-m", "benchmarks.serving.gateway_side", "serve", "--every", str(streams / OFFERED)]
    modules = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, **modules}, stdout=subprocess.PIPE, text=True
    ) as gateway:
        assert gateway.stdout is not None
        try:
            yield int(gateway.stdout.readline())
        finally:
            gateway.terminate()
            gateway.wait(120)


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
    cost = {part: 1e6 * (after[part] - before.get(part, 0.0)) / written for part in sorted(after)}
    return {"tokens_per_s": written / took_s, "cpu_us": cost}


def _read_streams(port: int, model: str, tokens: int, streams: int) -> tuple[float, float]:
    """Read streams at once. Return when the first began and the last ended, in seconds of the machine's clock."""

    async def read_all() -> None:
        await asyncio.gather(*(_read_stream(port, model, tokens) for _ in range(streams)))

    begun = time.monotonic()
    asyncio.run(read_all())
    return begun, time.monotonic()


async def _read_stream(port: int, model: str, tokens: int) -> None:
    """Read a text. Raises RuntimeError if it does not have `tokens` tokens."""
    asked = {"model": model, "prompt": "a prompt", "max_tokens": tokens, "temperature": 0, "stream": True}
    body = json.dumps({**asked, "stream_options": {"include_usage": True}})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nPrefer: wait=600\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write((head + body).encode())
        status, end = await reader.readline(), b""
        while b" 200 " in status and b"data: [DONE]" not in end and (chunk := await reader.read(1 << 16)):
            end = end[-500:] + chunk
        if f'"completion_tokens":{tokens}'.encode() not in end:
            raise RuntimeError(f"a stream without {tokens} tokens: {status!r} {end[-500:]!r}")
    finally:
        writer.close()


def cpu_seconds(folder: Path) -> dict[str, float]:
    """Return the processor time so far of the gateway's and its session's processes, by part."""
    found: dict[str, float] = defaultdict(float)
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            part = next((part for name, part in PARTS.items() if name in command), "")
            if part and (str(folder) in command or process.cwd() == str(folder)):
                times = process.cpu_times()
                found[part] += times.user + times.system
        except psutil.Error:  # the process has ended, or belongs to another user
            continue
    return dict(found)


if __name__ == "__main__":
    main()
