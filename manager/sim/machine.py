"""A simulated node: its links, and what its disk and its memory hold."""

from __future__ import annotations

from stoker.manager.sim.flows import SharedLink
from stoker.manager.sim.world import Links


class SharedFiles:
    """The shared file system: bytes and file operations that it bears, in all."""

    def __init__(self, links: Links) -> None:
        self.bytes = SharedLink("shared", links.shared)
        self.operations = SharedLink("shared operations", links.shared_operations or float("inf"))


class Machine:
    """One node."""

    def __init__(self, name: str, links: Links) -> None:
        self.shared = SharedLink(f"{name} shared", links.shared_node)
        self.inward = SharedLink(f"{name} in", links.network)
        self.outward = SharedLink(f"{name} out", links.network)
        self.disk = SharedLink(f"{name} disk", links.disk)
        self.memory = SharedLink(f"{name} memory", links.memory)
        self.bus = SharedLink(f"{name} bus", links.bus)
        self.on_disk: dict[str, int] = {}
        """Objects in its cache, and their bytes."""
        self.in_memory: dict[str, None] = {}
        """Of those, the ones that its page cache holds."""
