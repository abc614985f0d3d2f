"""Random loads, grows, shrinks, unloads and kills over one real pilot and its libraries (docs/decisions/050).

    python tests/pilot/station_soak.py --operations 10000 --json record.json

A manager that is driven by hand promises each device's memory as the real one does: never more than the device has,
and what a library that was told to end or to shrink will free is promised again at once. Libraries hold real bytes
(`station_holder`). Two things must be true: the processes on a device never hold more together than it has, and each
operation is answered exactly once:

- a load: by one LibraryReady, or by the library's end before it was ready;
- a resize: by one LibraryResized that names it; by none where a later resize of the library was ordered before it was
  answered, which replaces it, or where the library has ended;
- an unload and a kill: by one LibraryGone, after which nothing more is said of the library. (An order to end a library
  that had just died is answered by a second one without a failure, as the manager cannot know.)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_manager import FakeManager, recipe
from station_holder import BASE, Board, hold

from stoker.contexts.recipe import Needs
from stoker.pilot.devices.cpu import USED_SHARE
from stoker.protocol.to_manager import LibraryGone, LibraryReady, LibraryResized
from stoker.protocol.to_pilot import ResizeLibrary, StartLibrary, StopLibrary

DEVICES = ("cpu:0", "cpu:1")
UNIT = 4096
GRANTED_MIB = 1024
CAPACITY = int(USED_SHARE * (GRANTED_MIB << 20) / len(DEVICES))
"""Memory of each device that a batch system has granted to the pilot."""
GRANTED = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": str(GRANTED_MIB)}
LEAST = BASE // UNIT + 1
MOST_LIBRARIES, MOST_OPEN = 12, 10
STALL_S = 60.0
WEIGHTS = {"load": 12, "grow": 38, "shrink": 38, "unload": 8, "kill": 4}


@dataclass
class Held:
    """A library as the manager knows it. `open`: sizes that were ordered and are not answered, in their order."""

    devices: tuple[str, ...]
    promised: int
    ready: bool = False
    ending: bool = False
    open: list[int] = field(default_factory=list)


class StationSoak:
    """One run over a pilot. `wrong`: broken rules; `answers`: how operations were answered."""

    def __init__(self, manager: FakeManager, *, seed: int) -> None:
        self._manager = manager
        self._chance = random.Random(seed)
        folder = manager.base / "board"
        folder.mkdir()
        self.board = Board(str(folder), CAPACITY)
        self.libraries: dict[int, Held] = {}
        self.crossed: dict[int, bool] = {}
        """Libraries that are gone; True: an order to end was under way when they ended by themselves, and is answered
        with another LibraryGone."""
        self.issued: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.failures: list[str] = []
        self._number = 0
        self._heard_at = time.monotonic()

    def run(self, operations: int) -> None:
        """Order this number of operations, then the end of all libraries, and wait for every answer."""
        self._manager.start_pilot("--devices", f"cpu:{len(DEVICES)}", **GRANTED)
        facts = self._manager.hello().devices
        if [(each.device, each.memory_bytes) for each in facts] != [(name, CAPACITY) for name in DEVICES]:
            raise RuntimeError(f"the pilot has other devices than it was granted: {facts}")
        self._heard_at = time.monotonic()
        while self.issued.total() < operations and not self._has_stalled():
            if self._open() >= MOST_OPEN or not self._issue():
                self._hear(0.02)
            self._hear(0.0)
        for number, library in self.libraries.items():
            if not library.ending:
                self._end(number, library)
        while self.libraries and not self._has_stalled():
            self._hear(0.05)
        self.wrong += [f"lib-{number} was lost: {library}" for number, library in self.libraries.items()]
        self.wrong += self.board.found()[1]

    def _has_stalled(self) -> bool:
        return time.monotonic() - self._heard_at > STALL_S and self._open() > 0

    def _open(self) -> int:
        return sum(bool(library.open) + (library.ending or not library.ready) for library in self.libraries.values())

    # ---- operations

    def _issue(self) -> bool:
        """Order one operation; False if the one that chance chose is not possible now."""
        [what] = self._chance.choices(list(WEIGHTS), WEIGHTS.values())
        done = self._load() if what == "load" else self._change(what)
        if done:
            self.issued[what] += 1
        return done

    def _load(self) -> bool:
        devices = self._chance.choice([("cpu:0",), ("cpu:1",), DEVICES])
        room = self._room(devices) // UNIT
        if room < LEAST or len(self.libraries) >= MOST_LIBRARIES:
            return False
        self._number += 1
        number, size = self._number, self._size(LEAST, room)
        made = recipe(
            hold, str(self.board.folder), CAPACITY, number, devices, size, self._chance.choice([0.0, 0.01, 0.05]),
            needs=Needs(device_memory_bytes=size),
        )  # fmt: skip
        self.libraries[number] = Held(devices, size)
        self._manager.send(StartLibrary(number, made, devices, device_memory_bytes=size))  # type: ignore[arg-type]
        return True

    def _change(self, what: str) -> bool:
        chosen = [number for number, library in self.libraries.items() if not library.ending]
        if self._chance.random() < 0.8:
            chosen = [number for number in chosen if self.libraries[number].ready]
        if what in ("unload", "kill") and self._chance.random() < 0.7:
            chosen = [number for number in chosen if not self.libraries[number].open]
        if not chosen:
            return False
        number = self._chance.choice(chosen)
        library = self.libraries[number]
        if what == "unload":
            self._end(number, library)
            return True
        if what == "kill":
            return self._kill(number, library)
        if not library.ready or (library.open and self._chance.random() < 0.5):
            return False
        held = library.promised // UNIT
        least, most = (held, held + self._room(library.devices) // UNIT) if what == "grow" else (LEAST, held)
        if most <= least:
            return False
        size = self._size(least, most) + (self._chance.random() < 0.03)  # an odd size is refused
        if size in library.open:
            return False
        library.promised = size
        library.open.append(size)
        self._manager.send(ResizeLibrary(number, size))  # type: ignore[arg-type]
        return True

    def _end(self, number: int, library: Held) -> None:
        library.ending = True
        self._manager.send(StopLibrary(number, "unloaded", drain=self._chance.random() < 0.5))  # type: ignore[arg-type]

    def _kill(self, number: int, library: Held) -> bool:
        pid = self.board.pids().get(number)
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _room(self, devices: tuple[str, ...]) -> int:
        """Memory of each of these devices that may still be promised."""
        taken = [
            sum(other.promised for other in self.libraries.values() if device in other.devices and not other.ending)
            for device in devices
        ]
        return CAPACITY - max(taken)

    def _size(self, least: int, most: int) -> int:
        """Bytes, in whole units, small ones more often."""
        return UNIT * (least + int((most - least) * self._chance.random() ** 2))

    # ---- answers

    def _hear(self, timeout_s: float) -> None:
        while self._manager.receive(timeout_s):
            timeout_s = 0.0
        heard, self._manager.said = self._manager.said, []
        for message in heard:
            if isinstance(message, (LibraryReady, LibraryResized, LibraryGone)):
                self._heard_at = time.monotonic()
                self._take(message)

    def _take(self, message: LibraryReady | LibraryResized | LibraryGone) -> None:
        library = self.libraries.get(message.library)
        if library is None:
            if self.crossed.get(message.library) and message == LibraryGone(message.library):
                self.crossed[message.library] = False
            else:
                self.wrong.append(f"of a library that is gone, or never was: {message}")
            return
        match message:
            case LibraryReady():
                if library.ready:
                    self.wrong.append(f"ready twice: {message}")
                library.ready = True
                self.answers["load: ready"] += 1
            case LibraryResized():
                self._resized(library, message)
            case LibraryGone():
                self._over(library, message)

    def _resized(self, library: Held, message: LibraryResized) -> None:
        if message.ordered_bytes not in library.open:
            self.wrong.append(f"answers no order that is open: {message}")
            return
        place = library.open.index(message.ordered_bytes)
        self.answers["resize: replaced"] += place
        del library.open[: place + 1]
        as_ordered = message.device_memory_bytes == message.ordered_bytes or bool(library.open)
        self.answers["resize: done" if as_ordered else "resize: refused"] += 1
        if not library.open:
            library.promised = message.device_memory_bytes

    def _over(self, library: Held, message: LibraryGone) -> None:
        del self.libraries[message.library]
        self.crossed[message.library] = library.ending and message.failure is not None
        self.answers["resize: its library ended"] += len(library.open)
        if not library.ready:
            self.answers["load: ended before it was ready"] += 1
        if message.failure is None:
            self.answers["end: by order"] += 1
        else:
            self.answers[f"end: {message.failure.kind.name}"] += 1
            self.failures.append(f"lib-{message.library}: {message.failure.message[:300]}")


def record_of(soak: StationSoak, *, seed: int, seconds: float) -> dict[str, Any]:
    """The operations and their results."""
    peaks, _ = soak.board.found()
    loads = sum(count for what, count in soak.answers.items() if what.startswith("load:"))
    resizes = sum(count for what, count in soak.answers.items() if what.startswith("resize:"))
    ordered = {"load": soak.issued["load"], "resize": soak.issued["grow"] + soak.issued["shrink"]}
    if ordered != {"load": loads, "resize": resizes}:
        soak.wrong.append(f"ordered {ordered}, answered {loads} loads and {resizes} resizes")
    return {
        "seed": seed, "operations": soak.issued.total(), "issued": dict(soak.issued), "answers": dict(soak.answers),
        "capacity_bytes": CAPACITY, "peak_bytes": peaks, "wrong": soak.wrong, "seconds": round(seconds, 1),
        "load": os.getloadavg(), "ok": not soak.wrong,
    }  # fmt: skip


def run(folder: Path, operations: int, *, seed: int) -> dict[str, Any]:
    manager = FakeManager(folder)
    begun = time.monotonic()
    try:
        soak = StationSoak(manager, seed=seed)
        soak.run(operations)
        return record_of(soak, seed=seed, seconds=time.monotonic() - begun)
    finally:
        manager.close()


def main() -> int:
    asking = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asking.add_argument("--operations", type=int, default=10_000)
    asking.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    asking.add_argument("--json", type=Path, help="the record, into this file")
    asked = asking.parse_args()
    with tempfile.TemporaryDirectory(prefix="station-", dir="/tmp") as folder:
        record = run(Path(folder), asked.operations, seed=asked.seed)
    print(json.dumps(record, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
