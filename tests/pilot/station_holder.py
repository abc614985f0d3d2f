"""A context for `station_soak` that allocates bytes and records the number in a shared folder.

A library records its size before it allocates and after it frees memory, under one lock. So the recorded sum of
living processes is never less than their real memory. A growing library adds up the records under the same lock,
and records each sum above the capacity of the device. A killed process has no memory.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BASE = 60 << 20
"""Bytes that a library process needs in addition to the allocated bytes."""
REFUSES = 1
"""Bit of a size that the context refuses: accepted sizes are even."""


class FetchState:
    """A folder with one file `PID-LIBRARY` per library that contains the bytes and devices."""

    def __init__(self, folder: str, capacity: int) -> None:
        self.folder = Path(folder)
        self.capacity = capacity

    def write(self, library: int, held: int, devices: tuple[str, ...], *, grows: bool) -> None:
        """Record the bytes of this process on these devices; check the sums if the process grows."""
        with self._locked():
            (self.folder / f"{os.getpid()}-{library}").write_text(f"{held} {','.join(devices)}")
            if grows:
                self._check(library)

    def pids(self) -> dict[int, int]:
        return {library: pid for pid, library, _, _ in self._living()}

    def found(self) -> tuple[dict[str, int], list[str]]:
        """Return the largest sum of each device, and all sums above the capacity."""
        with self._locked():
            peaks = [line.split() for line in self._lines("peaks")]
            most = {device: max(int(size) for name, size in peaks if name == device) for device, _ in peaks}
            return most, self._lines("over")

    def _check(self, library: int) -> None:
        sums: dict[str, int] = {}
        for _, _, held, devices in self._living():
            for device in devices:
                sums[device] = sums.get(device, 0) + held
        self._add("peaks", "".join(f"{device} {held}\n" for device, held in sums.items()))
        over = "".join(f"{device}: {held} of {self.capacity}, lib-{library} grew\n" for device, held in sums.items()
                       if held > self.capacity)  # fmt: skip
        self._add("over", over)

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

    def _lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def _add(self, name: str, text: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(text)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class Holder:
    """A context that allocates the ordered number of bytes. `slow_s`: seconds of a shrink."""

    def __init__(self, board: FetchState, library: int, devices: tuple[str, ...], size: int, *, slow_s: float) -> None:
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
            self._board.write(self._library, size, self._devices, grows=True)
        else:
            time.sleep(self._slow_s)
        self._bytes = b""  # free the old bytes first, because old and new bytes together would be too many
        self._bytes = b"\1" * (size - BASE)
        if not grows:
            self._board.write(self._library, size, self._devices, grows=False)


def hold(folder: str, capacity: int, library: int, devices: tuple[str, ...], size: int, slow_s: float) -> Holder:
    return Holder(FetchState(folder, capacity), library, devices, size, slow_s=slow_s)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
