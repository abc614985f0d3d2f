"""Processor time of each process for a streamed token, and tokens per second, behind a gateway.

    python -m benchmarks.serving.token_cost --streams 1 8 50

A tiny random model writes as fast as it can on one CPU device, after a round that warms up; clients stream texts of
equal lengths at once. The library's time includes the model's computation.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil
from free_port import free_port
from tiny_model import write_tiny_model

from benchmarks.harness import machine, side_options, until

COMMAND = [sys.executable, "-m", "stoker.manager.cli.main"]
SITE = '[pilot]\ndevices = "cpu:1"\ninit_blocks = 1\nmax_blocks = 1\n'
MODELS = '[models.tiny]\npath = "tiny"\nmemory = "1 GB"\nmin = 1\nmax = 1\n'
LAYERS, LONGEST, TOKENS = 2, 1_500, 6_000
"""`TOKENS`: of all streams of a round, at most `LONGEST` each."""
PARTS = {
    "stoker.manager.main": "manager", "stoker.pilot.main": "pilot", "stoker.pilot.zygote": "library",
    "serve site.toml": "gateway",
}  # fmt: skip


def main() -> None:
    asked = side_options(__doc__, streams=[1, 8, 50])
    sys.stdout.write(f"{machine()}, load {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory(prefix="token-cost-") as place:
        folder = Path(place)
        os.environ |= {"STOKER_HOME": f"{place}/home", "STOKER_SCRATCH": f"{place}/scratch"}
        write_tiny_model(folder / "tiny", ends=False, ascii_only=True, layers=LAYERS)
        (folder / "site.toml").write_text(SITE)
        (folder / "models.toml").write_text(MODELS)
        port, log = free_port(), folder / "gateway.log"
        with log.open("w") as said:
            gateway = subprocess.Popen(
                [*COMMAND, "serve", "site.toml", "models.toml", "--port", str(port)],
                cwd=folder,
                stdout=said,
                stderr=said,
            )
        try:
            until(lambda: "/v1" in log.read_text() or gateway.poll() is not None, 120.0, "the gateway", every_s=0.1)
            asyncio.run(read_stream(port, 50))
            for streams in asked.streams:
                sys.stdout.write(f"{asyncio.run(measured(port, folder, streams=streams))}\n")
                sys.stdout.flush()
        finally:
            gateway.terminate()
            gateway.wait(120)
            if session := re.search(r"session (\S+?)[,\s]", log.read_text()):
                subprocess.run([*COMMAND, "down", session[1]], cwd=folder, capture_output=True, check=False)


async def measured(port: int, folder: Path, *, streams: int) -> str:
    each = min(LONGEST, max(60, TOKENS // streams))
    for _ in range(2):  # the first round warms up
        before, began = cpu_seconds(folder), time.monotonic()
        await asyncio.gather(*(read_stream(port, each) for _ in range(streams)))
        took_s, after = time.monotonic() - began, cpu_seconds(folder)
    tokens = streams * each
    cost = {part: 1e6 * (after[part] - before.get(part, 0.0)) / tokens for part in sorted(after)}
    told = ", ".join(f"{part} {us:.0f}" for part, us in cost.items())
    return f"{streams} streams: {tokens / took_s:,.0f} tokens/s; us per token: {told}; sum {sum(cost.values()):.0f}"


async def read_stream(port: int, tokens: int) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a prompt", "max_tokens": tokens, "temperature": 0, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nPrefer: wait=600\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write((head + body).encode())
        while not (line := await reader.readline()).startswith(b"data: [DONE]"):
            if not line:
                raise RuntimeError("the stream ended early")
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
