"""Base of engines without a model: no memory, and no effect of sleep, wake and resize."""

from __future__ import annotations

from stoker.contexts.inference.adapter import EngineMemory


class MemorylessEngine:
    """The part of an engine that concerns memory, for engines that use none."""

    def memory(self) -> EngineMemory:
        return EngineMemory(0, 0, 0)

    def resize(self, cache_bytes: int) -> None:
        pass

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass
