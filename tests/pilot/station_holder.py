"""A context for `station_soak` that allocates memory and records its number of bytes in a shared folder.

A library records its size before it allocates and after it frees memory, under one lock. So the recorded sum of
living processes is never less than their real memory. Each record is followed by the sums of all devices.
A killed process has no memory.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

BASE = 60 << 20
"""Bytes that a library process needs in addition to the allocated bytes."""
ASLEEP = 8 << 20
"""Bytes of each device that a sleeping library keeps."""
REFUSES = 1
"""Bit of a size that the context refuses: accepted sizes are even."""


class SizeBoard:
    """A folder with the file `sums` and one file `PID-LIBRARY` per library, which contains bytes and devices."""

    def __init__(self, folder: str, capacity: int) -> None:
        self.folder = Path(folder)
        self.capacity = capacity

    def write(self, library: int, held: int, devices: tuple[str, ...]) -> None:
        """Record the bytes of this process on these devices."""
        with (self.folder / "lock").open("a") as lock, (self.folder / "sums").open("a") as file:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (self.folder / f"{os.getpid()}-{library}").write_text(f"{held} {','.join(devices)}")
            sums = Counter[str]()
            for _, _, size, names in self._living():
                sums.update(dict.fromkeys(names, size))
            file.writelines(f"{device} {size} lib-{library}\n" for device, size in sums.items())

    def pids(self) -> dict[int, int]:
        return {library: pid for pid, library, _, _ in self._living()}

    def found(self) -> tuple[dict[str, int], list[str]]:
        """Return the largest sum of each device, and all sums above the capacity."""
        peaks, over = dict[str, int](), list[str]()
        for line in (self.folder / "sums").read_text().splitlines():
            device, size, library = line.split()
            peaks[device] = max(peaks.get(device, 0), int(size))
            if int(size) > self.capacity:
                over.append(f"{device}: {size} of {self.capacity} after {library}")
        return peaks, over

    def _living(self) -> Iterator[tuple[int, int, int, list[str]]]:
        for file in self.folder.glob("*-*"):
            pid, library = map(int, file.name.split("-"))
            try:
                held, devices = file.read_text().split()
            except (OSError, ValueError):  # a process writes this file while it is checked without the lock
                continue
            if _is_alive(pid):
                yield pid, library, int(held), devices.split(",")
            else:
                file.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Holder:
    """A context that allocates the ordered number of bytes. `slow_s`: seconds of a shrink."""

    def __init__(self, board: SizeBoard, library: int, devices: tuple[str, ...], size: int, *, slow_s: float) -> None:
        self._board, self._library, self._devices, self._slow_s = board, library, devices, slow_s
        self._held, self._bytes = 0, b""
        self._resize(size)

    def resize(self, *, device_memory_bytes: int) -> None:
        """Allocate these bytes on the `cpu` of PyTorch, which has the memory of all devices of a library."""
        self._resize(device_memory_bytes // len(self._devices))

    def _resize(self, size: int) -> None:
        if size % 2 == REFUSES:
            raise ValueError(f"{size} bytes are refused")
        grows, self._held = size >= self._held, size
        if grows:
            self._board.write(self._library, size, self._devices)
        else:
            time.sleep(self._slow_s)
        self._bytes = b""  # free the old bytes first, because old and new bytes together would be too many
        self._bytes = b"\1" * (size - BASE)
        if not grows:
            self._board.write(self._library, size, self._devices)

    def sleep(self) -> None:
        time.sleep(self._slow_s)
        self._bytes = b""
        self._board.write(self._library, ASLEEP, self._devices)

    def wake(self) -> None:
        self._board.write(self._library, self._held, self._devices)
        self._bytes = b"\1" * (self._held - BASE)


def hold(folder: str, capacity: int, library: int, devices: tuple[str, ...], size: int, slow_s: float) -> Holder:
    return Holder(SizeBoard(folder, capacity), library, devices, size, slow_s=slow_s)
