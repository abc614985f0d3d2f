"""The client's side: Parsl's executor, `@stoker.app`, `stoker.load`, `stoker.map`, and the link to the manager.

Each name is resolved on first use: the CLI uses the link without importing Parsl.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Link": "client", "Session": "session", "StokerExecutor": "executor", "app": "apps", "load": "session",
    "map": "mapping",
}  # fmt: skip

__all__ = ["Link", "Session", "StokerExecutor", "app", "load", "map"]

if TYPE_CHECKING:
    from stoker.manager.executor.apps import app
    from stoker.manager.executor.client import Link
    from stoker.manager.executor.executor import StokerExecutor
    from stoker.manager.executor.mapping import map
    from stoker.manager.executor.session import Session, load


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stoker.manager.executor' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"stoker.manager.executor.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
