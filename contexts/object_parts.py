"""The parts of objects whose pickle does not show their content: paths, methods, arrays, tensors, and others.

`parts_of` takes an object apart without looking into its parts; `digest` walks over them.
"""

from __future__ import annotations

import enum
import functools
import pathlib
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


class Text(NamedTuple):
    """A string."""

    text: str


class Raw(NamedTuple):
    """Bytes with a tag."""

    tag: str
    content: bytes


class Value(NamedTuple):
    """Another value. `step` leads to it from the object, for errors."""

    value: Any
    step: str = ""


class ObjectParts(NamedTuple):
    """An object's parts in order, and a word for its kind (empty for a single leaf)."""

    tag: str
    parts: Sequence[Text | Raw | Value]


def parts_of(value: Any, kind: type) -> ObjectParts | None:
    """The parts of an object of this type; None if it is to be taken apart by its pickle."""
    if isinstance(value, pathlib.PurePath):
        return ObjectParts("path", [Text(str(value))])
    if isinstance(value, enum.Enum):
        return ObjectParts("enum", [Value(kind), Text(value.name)])
    if isinstance(value, types.MethodType):
        return ObjectParts("method", [Value(value.__func__), Value(value.__self__, " its object")])
    if kind in (classmethod, staticmethod):
        return ObjectParts(kind.__name__, [Value(value.__func__)])
    if kind is property:
        return ObjectParts("property", [Value(accessor) for accessor in (value.fget, value.fset, value.fdel)])
    if kind is functools.cached_property:
        return ObjectParts("cached-property", [Value(value.func)])
    if kind in _WEAK:
        return ObjectParts(kind.__name__, [Value(set(value) if kind is weakref.WeakSet else dict(value))])
    if isinstance(value, functools.partial):
        return ObjectParts("partial", [Value(part) for part in (value.func, value.args, value.keywords)])
    if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
        owner = getattr(value, "__self__", None)
        name = f"{getattr(value, '__module__', None) or ''}.{value.__qualname__}"
        return ObjectParts("builtin", [Text(name), Value(None if isinstance(owner, types.ModuleType) else owner)])
    if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        return ObjectParts("slot", [Text(value.__name__)])
    return _parts_of_array(value, kind)


def kind_name(kind: type) -> str:
    """A type's name with its module, unless it is a builtin one."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ---- arrays of numpy, tensors and storages of PyTorch


def _parts_of_array(value: Any, kind: type) -> ObjectParts | None:
    if _is_array(value):
        return ObjectParts(
            "array", [Text(str(value.dtype)), Value(tuple(value.shape)), Raw("data", bytes(value.tobytes()))]
        )
    if (storage := _storage_bytes(value)) is not None:
        return ObjectParts("", [Raw("storage", storage)])
    if _is_dense_tensor(value):
        needs_gradient = Value(bool(value.requires_grad))
        facts: list[Text | Raw | Value] = [
            Text(kind_name(kind)),
            Text(str(value.dtype)),
            Value(tuple(value.shape)),
            needs_gradient,
        ]
        return ObjectParts("tensor", [*facts, Raw("data", _tensor_bytes(value))])
    return None


def _is_array(value: Any) -> bool:
    return type(value) is getattr(sys.modules.get("numpy"), "ndarray", None) and not value.dtype.hasobject


def _is_dense_tensor(value: Any) -> bool:
    """True for a PyTorch tensor with values in memory. Its pickle names the address of its storage."""
    torch: Any = sys.modules.get("torch")  # lacks some names while another thread imports it
    return (
        type(value) in (getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None))
        and not vars(value)
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type != "meta"
    )


def _storage_bytes(value: Any) -> bytes | None:
    """Return the bytes of a PyTorch storage; None for anything else."""
    torch: Any = sys.modules.get("torch")
    untyped: Any = getattr(torch, "UntypedStorage", ())
    typed: Any = getattr(torch, "TypedStorage", ())
    if isinstance(value, typed):
        plain = value._untyped_storage
    elif isinstance(value, untyped):
        plain = value
    else:
        return None
    return _tensor_bytes(torch.empty(0, dtype=torch.uint8).set_(plain.cpu()))


def _tensor_bytes(value: Any) -> bytes:
    torch = sys.modules["torch"]
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())
