"""The items of a `stoker.map`: futures among them are waited for, and they are put into batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any


class LostItem:
    """An item that cannot be had: a future that failed."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def settled(items: Iterable[Any]) -> Iterator[Any]:
    """The items; of a future among them its result, or Lost."""
    for item in items:
        yield _result(item) if isinstance(item, Future) else item


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except Exception as error:
        return LostItem(error)


def refuse_lost(items: Iterable[Any]) -> None:
    """Raise what a future raised that one of these items should have come from."""
    for item in items:
        if type(item) is LostItem:
            raise item.error


def batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """The items in lists of `size`; the last may be shorter."""
    while batch := list(itertools.islice(items, size)):
        yield batch
