"""Which samples an iteration is of, and which of these a rank computes: functions of the seed and the numbers alone.

Epochs are shuffled one by one and read one after the other, so a batch may end one and begin the next. Nothing of it is
state: a run that goes on at iteration 70, on however many devices, takes the very samples that one in a piece would.
A rank takes every n-th sample of the batch by length, so that ranks have as many samples, and nearly as many tokens.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Sized(Protocol):
    """What has a length in tokens."""

    def __len__(self) -> int: ...


Row = TypeVar("Row", bound=Sized)


def batch_indices(iteration: int, *, batch: int, count: int, seed: int) -> list[int]:
    """The samples of an iteration (from 0), by index into `count` of them."""
    places = range(iteration * batch, (iteration + 1) * batch)
    epochs = {place // count for place in (places[0], places[-1])}
    orders = {epoch: _order(epoch, count=count, seed=seed) for epoch in range(min(epochs), max(epochs) + 1)}
    return [orders[place // count][place % count] for place in places]


def share(rows: Sequence[Row], *, rank: int, size: int) -> list[Row]:
    """The rows that this rank computes: every `size`-th, longest first."""
    return sorted(rows, key=len, reverse=True)[rank::size]


def chunks(rows: Sequence[Row], *, most: int) -> list[Sequence[Row]]:
    """The rows in pieces that fit the device; `most` 0: in one."""
    step = most or len(rows) or 1
    return [rows[start : start + step] for start in range(0, len(rows), step)]


@functools.lru_cache(maxsize=4)
def _order(epoch: int, *, count: int, seed: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)
