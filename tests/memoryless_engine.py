from __future__ import annotations

import threading

from stoker.contexts.inference.adapter import EngineLoad, EngineMemory, FinishReason, GenerationRequest, NewToken


class MemorylessEngine:
    """Memory methods of an engine that do nothing."""

    def get_memory(self) -> EngineMemory:
        return EngineMemory(0, 0, 0)

    def resize(self, cache_bytes: int) -> None:
        pass

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass


class CountingEngine(MemorylessEngine):
    """An engine without a model: a request with prompt `(n,)` writes n, n + 1, ... Its steps wait for the `gate`."""

    name = "counting"

    def __init__(self) -> None:
        self.open: dict[int, tuple[GenerationRequest, int]] = {}
        self.most_running = 0
        self.gate = threading.Event()
        self.gate.set()
        self.steps = 0
        self.broken: Exception | None = None
        self.stopped = False

    def add(self, request: GenerationRequest) -> None:
        if request.prompt == (0,):
            raise ValueError("no prompt may be zero")
        self.open[request.id] = (request, 0)

    def step(self) -> list[NewToken]:
        assert self.gate.wait(30)
        self.steps += 1
        if self.broken is not None:
            raise self.broken
        self.most_running = max(self.most_running, len(self.open))
        new = []
        for id, (request, made) in list(self.open.items()):
            last = made + 1 == request.sampling.max_new_tokens
            new.append(NewToken(id, request.prompt[0] + made, "x", FinishReason.LENGTH if last else None))
            self.open[id] = (request, made + 1)
            if last:
                del self.open[id]
        return new

    def abort(self, request: int) -> None:
        self.open.pop(request, None)

    def count_slots(self) -> int:
        return 8

    def get_load(self) -> EngineLoad:
        return EngineLoad(running=len(self.open))

    def stop(self) -> None:
        self.stopped = True
