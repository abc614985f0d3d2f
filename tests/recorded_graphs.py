"""A fake `decode_graphs.GraphBackend` that records captured steps. A replay runs the captured function again. Captures
and replays fail like CUDA on reads of device values, tensors from Python values, and memory outside the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ON_HOST = frozenset({
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "tensor", "as_tensor",
    "argwhere", "masked_select", "unique",
})  # fmt: skip
_WAITS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::unique2"})


class WouldWait(RuntimeError):
    """Raised if a captured function reads a value on the host."""


class _NoHostReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ON_HOST or (name == "where" and not all(isinstance(each, torch.Tensor) for each in args)):
            raise WouldWait(f"{name} in a captured function")
        return func(*args, **(kwargs or {}))


class _Addresses(TorchDispatchMode):
    """Records the memory outside the capture that a function uses, in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[tuple[int, tuple[int, ...]]] = []
        self.held: list[Any] = []
        """Keeps the capture's memory, so that no other tensor gets its address."""
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _WAITS:
            raise WouldWait(f"{func._schema.name} in a captured function")
        before = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in before:
            if "index" in func._schema.name and tensor.dtype == torch.bool:
                raise WouldWait(f"{func._schema.name} with a mask in a captured function")
            address = _address(tensor)
            if address and address not in self._made:
                self.used.append((address, tuple(tensor.shape)))
                self.held.append(tensor)
        given = {_address(tensor) for tensor in before}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and _address(leaf) not in given:
                self._made.add(_address(leaf))
                self.held.append(leaf)
        return out


class RecordedGraphs:
    """Counts captures and replays. `pool_bytes`: the size of a capture. `error`: an exception that captures raise."""

    def __init__(self, *, pool_bytes: int = 1_000, error: Exception | None = None) -> None:
        self.pool_bytes = pool_bytes
        self.error = error
        self.held_bytes = 0
        self.captures = self.replays = self.waits = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        if self.error is not None:
            raise self.error
        recorded = self._run(function)
        self.captures += 1
        self.held_bytes += self.pool_bytes

        def replay() -> None:
            self.replays += 1
            if self._run(function).used != recorded.used:
                raise AssertionError("a replay uses other memory than its capture")

        return replay

    def upload(self, values: torch.Tensor, into: torch.Tensor) -> None:
        assert values.shape == into.shape
        into.copy_(values)

    def download(self, values: torch.Tensor) -> Callable[[], list[int]]:
        copied = values.clone()

        def read() -> list[int]:
            self.waits += 1
            return list(copied.tolist())

        return read

    def wait(self) -> None:
        """Do nothing, because all work has run."""

    def clear(self) -> None:
        self.held_bytes = 0

    def _run(self, function: Callable[[], None]) -> _Addresses:
        with _NoHostReads(), _Addresses() as addresses:
            function()
        return addresses


def _address(tensor: Any) -> int:
    """Return the tensor's address, or 0 if unknown (weights in the processor's layout)."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0
