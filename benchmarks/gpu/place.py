"""Provide folder, site file, numbers and clock for a part of `make gpu`.

`run.py` imports this file before the installation, so the top level imports only the standard library.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SITE = """name = "gpu"

[provider]
kind = "local"
{provider}
[pilot]
devices = "{devices}"
probe = "never"
cache_size = "40 GB"
init_blocks = {pilots}
max_blocks = {pilots}

[session]
heartbeat = "500 ms"
lease = "20 s"

[policy]
name = "{policy}"
"""


def write_site(
    file: Path, *, devices: str, pilots: int = 1, policy: str = "default", own_scratch: Path | None = None
) -> Path:
    """`own_scratch`: the parent of each pilot's scratch folder."""
    own = f'worker_init = \'export STOKER_SCRATCH="{own_scratch}/$$"; mkdir -p "$STOKER_SCRATCH"\'\n'
    provider = own if own_scratch else ""
    file.write_text(_SITE.format(devices=devices, pilots=pilots, policy=policy, provider=provider))
    return file


REHEARSAL = bool(os.environ.get("STOKER_GPU_REHEARSAL"))
GB = 10**9
BANDWIDTH = "device to device, read and written, GB/s"
PINNED = "host to device, pinned, GB/s"


class Answer:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._said: dict[str, Any] = {"numbers": {}}

    def __setitem__(self, name: str, value: object) -> None:
        self._said["numbers"][name] = value
        self._write()

    @contextmanager
    def seconds(self, name: str) -> Iterator[None]:
        """Record the seconds of a block."""
        began = time.perf_counter()
        yield
        self[name] = time.perf_counter() - began

    def skip(self, why: str) -> None:
        self._said["skipped"] = why
        self._write()

    def _write(self) -> None:
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps(self._said))
        draft.replace(self._file)


class Place:
    """Work folder and time limit in seconds of a part of `make gpu`."""

    def __init__(self, work: Path, seconds: float) -> None:
        self.work, self.model = work, work / "model"
        self._until = time.monotonic() + seconds

    def left_s(self) -> float:
        return self._until - time.monotonic()

    def number(self, part: str, name: str) -> float:
        try:
            return float(json.loads((self.work / f"{part}.json").read_text())["numbers"].get(name, 0.0))
        except (OSError, ValueError):
            return 0.0

    @contextmanager
    def session(self, *, pilots: int = 1, policy: str = "default", own_scratch: bool = False) -> Iterator[Any]:
        import stoker

        site = write_site(
            self.work / "site-of-a-part.toml", devices="cpu:1" if REHEARSAL else "gpu", pilots=pilots, policy=policy,
            own_scratch=self.work / "scratches" if own_scratch else None,
        )  # fmt: skip
        with stoker.load(str(site), run_dir=str(self.work / "runs"), progress=False) as session:
            yield session


def device_memory(size: str) -> dict[str, Any]:
    return {} if REHEARSAL else {"device_memory": size}


def device_name() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_s(work: Callable[[], Any]) -> float:
    took = []
    for turn in range(7):  # two turns warm up
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        if turn > 1:
            took.append(time.perf_counter() - began)
    return statistics.median(took)
