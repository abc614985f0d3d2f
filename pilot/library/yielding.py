"""What a function yields: its pieces one by one, or a list of them all."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import AsyncGeneratorType, GeneratorType
from typing import Any

from stoker.contexts.ambient import CallStop


def yields(result: Any) -> bool:
    """True for what a generator function returns, plain or async."""
    return type(result) is GeneratorType or type(result) is AsyncGeneratorType


def can_be_drained(result: Any) -> bool:
    """True for anything that gives pieces: a generator, or another iterator."""
    return hasattr(result, "__next__") or hasattr(result, "__anext__")


def drain(result: Any, put: Callable[[Any], bool], stop: CallStop) -> bool:
    """Hand each piece to `put`, in order. Ends early, and closes the generator, when `put` answers False; returns
    whether it came to its end."""
    if not hasattr(result, "__anext__"):
        try:
            return all(put(piece) for piece in result)
        finally:
            if hasattr(result, "close"):
                result.close()
    return bool(in_event_loop(_drain_async(result, put), stop))


async def _drain_async(result: Any, put: Callable[[Any], bool]) -> bool:
    try:
        async for piece in result:
            if not put(piece):
                return False
        return True
    finally:
        if hasattr(result, "aclose"):
            await result.aclose()


def as_list(result: Any, stop: CallStop) -> list[Any]:
    """All pieces of a generator."""
    pieces: list[Any] = []

    def put(piece: Any) -> bool:
        pieces.append(piece)
        return True

    drain(result, put, stop)
    return pieces


def in_event_loop(coroutine: Coroutine[Any, Any, Any], stop: CallStop) -> Any:
    """Run a coroutine in an event loop of its own. When the call is told to stop, cancel the coroutine's task and raise
    Evicted."""
    import asyncio  # takes 50 ms, which libraries without coroutines save

    async def run() -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        told: list[bool] = []

        def cancel() -> None:
            if task is not None and not told:
                told.append(True)
                task.cancel()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(cancel)

        stop.wakes(wake)
        try:
            return await coroutine
        finally:
            stop.forget(wake)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        stop.check()
        raise
