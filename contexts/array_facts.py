"""What an array, a tensor or a table holds, in a few values that differ when its content does.

numpy, torch, pandas and polars are looked for among the imported modules and never imported. Up to 64 kB an array is
taken byte by byte; a larger one by the sum of its words, in which every single change shows, and by a sample of them,
in which a change of their order does. A tensor's `_version` alone would not do: fused optimizers and `tensor.data` do
not raise it, so the content of a tensor in the CPU's memory is looked at as well.
"""

from __future__ import annotations

import array
import sys
import zlib
from collections.abc import Callable
from typing import Any

from stoker.contexts.own_attributes import home_of, own_attribute

SUMMED_BYTES = 4 * 1024 * 1024
"""So many bytes are summed for a captured name; of what is beyond, a sample is looked at."""
_EXACT_BYTES = 64 * 1024
_SAMPLE = 512
_LARGE_SAMPLE = 8192
_COLUMN_FIELDS = ("_ndarray", "_data", "_mask", "_pa_array", "_left", "_right", "_sparse_values")
"""Where the columns of pandas that are no numpy arrays keep what they hold."""


class Meter:
    """Counts the bytes that one walk has summed."""

    __slots__ = ("summed_bytes",)

    def __init__(self) -> None:
        self.summed_bytes = 0


Content = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Atoms, and objects that hold the rest."""
Reader = Callable[[Any, Meter], Content]


def reader_of(kind: type) -> Reader | None:
    """What reads the content of this class's instances; None for a class of another kind. What it gives may raise."""
    np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    home = home_of(kind).partition(".")[0]
    if issubclass(kind, bytearray | array.array):
        return _buffer
    if np is not None and issubclass(kind, np.ndarray):
        return _array
    if np is not None and issubclass(kind, np.generic) and home in ("numpy", "builtins"):
        return _scalar
    if torch is not None and home == "torch" and issubclass(kind, torch.Tensor):
        return _tensor
    if _is_pandas(kind, "generic", "NDFrame"):
        return _table
    if home == "pandas" and _is_pandas(kind, "arrays.base", "ExtensionArray"):
        return _column
    polars = sys.modules.get("polars")
    if home == "polars" and polars is not None and issubclass(kind, (polars.DataFrame, polars.Series)):
        return _polars
    return None


def has_attributes(reader: Reader) -> bool:
    """True for what may hold attributes besides its content: arrays and buffers, whose subclasses add them."""
    return reader is _array or reader is _buffer


def is_torch_module(kind: type) -> bool:
    """True for a class of networks or layers."""
    base = getattr(sys.modules.get("torch.nn"), "Module", None)
    return base is not None and issubclass(kind, base)


def is_index(kind: type) -> bool:
    """True for an index of pandas, which never changes in place."""
    return _is_pandas(kind, "indexes.base", "Index")


def _is_pandas(kind: type, module: str, name: str) -> bool:
    base = getattr(sys.modules.get(f"pandas.core.{module}"), name, None)
    return base is not None and issubclass(kind, base)


def _buffer(value: Any, _meter: Meter) -> Content:
    view = memoryview(value)
    return (view.nbytes, bytes(view) if view.nbytes <= _EXACT_BYTES else zlib.crc32(view)), ()


def _scalar(value: Any, _meter: Meter) -> Content:
    return (value.dtype.str, value.tobytes()), ()


def _array(value: Any, meter: Meter) -> Content:
    np: Any = sys.modules["numpy"]
    plain = np.ndarray.view(value, np.ndarray) if type(value) is not np.ndarray else value
    if plain.dtype.hasobject:
        return plain.shape, tuple(plain.ravel()[:_SAMPLE].tolist())
    return (plain.shape, plain.dtype.str, *_content(plain, meter)), ()


def _content(plain: Any, meter: Meter) -> tuple[Any, ...]:
    """The numbers in a plain numpy array."""
    if plain.nbytes <= _EXACT_BYTES:
        return (plain.tobytes(),)
    np: Any = sys.modules["numpy"]
    meter.summed_bytes += plain.nbytes
    if meter.summed_bytes > SUMMED_BYTES:
        plain = _thinned(plain)
    flat = np.ascontiguousarray(plain).reshape(-1).view(np.uint8)
    words = flat[: flat.size // 8 * 8].view(np.uint64)
    step = max(1, words.size // _SAMPLE)
    return (int(np.add.reduce(words)), words[::step].tobytes(), flat[words.size * 8 :].tobytes())


def _thinned(plain: Any) -> Any:
    """Elements of an array at even steps along its longest axis, about as many as a sample has."""
    axis = max(range(plain.ndim), key=plain.shape.__getitem__)
    kept = max(1, _LARGE_SAMPLE * plain.shape[axis] // plain.size)
    return plain[(slice(None),) * axis + (slice(None, None, -(-plain.shape[axis] // kept)),)]


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
    meter.summed_bytes += rows.estimated_size()
    if meter.summed_bytes > SUMMED_BYTES:
        rows = rows.gather_every(max(1, table.shape[0] // _LARGE_SAMPLE))
    hashes = rows.hash_rows()
    sample = hashes.gather_every(max(1, len(hashes) // _SAMPLE)).to_list()
    return (*table.shape, *rows.columns, *map(str, rows.dtypes), hashes.sum(), *sample), ()
