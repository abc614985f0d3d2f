"""A gateway's memory over many requests.

    python -m benchmarks.serving.gateway_memory --requests 100000

Of ten requests eight are whole streams, one client disconnects, and one request is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import ROOT, machine, path, side_options
from benchmarks.serving.gateway_side import REQUEST, memory_bytes

TOKENS = 4
SHOWN = (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of the requests after which to print memory."""


def request_of(number: int) -> bytes:
    asked = {**REQUEST, "max_tokens": TOKENS, **({"model": "other"} if number % 10 == 9 else {})}
    body = json.dumps(asked).encode()
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def client(port: int, numbers: Callable[[], int | None], over: Callable[[], None]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (number := numbers()) is not None:
        writer.write(request_of(number))
        status = int((await reader.readline()).split()[1])
        assert status == (404 if number % 10 == 9 else 200), status
        head = await reader.readuntil(b"\r\n\r\n")
        if status == 404:
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
        elif number % 10 == 8:
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        else:
            text = await reader.readuntil(b"data: [DONE]\n\n")
            assert text.count(b'"content":"') == TOKENS + 1, text  # The first chunk has the role.
            await reader.readuntil(b"0\r\n\r\n")
        over()
    writer.close()


async def ask(port: int, *, requests: int, clients: int) -> list[tuple[int, dict[str, int]]]:
    found: list[tuple[int, dict[str, int]]] = []
    due = [int(requests * share) for share in SHOWN]
    begun, asked, ended = time.monotonic(), 0, 0

    def next_number() -> int | None:
        nonlocal asked
        asked += 1
        return asked if asked <= requests else None

    def over() -> None:
        nonlocal ended
        ended += 1
        if ended in due:
            found.append((ended, memory_bytes()))
            sizes = ", ".join(f"{part} {size / 1e6:.1f}" for part, size in sorted(found[-1][1].items()))
            sys.stdout.write(f"{ended:,} requests, {time.monotonic() - begun:.0f} s; MB: {sizes}\n")
            sys.stdout.flush()

    await asyncio.gather(*(client(port, next_number, over) for _ in range(clients)))
    return found


def main() -> None:
    asked = side_options(__doc__, requests=100_000, clients=16, json="")
    into = Path(asked.json).absolute() if asked.json else None
    command = [sys.executable, "-m", "benchmarks.serving.gateway_side", "serve", "--every", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path()}
    sys.stdout.write(f"{machine()}; load {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as gateway:
            assert gateway.stdout is not None
            port = int(gateway.stdout.readline())
            try:
                found = asyncio.run(ask(port, requests=asked.requests, clients=asked.clients))
            finally:
                gateway.terminate()
                gateway.wait(60)
        os.chdir(ROOT)
    if into:
        into.write_text(json.dumps({"machine": machine(), "memory_bytes": found}) + "\n")


if __name__ == "__main__":
    main()
