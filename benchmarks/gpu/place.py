"""Where a part of `make gpu` works, where it writes its numbers, and how it times the device."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import stoker

REHEARSAL = bool(os.environ.get("STOKER_GPU_REHEARSAL"))
GB = 10**9
SITE = """
name = "gpu"
[provider]
kind = "local"
[pilot]
devices = "{devices}"
probe = "never"
[session]
heartbeat = "500 ms"
lease = "20 s"
"""


class Answer:
    """Numbers by their names, kept in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._said: dict[str, Any] = {"numbers": {}}

    def __setitem__(self, name: str, value: object) -> None:
        self._said["numbers"][name] = value
        self._write()

    def skip(self, why: str) -> None:
        """It cannot run here."""
        self._said["skipped"] = why
        self._write()

    def _write(self) -> None:
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps(self._said))
        draft.replace(self._file)


class Place:
    """Where a part works, and how large the model is."""

    def __init__(self, work: Path, size_bytes: int) -> None:
        self.work = work
        self.size_bytes = size_bytes if not REHEARSAL else min(size_bytes, 20_000_000)
        self.model = work / "model"

    @contextmanager
    def session(self, *, devices: str = "") -> Iterator[Any]:
        """A session on this machine's GPUs; rehearsed on cores."""
        devices = devices or ("cpu:2" if REHEARSAL else "gpu")
        site = self.work / f"{devices.replace(':', '-')}.toml"
        site.write_text(SITE.format(devices=devices))
        with stoker.load(str(site), run_dir=str(self.work / "runs")) as session:
            yield session


def device_name() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_s(work: Callable[[], Any], *, times: int = 5) -> float:
    """The median time of some work on the device, once warm."""
    took = []
    for turn in range(times + 2):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        if turn > 1:
            took.append(time.perf_counter() - began)
    return statistics.median(took)
