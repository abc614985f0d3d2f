"""The key-value cache of a batch: a row a request, in arrays of rows of equal length.

A row's length is a power of two (`batching.row_tokens`), so an array holds requests of like length, and attention over
the whole array computes at most twice what is needed. Rows are dense: when one leaves, the last takes its place, so the
first `n` rows are those of `n` requests and no step copies or gathers. A request that outgrows its row moves to the
next longer array.

Paged memory (vLLM §4.1, arXiv:2309.06180) wastes less, but needs a kernel of its own; PyTorch's attention kernels take
arrays.
"""

from __future__ import annotations

from typing import Any

import torch

from stoker.contexts.batching import row_tokens

_FEWEST_ROWS = 4


class RowArray:
    """Keys and values of all layers for rows of one length: `[rows, heads, tokens, size]` each."""

    def __init__(self, *, tokens: int, layers: int, heads: int, size: int, dtype: torch.dtype, device: Any) -> None:
        self.tokens = tokens
        self.requests: list[int] = []
        """The request of each row."""
        self._shape = (heads, tokens, size)
        self._options = {"dtype": dtype, "device": device}
        self.capacity = 0
        """Rows that memory is held for."""
        self.version = 0
        """Changes when keys and values get new addresses."""
        self.keys = [torch.empty((0, *self._shape), **self._options) for _ in range(layers)]
        self.values = [torch.empty((0, *self._shape), **self._options) for _ in range(layers)]

    def set_capacity(self, rows: int) -> None:
        """Hold memory for so many rows, at least those that are in use. A layer at a time, so that only one is held
        twice meanwhile."""
        used = len(self.requests)
        self.version += 1
        self.capacity = min(self.capacity, max(rows, used))  # if memory ends half way, some layers have more rows
        for arrays in (self.keys, self.values):
            for layer, old in enumerate(arrays):
                new = torch.empty((max(rows, used), *self._shape), **self._options)
                new[:used] = old[:used]
                arrays[layer] = new
        self.capacity = max(rows, used)


class KVStore:
    """The rows of all requests of one model."""

    def __init__(self, *, layers: int, heads: int, size: int, dtype: torch.dtype, device: Any) -> None:
        self._make = {"layers": layers, "heads": heads, "size": size, "dtype": dtype, "device": device}
        self.token_bytes: int = 2 * layers * heads * size * dtype.itemsize
        """What one token of one row takes."""
        self.arrays: dict[int, RowArray] = {}
        self._of: dict[int, RowArray] = {}

    @property
    def held_tokens(self) -> int:
        """Tokens that all arrays have room for, in use or not."""
        return sum(array.tokens * array.capacity for array in self.arrays.values())

    @property
    def held_bytes(self) -> int:
        """Memory that all arrays hold."""
        return self.token_bytes * self.held_tokens

    @property
    def used_tokens(self) -> int:
        """The length of all rows in use."""
        return sum(array.tokens * len(array.requests) for array in self.arrays.values())

    def ensure(self, request: int, *, tokens: int, room_tokens: float) -> None:
        """Give the request a row that holds `tokens`; what its row holds already stays. All arrays together hold
        `room_tokens` at the most: the caller has checked that the rows in use fit."""
        size, old = row_tokens(tokens), self._of.get(request)
        if old is not None and old.tokens >= size:
            return
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        if old is not None:
            at = old.requests.index(request)
            kept = [(keys[at].clone(), values[at].clone()) for keys, values in zip(old.keys, old.values, strict=True)]
            self.free(request)  # its row may be the room that the longer one needs
        array = self.arrays.get(size)
        if array is None:
            array = self.arrays[size] = RowArray(tokens=size, **self._make)
        if len(array.requests) == array.capacity:
            self._grow(array, room_tokens)
        row = len(array.requests)
        for layer in (*array.keys, *array.values):
            layer[row].zero_()  # what an earlier request has left may be no number, and a mask does not hide that
        for layer, (keys, values) in enumerate(kept):
            array.keys[layer][row, :, : keys.shape[1]] = keys
            array.values[layer][row, :, : values.shape[1]] = values
        array.requests.append(request)
        self._of[request] = array

    def row(self, request: int) -> tuple[RowArray, int]:
        """Where the request's row is."""
        array = self._of[request]
        return array, array.requests.index(request)

    def free(self, request: int) -> None:
        """Take the request's row away. No-op if it has none."""
        array = self._of.pop(request, None)
        if array is None:
            return
        at, last = array.requests.index(request), len(array.requests) - 1
        if at != last:
            for arrays in (array.keys, array.values):
                for layer in arrays:
                    layer[at] = layer[last]
            array.requests[at] = array.requests[last]
        array.requests.pop()

    def trim(self, room_tokens: float = 0) -> None:
        """Give memory that is not in use back, until all arrays hold `room_tokens` at the most."""
        for array in list(self.arrays.values()):
            if self.held_tokens <= room_tokens:
                return
            array.set_capacity(len(array.requests))
            if not array.requests:
                del self.arrays[array.tokens]

    def clear(self) -> None:
        """Give all memory back."""
        self.arrays.clear()
        self._of.clear()

    def _grow(self, array: RowArray, room_tokens: float) -> None:
        wanted = max(_FEWEST_ROWS, 2 * array.capacity)
        held = self.held_tokens
        if held + (wanted - array.capacity) * array.tokens > room_tokens:
            self.trim(room_tokens - array.tokens)
            held = self.held_tokens
            wanted = array.capacity + max(1, min(wanted - array.capacity, int(room_tokens - held) // array.tokens))
        array.set_capacity(wanted)
        self.arrays[array.tokens] = array
