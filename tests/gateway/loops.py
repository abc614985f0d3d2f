from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from polling import PATIENCE_S


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the coroutine of a test in a separate event loop."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **fixtures), PATIENCE_S))

    return run


async def until(true: Callable[[], Any]) -> None:
    async def found() -> None:
        while not true():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(found(), PATIENCE_S)
