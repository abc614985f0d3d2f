"""The client's side: Parsl's executor, `@stoker.app`, `stoker.load`, `stoker.map`, and the link to the manager.

Each name is resolved on first use: the CLI uses the link without importing Parsl.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Link": "stoker.manager.executor.client",
    "Session": "stoker.manager.executor.session",
    "StokerExecutor": "stoker.manager.executor.executor",
    "app": "stoker.manager.executor.apps",
    "load": "stoker.manager.executor.session",
    "map": "stoker.manager.executor.mapping",
}

__all__ = ["Link", "Session", "StokerExecutor", "app", "load", "map"]

if TYPE_CHECKING:
    from stoker.manager.executor.apps import app
    from stoker.manager.executor.client import Link
    from stoker.manager.executor.executor import StokerExecutor
    from stoker.manager.executor.mapping import map
    from stoker.manager.executor.session import Session, load


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'stoker.manager.executor' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
