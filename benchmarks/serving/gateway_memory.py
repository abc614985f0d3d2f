"""Measure a gateway's memory over many requests.

    python -m benchmarks.serving.gateway_memory --requests 100000

Of ten requests eight are whole streams, one client disconnects, and one request is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from pathlib import Path

from benchmarks.harness import machine, side_options
from benchmarks.serving.gateways import memory_bytes, paced, request_bytes
from benchmarks.serving.paced_gateway import REQUEST

TOKENS, CLIENTS = 4, 16
SHOWN = (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of the requests after which the memory is printed."""


async def send(port: int, folder: Path, *, requests: int) -> None:
    """Send requests; print the memory after some numbers of them."""
    due = {int(requests * share) for share in SHOWN}
    begun, numbers, ended = time.monotonic(), iter(range(1, requests + 1)), itertools.count(1)

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            other = {"model": "other"} if number % 10 == 9 else {}
            writer.write(request_bytes("/v1/chat/completions", {**REQUEST, "max_tokens": TOKENS, **other}))
            status = int((await reader.readline()).split()[1])
            assert status == (404 if other else 200), status
            head = await reader.readuntil(b"\r\n\r\n")
            if other:
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))
            elif number % 10 == 8:
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            else:
                text = await reader.readuntil(b"data: [DONE]\n\n")
                assert text.count(b'"content":"') == TOKENS + 1, text  # The first chunk has the role.
                await reader.readuntil(b"0\r\n\r\n")
            if (done := next(ended)) in due:
                sizes = ", ".join(f"{part} {size / 1e6:.1f}" for part, size in sorted(memory_bytes(folder).items()))
                print(f"{done:,} requests, {time.monotonic() - begun:.0f} s; MB: {sizes}", flush=True)
        writer.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


def main() -> None:
    asked = side_options(__doc__, requests=100_000)
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder, paced(Path(folder), every_s=0.0) as port:
        asyncio.run(send(port, Path(folder), requests=asked.requests))


if __name__ == "__main__":
    main()
