"""Start gateways, write requests for raw sockets, and measure the processes of a gateway and its session."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from free_port import free_port

from benchmarks.harness import ROOT, path, until
from benchmarks.starting import ONE_PILOT, STOKER, cpu_s

_PARTS = {
    "stoker.manager.main": "manager", "stoker.pilot.main": "pilot", "stoker.pilot.zygote": "library",
    "serve site.toml": "gateway", "stoker.apps.gateway.worker": "gateway", "serving.paced_gateway": "gateway",
}  # fmt: skip


@contextlib.contextmanager
def served(folder: Path, models: str, *, workers: int = 1, devices: int = 1, policy: str = "default") -> Iterator[int]:
    """Run `stoker serve` in a folder; yield its port. `models`: the text of the models file."""
    (folder / "site.toml").write_text(ONE_PILOT.format(devices=devices, policy=policy))
    (folder / "models.toml").write_text(models)
    port, log = free_port(), folder / "gateway.log"
    command = [*STOKER, "serve", "site.toml", "models.toml", "--port", str(port), "--workers", str(workers)]
    with log.open("w") as said:
        gateway = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
    try:
        until(lambda: "/v1" in log.read_text() or gateway.poll() is not None, 120.0, "the gateway", every_s=0.1)
        if gateway.poll() is not None:
            raise RuntimeError(f"the gateway ended:\n{log.read_text()[-2000:]}")
        yield port
    finally:
        gateway.terminate()
        gateway.wait(120)
        if session := re.search(r"session (\S+?)[,\s]", log.read_text()):
            subprocess.run([*STOKER, "down", session[1]], cwd=folder, capture_output=True, timeout=120, check=False)


@contextlib.contextmanager
def paced(folder: Path, *, every_s: float) -> Iterator[int]:
    """Run `paced_gateway` in a folder; yield its port. Each stream gets a token every `every_s` seconds."""
    command = [sys.executable, "-m", "benchmarks.serving.paced_gateway", str(every_s)]
    modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": modules, "PATH": path()}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        try:
            yield int(gateway.stdout.readline())
        finally:
            gateway.terminate()
            gateway.wait(120)


def request_bytes(url: str, asked: dict[str, Any], *, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    body = json.dumps(asked).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {url} HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def cpu_seconds(folder: Path | str) -> dict[str, float]:
    """Return the processor seconds so far of a gateway and its session in a folder, by part."""
    return {part: sum(numbers) for part, numbers in _by_part(folder, cpu_s).items()}


def us_per_token(before: dict[str, float], after: dict[str, float], *, tokens: int) -> dict[str, float]:
    return {part: 1e6 * (after[part] - before.get(part, 0.0)) / tokens for part in sorted(after)}


def memory_bytes(folder: Path | str) -> dict[str, float]:
    """Return the resident memory of a gateway and its session: for each part, the memory of the largest process."""
    return {part: max(sizes) for part, sizes in _by_part(folder, lambda one: one.memory_info().rss).items()}


def _by_part(folder: Path | str, measure: Callable[[psutil.Process], float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # The process has ended, or belongs to another user.
            command = " ".join(process.cmdline())
            part = next((part for name, part in _PARTS.items() if name in command), "")
            commands = (" ".join(each.cmdline()) for each in (process, *process.parents()))
            if part and (process.cwd() == str(folder) or any(str(folder) in each for each in commands)):
                found[part].append(measure(process))
    return found
