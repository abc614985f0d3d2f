"""Measure the cost of the page of a large session: 200 pilots, half of 100,000 calls ended and half queued.

The pilots speak the protocol to a real manager and run nothing (`benchmarks.reliability.fake_pilots`). `stoker
dashboard` shows the session; one client reads its events, as a browser does. The manager's work for the page is its
processor time above that without the page.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.harness import in_turns, run_side
from benchmarks.reliability.recovery import Ended, fake_world
from benchmarks.starting import STOKER, cpu_s
from benchmarks.tables import Bar, Line, Table


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    pilots, calls, seconds, repeats = (20, 2_000, 12.0, 1) if quick else (200, 100_000, 60.0, 3)
    one = partial(run_side, side, pilots=pilots, calls=calls, seconds=seconds)
    [found] = in_turns({"page": one}, repeats, say).values()
    page, manager = ([run[part] for run in found] for part in ("page_ms", "manager_ms"))
    both = [ours + theirs for ours, theirs in zip(page, manager, strict=True)]
    updates, kilobytes = ([run[name] for run in found] for name in ("updates", "update_kb"))
    lines = [
        Line(
            what="processor time of an update, ms", cells={"page": page, "manager": manager, "sum": both},
            bar=Bar(at_most=200.0), digits=1, last_digits=1,
        ),
        Line(
            what=f"with one client, {seconds:.0f} s",
            cells={"updates": updates, "kB of an update": kilobytes, "% of a core": [run["share"] for run in found]},
            bar=Bar(at_most=2.0), last_digits=2,
        ),
    ]  # fmt: skip
    return Table(lines=lines)


def side(pilots: int, calls: int, seconds: float) -> dict[str, float]:
    with fake_world(pilots=pilots, devices=1, hold_after=calls // 2) as world:
        counter = Ended()
        world.submit(calls, counter)
        counter.wait(calls // 2)
        world.wait_until_accepted(calls, counter)
        manager = psutil.Process(world.manager.pid)
        time.sleep(3.0)  # The manager still works after the last call.
        alone_s = _used(manager, lambda: time.sleep(seconds / 2)) / (seconds / 2)
        with _page(world.folder.path) as (process, address):
            for _ in _updates(address, 3.0):  # the page has read the session and its history
                pass
            sizes: list[int] = []
            before = cpu_s(process)
            manager_s = _used(manager, lambda: sizes.extend(_updates(address, seconds)))
            page_s = cpu_s(process) - before
        world.end()
    return {
        "updates": float(len(sizes)), "update_kb": sum(sizes) / len(sizes) / 1e3, "share": 100 * page_s / seconds,
        "page_ms": 1e3 * page_s / len(sizes), "manager_ms": 1e3 * (manager_s - alone_s * seconds) / len(sizes),
    }  # fmt: skip


@contextlib.contextmanager
def _page(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Yield the process and the address of `stoker dashboard`."""
    command = [*STOKER, "dashboard", str(folder), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as page:
        assert page.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            if not (line := page.stdout.readline()):
                raise RuntimeError("stoker dashboard failed")
            text += line
        facts: dict[str, Any] = json.loads(text)
        try:
            yield psutil.Process(page.pid), facts["page"]
        finally:
            page.terminate()
            page.wait(60)


def _updates(address: str, seconds: float) -> Iterator[int]:
    """Read the page's events for a time. Yield the bytes of each update."""
    end, place = time.monotonic() + seconds, urlsplit(address)
    with socket.create_connection((place.hostname, place.port or 80)) as connection:
        connection.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n")
        got = b""
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            try:
                got += connection.recv(1 << 20)
            except TimeoutError:
                return
            *events, got = got.split(b"\n\n")
            yield from (len(event) for event in events if b"data: {" in event and b"event: history" not in event)


def _used(process: psutil.Process, during: Callable[[], object]) -> float:
    before = cpu_s(process)
    during()
    return cpu_s(process) - before
