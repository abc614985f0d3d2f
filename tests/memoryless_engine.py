"""What engines without a model have in common: no memory, and nothing to do when they sleep, wake or are resized."""

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
