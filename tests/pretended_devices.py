"""Imitate devices `gpu:0`, `gpu:1`, ... on a machine without GPUs.

Operations on tensors of these devices run on the CPU. An operation over tensors of two devices fails as with CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ATEN = torch.ops.aten
MOVES = (ATEN._to_copy.default, ATEN.copy_.default)
ACCEPT_INDICES_OF_CPU = (ATEN.index.Tensor, ATEN.index_put_.default)


class PretendedTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> PretendedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=device,
        )  # fmt: skip

    def __init__(self, inner: torch.Tensor, device: torch.device) -> None:
        del device
        self.inner = inner

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _run(func, args, kwargs or {})


class _Pretend(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def pretended_devices() -> Iterator[None]:
    if torch.utils.backend_registration._get_privateuse1_backend_name() != "gpu":
        torch.utils.backend_registration._setup_privateuseone_for_python_backend("gpu")
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # the mode then sees torch.tensor(..., device=)
    try:
        with _Pretend(), torch.no_grad():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def place(model: Any, devices: dict[str, str]) -> None:
    """Move the parts of a model to the devices of a device map."""
    for path, part in list(model.named_modules()):
        for kind in (part._parameters, part._buffers):
            for name, tensor in kind.items():
                if tensor is not None:
                    kind[name] = _placed(tensor, _device_of(f"{path}.{name}", devices), kind is part._parameters)


def _placed(tensor: torch.Tensor, device: str, is_parameter: bool) -> torch.Tensor:
    moved = tensor.detach().to(device)
    return torch.nn.Parameter(moved, requires_grad=False) if is_parameter else moved


def _device_of(name: str, devices: dict[str, str]) -> str:
    return next(device for part, device in devices.items() if name.startswith(f"{part}."))


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with _Pretend():  # inference mode passes on composite operations, so split them into parts
        parts = func.decompose(*args, **kwargs)
    if parts is not NotImplemented:
        return parts
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    devices = {each.device for each in tensors if each.dim() or each.device.type != "cpu"}
    if func in ACCEPT_INDICES_OF_CPU:
        devices = {args[0].device, *(device for device in devices if device.type != "cpu")}
    if func not in MOVES and len(devices) > 1:
        raise RuntimeError(f"{func} got tensors on {' and '.join(sorted(map(str, devices)))}")
    target = args[0].device if func is ATEN.copy_.default else next(iter(devices), torch.device("cpu"))
    if kwargs.get("device") is not None:
        target, kwargs = torch.device(kwargs["device"]), {**kwargs, "device": torch.device("cpu")}
    result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if func._schema.name.rpartition("::")[2].endswith("_"):
        return args[0]
    return tree_map(lambda each: _wrapped(each, target), result)


def _inner(given: Any) -> Any:
    return given.inner if isinstance(given, PretendedTensor) else given


def _wrapped(given: Any, device: torch.device) -> Any:
    return PretendedTensor(given, device) if isinstance(given, torch.Tensor) and device.type == "gpu" else given
