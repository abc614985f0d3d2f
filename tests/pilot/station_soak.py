"""Random loads, resizes, sleeps, wakes, unloads and kills over one real pilot and its libraries (docs/decisions/050).

    python tests/pilot/station_soak.py --operations 10000 > record.json

The test manager reserves device memory like the real manager: never more than the device has. Memory that a stop or
shrink order will free is reserved again at once. Libraries allocate real bytes (`station_holder`). The processes of a
device must never use more memory than the device has, and each operation must have exactly one answer:

- a load: LibraryReady, or the library's end before it was ready;
- a resize: LibraryResized. No answer is needed if the library has ended or a later resize came first;
- a sleep: LibraryAsleep; a wake: LibraryAwake; or the library's end;
- an unload or a kill: LibraryGone, and no later message about the library. If the library had just died, the order to
  end it is answered by a second LibraryGone without a failure.
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
from station_holder import BASE, SizeBoard, hold

from stoker.contexts.recipe import Needs
from stoker.pilot.devices.cpu import USABLE_MEMORY_SHARE
from stoker.protocol.to_manager import LibraryAsleep, LibraryAwake, LibraryGone, LibraryReady, LibraryResized
from stoker.protocol.to_pilot import ResizeLibrary, SleepLibrary, StartLibrary, StopLibrary, WakeLibrary

Answer = LibraryReady | LibraryResized | LibraryAsleep | LibraryAwake | LibraryGone
DEVICES = ("cpu:0", "cpu:1")
UNIT = 4096
GRANTED_MIB = 1024
CAPACITY = int(USABLE_MEMORY_SHARE * (GRANTED_MIB << 20) / len(DEVICES))
"""Bytes of each device that the batch system granted to the pilot."""
GRANTED = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": str(GRANTED_MIB)}
LEAST = BASE // UNIT + 1
MOST_LIBRARIES, MOST_OPEN = 12, 10
STALL_S = 60.0
WEIGHTS = {"load": 12, "grow": 30, "shrink": 30, "sleep": 30, "wake": 30, "unload": 8, "kill": 4}


@dataclass
class Held:
    """A library as the test manager knows it. `open`: ordered sizes in bytes without an answer, oldest first.
    `awake_bytes`: bytes reserved before the library slept; 0 if the library is awake. `moves`: the unanswered `sleep`
    or `wake`.
    """

    devices: tuple[str, ...]
    promised: int
    ready: bool = False
    ending: bool = False
    open: list[int] = field(default_factory=list)
    awake_bytes: int = 0
    moves: str = ""


class StationSoak:
    """One run over a pilot. `wrong`: violated rules; `answers`: counts of answers."""

    def __init__(self, manager: FakeManager, *, seed: int) -> None:
        self._manager = manager
        self._chance = random.Random(seed)
        folder = manager.base / "board"
        folder.mkdir()
        self.board = SizeBoard(str(folder), CAPACITY)
        self.libraries: dict[int, Held] = {}
        self.crossed: dict[int, bool] = {}
        """Ended libraries. True if a stop order was sent before the library died: a second LibraryGone answers that
        order.
        """
        self.issued: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._number = 0
        self._heard_at = time.monotonic()

    def run(self, operations: int) -> None:
        """Order this number of operations, then end all libraries, and wait for every answer."""
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
        self.wrong += [f"lib-{number} still runs as process {pid}" for number, pid in self.board.pids().items()]

    def _has_stalled(self) -> bool:
        return time.monotonic() - self._heard_at > STALL_S and self._open() > 0

    def _open(self) -> int:
        return sum(
            bool(library.open or library.moves) + (library.ending or not library.ready)
            for library in self.libraries.values()
        )

    # ---- operations

    def _issue(self) -> bool:
        """Order a random operation; return False if the operation is impossible now."""
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
        chosen = [(number, library) for number, library in self.libraries.items() if not library.ending]
        if not chosen:
            return False
        number, library = self._chance.choice(chosen)
        if (not library.ready or library.open) and self._chance.random() < 0.6:
            return False  # most operations are for libraries without open orders
        if what == "unload":
            self._end(number, library)
            return True
        if what == "kill":
            return self._kill(number)
        if not library.ready or library.moves:
            return False
        if what in ("sleep", "wake"):
            return self._move(what, number, library)
        if library.awake_bytes:
            return False
        held = library.promised // UNIT
        least, most = (held, held + self._room(library.devices) // UNIT) if what == "grow" else (LEAST, held)
        if most <= least:
            return False
        # the context refuses an odd number of bytes
        size = self._size(least, most) + (self._chance.random() < 0.03)
        if size in library.open:
            return False
        library.promised = size
        library.open.append(size)
        self._manager.send(ResizeLibrary(number, size))  # type: ignore[arg-type]
        return True

    def _move(self, what: str, number: int, library: Held) -> bool:
        if library.open or (what == "sleep") is bool(library.awake_bytes):
            return False
        if what == "sleep":
            library.awake_bytes, library.promised = library.promised, min(library.promised, BASE)
            self._manager.send(SleepLibrary(number, library.promised))  # type: ignore[arg-type]
        elif library.awake_bytes - library.promised > self._room(library.devices):
            return False
        else:
            library.promised = max(library.promised, library.awake_bytes)
            self._manager.send(WakeLibrary(number, library.promised))  # type: ignore[arg-type]
        library.moves = what
        return True

    def _end(self, number: int, library: Held) -> None:
        library.ending = True
        self._manager.send(StopLibrary(number, "unloaded", drain=self._chance.random() < 0.5))  # type: ignore[arg-type]

    def _kill(self, number: int) -> bool:
        try:
            os.kill(self.board.pids()[number], signal.SIGKILL)
        except (KeyError, ProcessLookupError):
            return False
        return True

    def _room(self, devices: tuple[str, ...]) -> int:
        """Return the unreserved bytes on each of these devices."""
        taken = [
            sum(other.promised for other in self.libraries.values() if device in other.devices and not other.ending)
            for device in devices
        ]
        return CAPACITY - max(taken)

    def _size(self, least: int, most: int) -> int:
        """Return a random size in whole units; small sizes are more frequent."""
        return UNIT * (least + int((most - least) * self._chance.random() ** 2))

    # ---- answers

    def _hear(self, timeout_s: float) -> None:
        while self._manager.receive(timeout_s):
            timeout_s = 0.0
        heard, self._manager.said = self._manager.said, []
        for message in heard:
            if isinstance(message, Answer):
                self._heard_at = time.monotonic()
                self._take(message)

    def _take(self, message: Answer) -> None:
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
            case LibraryAsleep() | LibraryAwake():
                self._moved(library, message)
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

    def _moved(self, library: Held, message: LibraryAsleep | LibraryAwake) -> None:
        asleep = isinstance(message, LibraryAsleep)
        refused = isinstance(message, LibraryAwake) and message.refused
        if library.moves != ("sleep" if asleep or refused else "wake"):
            self.wrong.append(f"answers no order that is open: {message}")
            return
        self.answers[f"{library.moves}: {'refused' if refused else 'done'}"] += 1
        library.moves, library.promised = "", message.device_memory_bytes
        if not asleep:
            library.awake_bytes = 0

    def _over(self, library: Held, message: LibraryGone) -> None:
        del self.libraries[message.library]
        was_asleep = bool(library.awake_bytes)  # the pilot may have ended the library to free memory
        self.crossed[message.library] = library.ending and (message.failure is not None or was_asleep)
        if library.moves:
            self.answers[f"{library.moves}: its library ended"] += 1
        self.answers["resize: its library ended"] += len(library.open)
        if not library.ready:
            self.answers["load: ended before it was ready"] += 1
        self.answers[f"end: {message.failure.kind.name if message.failure else 'by order'}"] += 1


def record_of(soak: StationSoak) -> dict[str, Any]:
    ordered = {what: soak.issued[what] for what in ("load", "sleep", "wake")}
    ordered["resize"] = soak.issued["grow"] + soak.issued["shrink"]
    answered = {
        kind: sum(count for what, count in soak.answers.items() if what.startswith(f"{kind}:")) for kind in ordered
    }
    if ordered != answered:
        soak.wrong.append(f"ordered {ordered}, answered {answered}")
    return {
        "operations": soak.issued.total(), "issued": dict(soak.issued), "answers": dict(soak.answers),
        "capacity_bytes": CAPACITY, "peak_bytes": soak.board.found()[0], "wrong": soak.wrong, "ok": not soak.wrong,
    }  # fmt: skip


def run(folder: Path, operations: int, *, seed: int) -> dict[str, Any]:
    manager = FakeManager(folder)
    try:
        soak = StationSoak(manager, seed=seed)
        soak.run(operations)
        return record_of(soak)
    finally:
        manager.close()


def main() -> int:
    asking = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asking.add_argument("--operations", type=int, default=10_000)
    asking.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    asked = asking.parse_args()
    with tempfile.TemporaryDirectory(prefix="station-", dir="/tmp") as folder:
        record = run(Path(folder), asked.operations, seed=asked.seed)
    print(json.dumps({"seed": asked.seed, **record}, indent=1))
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
