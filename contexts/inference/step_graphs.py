"""The device side of captured decode steps: record a function once, replay it without Python.

A captured function reads and writes tensors whose addresses do not change, and reads no value on the host. Values move
between host and device without a wait: they are copied from and to pinned memory, and only the reader of a step's
tokens waits, for the event that follows the copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

log = logging.getLogger(__name__)

_WARM_UPS = 2
"""Runs before a capture, in which libraries allocate their workspaces and choose their kernels."""

Replay = Callable[[], None]
"""Enqueues a captured function on the device, and returns without waiting."""


class GraphBackend(Protocol):
    """Captures functions on one device. All methods are called by the engine's thread."""

    @property
    def held_bytes(self) -> int:
        """Device memory that captured functions hold for their temporary tensors."""

    def capture(self, function: Callable[[], None]) -> Replay:
        """Run the function for warm-up, then capture it. Its outputs are undefined until the first replay."""

    def upload(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Enqueue a copy of host values into a tensor of the device, and return without waiting."""

    def download(self, values: torch.Tensor) -> Callable[[], list[int]]:
        """Enqueue a copy to the host. The returned function waits for it and returns the values."""

    def wait(self) -> None:
        """Wait for all launched work."""

    def clear(self) -> None:
        """Free the memory of graphs. The caller has dropped all replays."""


class CudaGraphs:
    """CUDA graphs that share one private memory pool (`GraphBackend`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None
        self.held_bytes = 0

    def capture(self, function: Callable[[], None]) -> Replay:
        """Capture on a side stream. Other threads may use CUDA meanwhile (`thread_local`)."""
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            self._warm_up(function)
            torch.cuda.empty_cache()
            before, current = torch.cuda.memory_reserved(), torch.cuda.current_stream()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    function()
            finally:  # PyTorch leaves the side stream current if the end of a capture fails
                torch.cuda.set_stream(current)
            self.held_bytes += max(0, torch.cuda.memory_reserved() - before)
        replay: Replay = graph.replay
        return replay

    def upload(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Through pinned memory, which PyTorch keeps until the copy has ended."""
        into.copy_(values.pin_memory(), non_blocking=True)

    def download(self, values: torch.Tensor) -> Callable[[], list[int]]:
        """Into pinned memory, with an event behind the copy."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))

        def read() -> list[int]:
            copied.synchronize()
            return list(host.tolist())

        return read

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def clear(self) -> None:
        """Free the pool. The next capture gets another one: PyTorch refuses a pool that no graph holds any more."""
        self._pool = None
        self.held_bytes = 0
        torch.cuda.empty_cache()

    def _warm_up(self, function: Callable[[], None]) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                function()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()


def graphs_for(device: torch.device) -> GraphBackend | None:
    """What captures steps on this device; None where nothing does, with a line in the log."""
    if device.type == "cuda":
        return CudaGraphs(device)
    log.info("graphs=True has no effect on %s: a step is captured on a CUDA device only; steps run eagerly", device)
    return None
