"""What a function yields: its pieces one by one, or a list of them all."""

from __future__ import annotations

from collections.abc import Callable
from types import AsyncGeneratorType, GeneratorType
from typing import Any


def yields(result: Any) -> bool:
    """True for what a generator function returns, plain or async."""
    return type(result) is GeneratorType or type(result) is AsyncGeneratorType


def can_be_drained(result: Any) -> bool:
    """True for anything that gives pieces: a generator, or another iterator."""
    return hasattr(result, "__next__") or hasattr(result, "__anext__")


def drain(result: Any, put: Callable[[Any], bool]) -> bool:
    """Hand each piece to `put`, in order. Ends early, and closes the generator, when `put` answers False; returns
    whether it came to its end."""
    if not hasattr(result, "__anext__"):
        try:
            return all(put(piece) for piece in result)
        finally:
            if hasattr(result, "close"):
                result.close()
    import asyncio  # takes 50 ms, which libraries without coroutines save

    return asyncio.run(_drain_async(result, put))


async def _drain_async(result: Any, put: Callable[[Any], bool]) -> bool:
    try:
        async for piece in result:
            if not put(piece):
                return False
        return True
    finally:
        if hasattr(result, "aclose"):
            await result.aclose()


def as_list(result: Any) -> list[Any]:
    """All pieces of a generator."""
    pieces: list[Any] = []

    def put(piece: Any) -> bool:
        pieces.append(piece)
        return True

    drain(result, put)
    return pieces
