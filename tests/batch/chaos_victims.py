"""Find session processes by kind, sorted by node and age."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from faults.world import World, command_of, is_alive

_ZYGOTE = "stoker.pilot.zygote"
HEAD = "head"
"""Node name of processes outside Slurm's jobs."""


class Ran:
    """Lines that calls have written: name, node, process, `begins` or `ends`."""

    def __init__(self, path: Path) -> None:
        self.ends = 0
        self._path = path
        self._read = 0
        self._rest = b""
        self._begun = Counter[str]()
        self._last: dict[tuple[str, str], tuple[str, bool]] = {}

    def look(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            name, node, process, what = line.decode().split()
            self._begun[name] += what == "begins"
            self.ends += what == "ends"
            self._last[node, process] = name, what == "ends"

    def names(self) -> set[str]:
        return set(self._begun)

    def begun(self) -> int:
        return self._begun.total()

    def is_innocent(self, node: str, process: str) -> bool:
        """Return True if this process is idle or its call runs for the first time."""
        self.look()
        name, ended = self._last.get((node, process), ("", False))
        return bool(name) and (ended or self._begun[name] == 1)


class Victims:
    """Possible victims now. `ran`: the log file of calls (see `Ran`)."""

    def __init__(self, world: World, ran: Path) -> None:
        self.ran = Ran(ran)
        self._world = world

    def pilots(self) -> list[tuple[str, int]]:
        return _in_order(self._world.pilots())

    def managers(self) -> list[tuple[str, int]]:
        """Return the manager process, but not its keeper, which has the same command."""
        return _in_order(pid for pid in self._world.of("stoker.manager.main") if "--kept" not in command_of(pid))

    def keepers(self) -> list[tuple[str, int]]:
        return _in_order(pid for pid in self._world.of("stoker.manager.main") if "--kept" in command_of(pid))

    def of(self, module: str) -> list[tuple[str, int]]:
        return _in_order(self._world.of(module))

    def everything(self) -> list[tuple[str, int]]:
        return _in_order(self._world.processes())

    def clients(self, name: str) -> list[int]:
        """Return processes of a client on the head node, and their parents."""
        return [pid for pid in self._world.processes() if name in command_of(pid)]

    def zygotes(self) -> list[tuple[str, int]]:
        both = self._world.of(_ZYGOTE)
        return _in_order(pid for pid in both if parent(pid) not in both)

    def libraries(self, *, node: str = "") -> list[tuple[str, int]]:
        both = self._world.of(_ZYGOTE)
        found = _in_order(pid for pid in both if parent(pid) in both)
        return [(where, pid) for where, pid in found if node in ("", where)]

    def libraries_of(self, zygote: int) -> list[int]:
        return [pid for pid in self._world.of(_ZYGOTE) if parent(pid) == zygote]

    def is_innocent(self, library: int) -> bool:
        """Return True if the library is idle or its call never started elsewhere."""
        return self.ran.is_innocent(node_of(library), "".join(_status(library, "NSpid").split()[-1:]))


def node_of(pid: int) -> str:
    return _environ(pid, "SLURMD_NODENAME") or HEAD


def _in_order(pids: Iterable[int]) -> list[tuple[str, int]]:
    alive = [pid for pid in pids if is_alive(pid)]
    found = sorted((node_of(pid), _started_at(pid), pid) for pid in alive)
    return [(node, pid) for node, _, pid in found]


def _environ(pid: int, name: str) -> str:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    mark = f"{name}=".encode()
    return next((entry.partition(b"=")[2].decode() for entry in environ if entry.startswith(mark)), "")


def _status(pid: int, field: str) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:")), "")


def parent(pid: int) -> int:
    return int(_status(pid, "PPid") or 0)


def _started_at(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return 0
