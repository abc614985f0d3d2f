"""The processes of a session that was started in this folder, by what they are: their processor time and memory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

import psutil

PARTS = {
    "stoker.manager.main": "manager",
    "stoker.pilot.main": "pilot",
    "stoker.pilot.zygote": "library",
    "benchmarks.serving.gateway_side serve": "gateway",
}


def cpu_seconds() -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for part, process in _processes():
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        found[part] += times.user + times.system
    return dict(found)


def memory_bytes() -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for part, process in _processes():
        try:
            found[part] = max(found[part], int(process.memory_info().rss))
        except psutil.Error:
            continue
    return dict(found)


def _processes() -> Iterator[tuple[str, psutil.Process]]:
    here = os.getcwd()
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid():
                yield "client", process
                continue
            command = " ".join(process.cmdline())
            part = next((part for name, part in PARTS.items() if name in command), "")
            if part and (process.cwd() == here or here in command or _is_below(process, here)):
                yield part, process
        except psutil.Error:  # it has ended, or is another user's
            continue


def _is_below(process: psutil.Process, folder: str) -> bool:
    return any(folder in " ".join(each.cmdline()) for each in process.parents())
