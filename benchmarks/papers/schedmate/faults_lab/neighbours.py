"""Processes beside the pilots that take what these were promised: memory, disk, memory of a device.

Code in a library asks for one (`Neighbour`), by a file; `Neighbours`, in the program of the benchmark, starts it. So it
is no process of the pilot's, as another job's would not be. It goes when the file goes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

LIMIT_S = 60.0
EVERY_S = 0.01

DISK = """
import os, sys
folder, keep = sys.argv[1], int(sys.argv[2])
number = os.open(folder, os.O_TMPFILE | os.O_RDWR)
size = 0
try:
    while True:
        size += os.write(number, bytes(65536))
except OSError:
    pass
os.ftruncate(number, size - keep)
"""
MEMORY = """
import os, sys
group, left = sys.argv[1], int(sys.argv[2])
open("/proc/self/oom_score_adj", "w").write("-1000")
open(group + "/cgroup.procs", "w").write(str(os.getpid()))
limit = int(open(group + "/memory.limit_in_bytes").read())
kept = []
def used():
    facts = dict(line.split() for line in open(group + "/memory.stat"))
    return int(facts["total_rss"]) + int(facts["total_shmem"])
while used() < limit - left:
    kept.append(bytearray(b"x") * (8 << 20))
"""
DEVICE = """
import json, os, sys
place, uuid, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
draft = place + "-draft-%d" % os.getpid()
open(draft, "w").write(json.dumps({uuid: size}))
os.replace(draft, place + "/%d" % os.getpid())
"""
_WAITS = "print('ready', flush=True)\nsys.stdin.read()\n"
KINDS = {"disk": DISK, "memory": MEMORY, "device": DEVICE}


def ask(requests: str, node: str, kind: str, *arguments: object) -> None:
    """In a library: have a neighbour on this node, and wait until it has taken what it takes."""
    file = Path(requests) / f"{node}.json"
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps([kind, *map(str, arguments)]))
    draft.rename(file)
    _wait(file.with_suffix(".ready"), there=True)


def dismiss(requests: str, node: str) -> None:
    file = Path(requests) / f"{node}.json"
    file.unlink(missing_ok=True)
    _wait(file.with_suffix(".ready"), there=False)


def _wait(file: Path, *, there: bool) -> None:
    until = time.monotonic() + LIMIT_S
    while file.exists() is not there:
        if time.monotonic() > until:
            raise SystemExit(f"{file} did not {'come' if there else 'go'} within {LIMIT_S:g} s")
        time.sleep(EVERY_S)


class Neighbours:
    """Starts the neighbours that are asked for in a folder, and ends those that are not asked for any more."""

    def __init__(self, requests: Path) -> None:
        self._requests = requests
        self._here: dict[Path, subprocess.Popen[bytes]] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.count = 0

    def __enter__(self) -> Neighbours:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        for file in list(self._here):
            self._end(file)

    def _serve(self) -> None:
        while not self._ends.wait(EVERY_S):
            for file in [file for file in self._here if not file.exists()]:
                self._end(file)
            for file in self._requests.glob("*.json"):
                if file not in self._here:
                    self._begin(file)

    def _begin(self, file: Path) -> None:
        try:
            kind, *arguments = json.loads(file.read_text())
        except FileNotFoundError:
            return
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", KINDS[kind] + _WAITS, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"]},
        )
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise SystemExit(f"the neighbour {kind} could not begin")
        self._here[file] = process
        self.count += 1
        file.with_suffix(".ready").touch()

    def _end(self, file: Path) -> None:
        process = self._here.pop(file)
        process.communicate()
        file.with_suffix(".ready").unlink(missing_ok=True)
