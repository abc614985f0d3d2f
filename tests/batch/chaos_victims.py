"""Which processes of a session there are, each kind in an order that another run would find too: by node and age."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from faults.world import World, command_of, count_lines, is_alive

_ZYGOTE = "stoker.pilot.zygote"


class Victims:
    """Who could be hit just now. `ran`: what calls write: name, node, process, and whether it `begins` or
    `ends`."""

    def __init__(self, world: World, ran: Path) -> None:
        self._world = world
        self._ran = ran

    def pilots(self) -> list[tuple[str, int]]:
        """A pilot is called as its node is."""
        return _in_order(self._world.pilots())

    def managers(self) -> list[tuple[str, int]]:
        """The one that serves; its keeper shows the same command."""
        return _in_order(pid for pid in self._world.of("stoker.manager.main") if "--kept" not in command_of(pid))

    def keepers(self) -> list[tuple[str, int]]:
        """The manager's parent, that starts it again."""
        return _in_order(pid for pid in self._world.of("stoker.manager.main") if "--kept" in command_of(pid))

    def of(self, module: str) -> list[tuple[str, int]]:
        """Processes of a module."""
        return _in_order(self._world.of(module))

    def clients(self, name: str) -> list[int]:
        """A client on the head, and what put it there."""
        return [pid for pid in self._world.processes() if name in command_of(pid)]

    def zygotes(self) -> list[tuple[str, int]]:
        """Those that fork libraries."""
        both = self._world.of(_ZYGOTE)
        return _in_order(pid for pid in both if _parent(pid) not in both)

    def libraries(self) -> list[tuple[str, int]]:
        """Forks of a zygote."""
        both = self._world.of(_ZYGOTE)
        return _in_order(pid for pid in both if _parent(pid) in both)

    def libraries_of(self, zygote: int) -> list[int]:
        """Its forks."""
        return [pid for pid in self._world.of(_ZYGOTE) if _parent(pid) == zygote]

    def is_innocent(self, library: int) -> bool:
        """Whether what a library runs has never begun elsewhere, or it runs nothing. No, if it never ran anything: it
        may be loading."""
        mine = (_environ(library, "SLURMD_NODENAME"), *_status(library, "NSpid").split()[-1:])
        ran = [line.split() for line in count_lines(self._ran)]
        last = next(((name, what) for name, *where, what in reversed(ran) if tuple(where) == mine), None)
        return last is not None and (last[1] == "ends" or ran_once(last[0], ran))


def ran_once(name: str, ran: list[list[str]]) -> bool:
    """Whether a call has begun once only."""
    return sum((line[0], line[-1]) == (name, "begins") for line in ran) == 1


def _in_order(pids: Iterable[int]) -> list[tuple[str, int]]:
    """By node and age; the name is the node's."""
    alive = [pid for pid in pids if is_alive(pid)]
    found = sorted((_environ(pid, "SLURMD_NODENAME"), _started_at(pid), pid) for pid in alive)
    return [(node or "head", pid) for node, _, pid in found]


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


def _parent(pid: int) -> int:
    return int(_status(pid, "PPid") or 0)


def _started_at(pid: int) -> int:
    """In clock ticks since the machine started."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return 0
