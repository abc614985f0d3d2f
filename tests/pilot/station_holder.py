"""What the libraries of `station_soak` hold: bytes of their own, and a board on which each says how many.

A holder writes what it will hold before it allocates, and what it still holds after it has freed, under one lock; so
the sum over the living processes on the board is never less than what they hold together. Whoever writes a larger
number adds up the board under the same lock, and writes down each sum that is more than a device has: no moment
between two looks is missed. A process that was killed holds nothing.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BASE = 60 << 20
"""Memory of a holder's process besides its bytes: a size is the sum of both."""
REFUSES = 1
"""A context refuses a size whose lowest bit is set; all sizes that it takes are even."""


class Board:
    """A folder with a file for each holder: `PID-LIBRARY`, in it the bytes and the devices."""

    def __init__(self, folder: str, capacity: int) -> None:
        self.folder = Path(folder)
        self.capacity = capacity

    def write(self, library: int, held: int, devices: tuple[str, ...], *, grows: bool) -> None:
        """Say what this process holds on each of these devices; where it grows, check the sums."""
        with self._locked():
            (self.folder / f"{os.getpid()}-{library}").write_text(f"{held} {','.join(devices)}")
            if grows:
                self._check(library)

    def pids(self) -> dict[int, int]:
        return {library: pid for pid, library, _, _ in self._living()}

    def found(self) -> tuple[dict[str, int], list[str]]:
        """The largest sum of each device, and each sum that was too large."""
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
            except (OSError, ValueError):  # it is being written, by a process of which `pids` asks without the lock
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
    """A context that holds as many bytes as it was told. `slow_s`: how long it takes to let go of some."""

    def __init__(self, board: Board, library: int, devices: tuple[str, ...], size: int, *, slow_s: float) -> None:
        self._board, self._library, self._devices, self._slow_s = board, library, devices, slow_s
        self._held, self._bytes = 0, b""
        self.resize(device_memory_bytes=size)

    def resize(self, *, device_memory_bytes: int) -> None:
        if device_memory_bytes % 2 == REFUSES:
            raise ValueError(f"{device_memory_bytes} bytes are refused")
        grows, self._held = device_memory_bytes >= self._held, device_memory_bytes
        if grows:
            self._board.write(self._library, device_memory_bytes, self._devices, grows=True)
        else:
            time.sleep(self._slow_s)
        self._bytes = b""  # first: old and new together would be more
        self._bytes = b"\1" * (device_memory_bytes - BASE)
        if not grows:
            self._board.write(self._library, device_memory_bytes, self._devices, grows=False)


def hold(folder: str, capacity: int, library: int, devices: tuple[str, ...], size: int, slow_s: float) -> Holder:
    """The loader of a library of the soak."""
    return Holder(Board(folder, capacity), library, devices, size, slow_s=slow_s)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
