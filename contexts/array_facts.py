"""What an array, a tensor or a table holds, in a few values that differ when its content does.

numpy, torch, pandas and polars are looked for among the imported modules and never imported. Up to 64 kB an array is
taken byte by byte; a larger one by a checksum (CRC-32) of its bytes, in which two elements that change places show too.
A `Meter` bounds the bytes that are read at one look: of what is beyond, a sample is taken. A tensor's `_version` alone
would not do: fused optimizers and `tensor.data` do not raise it, so the content of a tensor in the CPU's memory is
looked at as well.
"""

from __future__ import annotations

import array
import sys
import zlib
from collections.abc import Callable
from typing import Any

from stoker.contexts.own_attributes import home_of, own_attribute

WHOLE_BYTES = 4 * 1024 * 1024
"""One look at a function's values reads this many bytes whole, and a sample of the rest."""
MOST_VALUES_OF_ALL = 16_384
"""One look at all names of a function and its helpers visits this many values at most."""
_SAMPLED_BYTES = 256 * 1024
"""One look reads samples of about this many bytes in all; each sample may take an eighth of the bytes left."""
_SMALLEST_SAMPLE_BYTES = 512
_EXACT_BYTES = 64 * 1024
_OBJECTS = 512
_NUMBERS = (int, float, complex)
_PLACE = "stoker: the place of a row"
_COLUMN_FIELDS = ("_ndarray", "_data", "_mask", "_pa_array", "_left", "_right", "_sparse_values")
"""Where the columns of pandas that are no numpy arrays keep what they hold."""


class Meter:
    """Bounds what one look at a function's values costs: the values visited and the bytes read.

    What is left stands in the class until something is taken, since most functions take nothing.
    """

    values = MOST_VALUES_OF_ALL
    _whole_bytes = WHOLE_BYTES
    _sampled_bytes = _SAMPLED_BYTES

    def share_bytes(self, size_bytes: int) -> int:
        """How many bytes of an array may be read: all, or those of a sample, the smaller the more came before."""
        if size_bytes <= self._whole_bytes:
            self._whole_bytes -= size_bytes
            return size_bytes
        share = min(size_bytes, max(self._sampled_bytes // 8, _SMALLEST_SAMPLE_BYTES))
        self._sampled_bytes = max(0, self._sampled_bytes - share)
        return share


Content = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Atoms, and objects that hold the rest."""
Reader = Callable[[Any, Meter], Content]


def reader_of(kind: type) -> Reader | None:
    """What reads the content of this class's instances; None for a class of another kind. What it gives may raise."""
    home = home_of(kind).partition(".")[0]
    if issubclass(kind, bytearray | array.array):
        return _buffer
    if _derives(kind, "numpy", "ndarray"):
        return _array
    if home in ("numpy", "builtins") and _derives(kind, "numpy", "generic"):
        return _scalar
    if issubclass(kind, bytes | str):
        return _buffer
    if issubclass(kind, _NUMBERS):
        return _number
    if home == "torch" and _derives(kind, "torch", "Tensor"):
        return _tensor
    if _derives(kind, "pandas.core.generic", "NDFrame"):
        return _table
    if home == "pandas" and _derives(kind, "pandas.core.arrays.base", "ExtensionArray"):
        return _column
    if home == "polars" and (_derives(kind, "polars", "DataFrame") or _derives(kind, "polars", "Series")):
        return _polars
    return None


def has_attributes(reader: Reader) -> bool:
    """True for what may hold attributes besides its content: arrays, buffers and atoms, whose subclasses add them."""
    return reader is _array or reader is _buffer or reader is _number


def is_torch_module(kind: type) -> bool:
    """True for a class of networks or layers."""
    return _derives(kind, "torch.nn", "Module")


def is_index(kind: type) -> bool:
    """True for an index of pandas, which never changes in place."""
    return _derives(kind, "pandas.core.indexes.base", "Index")


def _derives(kind: type, module: str, name: str) -> bool:
    """True for a subclass of a module's class. A module that another thread is importing may not have the class yet."""
    base = getattr(sys.modules.get(module), name, None)
    return isinstance(base, type) and issubclass(kind, base)


def _buffer(value: Any, meter: Meter) -> Content:
    base: Any = next(base for base in (bytearray, array.array, bytes, str) if issubclass(type(value), base))
    length = base.__len__(value)
    size_bytes = length * (base.itemsize.__get__(value) if base is array.array else 1)
    share = meter.share_bytes(size_bytes)
    part = base.__getitem__(value, slice(None, None, max(1, -(-size_bytes // max(1, share)))))
    if base is str:
        part = part.encode("utf-8", "surrogatepass")
    return (length, bytes(part) if share <= _EXACT_BYTES else zlib.crc32(part)), ()


def _number(value: Any, _meter: Meter) -> Content:
    base: Any = next(base for base in _NUMBERS if issubclass(type(value), base))
    return (int.__int__(value) if base is int else base.__repr__(value),), ()  # -0.0 is not 0.0


def _scalar(value: Any, _meter: Meter) -> Content:
    return (value.dtype.str, value.tobytes()), ()


def _array(value: Any, meter: Meter) -> Content:
    np: Any = sys.modules["numpy"]
    plain = np.ndarray.view(value, np.ndarray) if type(value) is not np.ndarray else value
    if plain.dtype.hasobject:
        return plain.shape, tuple(plain.flat[:_OBJECTS].tolist())
    return (plain.shape, plain.dtype.str, *_content(plain, meter)), ()


def _content(plain: Any, meter: Meter) -> tuple[Any, ...]:
    """The numbers in a plain numpy array."""
    share = meter.share_bytes(plain.nbytes)
    if share < plain.nbytes:
        return (_sample(plain, max(1, share // plain.itemsize)).tobytes(),)
    if share <= _EXACT_BYTES:
        return (plain.tobytes(),)
    np: Any = sys.modules["numpy"]
    return (zlib.crc32(np.ascontiguousarray(plain).reshape(-1).view(np.uint8)),)


def _sample(plain: Any, count: int) -> Any:
    """About this many elements of an array, at even steps along its axes, the longest axis first."""
    if plain.flags.c_contiguous:
        return plain.reshape(-1)[:: -(-plain.size // count)]
    for axis in sorted(range(plain.ndim), key=plain.shape.__getitem__, reverse=True):
        plain = plain[(slice(None),) * axis + (slice(None, None, -(-plain.size // count)),)]
    return plain


def _tensor(tensor: Any, meter: Meter) -> Content:
    torch: Any = sys.modules["torch"]
    version = -1 if tensor.is_inference() else tensor._version
    device = tensor.device.type
    facts = (tuple(tensor.shape), id(tensor.dtype), device, tensor.requires_grad, version)
    if tensor.layout is not torch.strided or device == "meta":
        return facts, ()
    if device != "cpu":
        return (*facts, tensor.data_ptr()), ()
    plain = tensor.detach()
    try:
        numbers = plain.numpy()
    except (TypeError, RuntimeError):  # a kind of number that numpy does not know
        numbers = plain.view(torch.int16 if tensor.element_size() == 2 else torch.uint8).numpy()
    return (*facts, *_content(numbers, meter)), ()


def _table(table: Any, _meter: Meter) -> Content:
    held: Any = own_attribute(table, "_mgr")
    return (), (own_attribute(table, "_name"), *held.axes, *(block.values for block in held.blocks))


def _column(column: Any, _meter: Meter) -> Content:
    return (len(column),), tuple(getattr(column, name, None) for name in _COLUMN_FIELDS)


def _polars(table: Any, meter: Meter) -> Content:
    rows = table if hasattr(table, "hash_rows") else table.to_frame()
    size_bytes = rows.estimated_size()
    share = meter.share_bytes(size_bytes)
    if share < size_bytes:
        rows = rows.gather_every(-(-size_bytes // share))
    return (*table.shape, *rows.columns, *map(str, rows.dtypes), rows.with_row_index(_PLACE).hash_rows().sum()), ()
